"""What the score command reports: tables on the console, CSV, JSON, pictures, W&B."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tas.analysis.bench import Bench
from lightning_tas.analysis.correlation import GROUP, LEVEL, Correlation, correlate, ranks
from lightning_tas.analysis.plots import save_figure
from lightning_tas.analysis.plots_proxies import correlation_bars, score_scatter
from lightning_tas.analysis.published import PUBLISHED_ON, Published, published
from lightning_tas.analysis.tables import text_table
from lightning_tas.commands.config import Config
from lightning_tas.commands.score_sizes import Size, size_of
from lightning_tas.commands.score_work import BASELINES, INITIAL, Job, Results
from lightning_tas.launch import provenance
from lightning_tas.launch.files import write_json, write_text
from lightning_tas.launch.loggers import RunLoggers

TITLES = {"initial": "at initialisation", "trained": "with the trained weights"}
DEFINITIONS = {
    "tau_a": "(concordant - discordant) / all pairs, mean over initialisations",
    "tau_b": "the same, corrected for ties",
    "low, high": f"{LEVEL} % BCa bootstrap interval of tau_b over networks",
    "spread": "standard deviation of tau_b between initialisations",
    "averaged": "tau_b of the networks' mean rank over the initialisations",
    "best_rank": f"mean best rank over all groups of {GROUP} networks: 0 always finds the best one, 0.5 is chance",
    "partial": "Kendall's partial tau given the parameter count",
    "invalid": "scores that are not valid, over all initialisations; such networks are ordered last",
}


@dataclass(frozen=True)
class Row:
    """One proxy against one accuracy."""

    weights: str
    column: str
    proxy: str
    found: Correlation
    seconds: float
    published: Published | None

    def flat(self) -> dict[str, Any]:
        """Numbers and words by name; None where undefined."""
        known = self.published or Published(None, None, None, "")
        return {
            "weights": self.weights,
            "accuracy": self.column,
            "proxy": self.proxy,
            **{key: value for key, value in asdict(self.found).items() if key != "per_init"},
            "seconds": self.seconds,
            "published_tau": known.tau,
            "published_spearman": known.spearman,
            "published_pearson": known.pearson,
            "published_in": known.source or None,
        }


@dataclass(frozen=True)
class Report:
    """Everything found: `rows` by weights and accuracy, params and MACs first, then by mean tau_b over accuracies."""

    config: Config
    job: Job
    bench: Bench
    results: Results
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, config: Config, job: Job, bench: Bench, results: Results) -> Report:
        """Correlate every proxy with every accuracy."""
        rows: list[Row] = []
        for weights, scores in results.scores.items():
            found = {
                (column, name): correlate(values, truth, job.params, seed=config.seed, resamples=config.bench.bootstrap)
                for column, truth in bench.accuracies.items()
                for name, values in scores.items()
            }
            order = _order(found, list(scores), list(bench.accuracies))
            for column in bench.accuracies:
                known = published(bench.family, column, bench.columns) if weights == INITIAL and bench.complete else {}
                rows += [
                    Row(weights, column, name, found[column, name], results.seconds[name], known.get(name))
                    for name in order
                ]
        return cls(config, job, bench, results, tuple(rows))

    def sections(self) -> Iterator[tuple[str, str, list[Row]]]:
        """(weights, accuracy, its rows), in the order of the tables."""
        for key in dict.fromkeys((row.weights, row.column) for row in self.rows):
            yield *key, [row for row in self.rows if (row.weights, row.column) == key]

    def text(self) -> str:
        """The tables."""
        parts = []
        for weights, column, rows in self.sections():
            known = np.isfinite(self.bench.accuracies[column])
            low, high = self.job.params[known].min() / 1e6, self.job.params[known].max() / 1e6
            draws = len(rows[0].found.per_init)
            title = (
                f"{column}, {TITLES[weights]}: {int(known.sum())} networks, {low:.2f} to {high:.2f} M params, "
                f"{draws} initialisation{'s' if draws > 1 else ''}"
            )
            parts.append(f"\n{title}\n{_table(rows)}")
        parts.append(
            f"tau-b with its {LEVEL} % bootstrap interval over networks and its standard deviation between "
            f"initialisations (sd);\nmBR: mean best rank in groups of {GROUP} (of all, where there are fewer), 0 is "
            "best, 0.5 chance; partial: tau-b given params;\ns: median seconds a network, alone"
        )
        told = sorted({row.published.source for row in self.rows if row.published is not None})
        parts += [f"published: {', '.join(told)}, {PUBLISHED_ON}"] if told else []
        return "\n".join(parts)

    def write(self, folder: Path, seconds: float) -> None:
        """scores.csv, correlations.csv and score.json."""
        write_text(folder / "scores.csv", _csv(self._score_rows()))
        write_text(folder / "correlations.csv", _csv([row.flat() for row in self.rows]))
        write_json(folder / "score.json", self.record(seconds))

    def record(self, seconds: float) -> dict[str, Any]:
        """The content of score.json."""
        params, bench = self.job.params, self.config.bench
        return {
            "recipe": self.config.recipe,
            "seed": self.config.seed,
            "family": self.bench.family,
            "networks": len(self.bench),
            "params": [int(params.min()), int(params.max())],
            "notes": list(self.bench.notes),
            "proxies": {name: _size(size_of(name, bench)) for name in self.job.names},
            "definitions": DEFINITIONS,
            "correlations": [{**row.flat(), "per_init": list(row.found.per_init)} for row in self.rows],
            **self.job.origin,
            "versions": provenance.versions(),
            "git": provenance.git_revision(),
            "command": provenance.command(),
            "host": provenance.host(),
            "timing": {"seconds": seconds, "seconds_per_network": dict(self.results.seconds)},
        }

    def _score_rows(self) -> list[dict[str, Any]]:
        found = []
        for weights, scores in self.results.scores.items():
            for init in range(max(len(values) for values in scores.values())):
                for place, arch in enumerate(self.bench.archs):
                    values = {name: _valid(rows[init, place]) for name, rows in scores.items()}
                    accuracies = {name: _valid(column[place]) for name, column in self.bench.accuracies.items()}
                    cell = {"network": place, "id": arch.id, "weights": weights, "init": init}
                    found.append({**cell, **accuracies, **values})
        return found

    def draw(self, folder: Path) -> dict[str, Path]:
        """scatter.png and bars.png (of the trained weights as well: scatter-trained.png, ...); their paths by name."""
        made = {}
        for weights, scores in self.results.scores.items():
            suffix = "" if weights == INITIAL else f"-{weights}"
            chosen = [row for row in self.rows if row.weights == weights]
            names = list(dict.fromkeys(row.proxy for row in chosen))
            order = {name: np.mean([ranks(values) for values in scores[name]], axis=0) for name in names}
            taus = {(row.column, row.proxy): row.found.tau_b for row in chosen}
            bars = {column: [row for row in chosen if row.column == column] for column in self.bench.accuracies}
            pictures = {
                "scatter": score_scatter(order, self.bench.accuracies, self.job.params, taus),
                "bars": correlation_bars(
                    {
                        column: {row.proxy: (row.found.tau_b, row.found.low, row.found.high) for row in rows}
                        for column, rows in bars.items()
                    },
                    BASELINES,
                ),
            }
            for name, figure in pictures.items():
                made[f"{name}{suffix}"] = save_figure(figure, folder / f"{name}{suffix}.png")
        return made

    def log(self, loggers: RunLoggers, pictures: Mapping[str, Path], folder: Path) -> None:
        """The same to W&B, where it is asked for."""
        files = [folder / name for name in ("scores.csv", "correlations.csv", "score.json")]
        loggers.log_scores([row.flat() for row in self.rows], pictures, files)


def plan_table(sizes: Mapping[str, tuple[Size, float]]) -> str:
    """Proxies with their batch, options and time."""
    rows = [
        [
            name,
            size.batch_size or "-",
            " ".join(f"{k}={v}" for k, v in size.options.items()) or "-",
            f"{spent:.3f}",
            size.source,
        ]
        for name, (size, spent) in sizes.items()
    ]
    return text_table(["proxy", "batch", "options", "s alone", "as in"], rows)


def _order(found: Mapping[tuple[str, str], Correlation], names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Baselines, then the others from the highest mean tau_b down; undefined ones last."""

    def mean(name: str) -> float:
        defined = [tau for column in columns if (tau := found[column, name].tau_b) is not None]
        return float(np.mean(defined)) if defined else -np.inf

    rest = sorted((name for name in names if name not in BASELINES), key=mean, reverse=True)
    return [*BASELINES, *rest]


def _table(rows: Sequence[Row]) -> str:
    header = ["proxy", "tau-a", "tau-b", f"{LEVEL} % interval", "sd", "Spearman", "Pearson", "mBR", "partial", "s"]
    cells = []
    told = any(row.published for row in rows)
    invalid = any(row.found.invalid for row in rows)
    for row in rows:
        c, known = row.found, row.published
        interval = "-" if c.low is None else f"{_number(c.low)} to {_number(c.high)}"
        line = [row.proxy, _number(c.tau_a), _number(c.tau_b), interval, _number(c.spread), _number(c.spearman)]
        line += [_number(c.pearson), _number(c.best_rank), _number(c.partial), f"{row.seconds:.3f}"]
        line += [str(c.invalid)] if invalid else []
        line += [_number(known.tau if known else None), _number(known.spearman if known else None)] if told else []
        cells.append(line)
    header += ["invalid"] if invalid else []
    header += ["published tau", "published rho"] if told else []
    return text_table(header, cells)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _valid(value: float) -> float | None:
    """A number of a CSV; empty where there is none."""
    return float(value) if np.isfinite(value) else None


def _size(size: Size) -> dict[str, Any]:
    return {"batch_size": size.batch_size, "options": dict(size.options), "source": size.source}


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
