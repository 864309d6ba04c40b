"""What a search leaves behind: `search.csv`, `search.json`, `search.png`, rows on W&B, and a state that resumes it."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_tas.analysis.plots import save_figure
from lightning_tas.analysis.plots_search import search_figure
from lightning_tas.analysis.tables import text_table
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.launch import provenance
from lightning_tas.launch.files import read_json, read_torch, write_json, write_text, write_torch
from lightning_tas.launch.results import Specialised, write_result
from lightning_tas.search.history import Entry
from lightning_tas.search.objective import heading
from lightning_tas.search.strategy import Strategy

STATE, TABLE, RECORD, PICTURE = "search-state.pt", "search.csv", "search.json", "search.png"
_HEADS = {"latency": "latency, estimated [ms]", "activations": "activations [MB]"}
_SCALES = {"activations": 1e6}
BEST = "best"
"""The label of the network that a search hands on; further ones are best-2, best-3, ..."""


@dataclass(frozen=True)
class Found:
    """What one search found: its best networks, what it took, and why it ended.

    more: further facts for its record. latency: of networks measured whole by id, as of `latency.Latency`, where it is
    limited; left_out: those that break the limit then; why_none: where `networks` is empty for it.
    """

    networks: list[Entry]
    generations: list[dict[str, Any]]
    evaluations: int
    stopped: str
    front: list[Entry]
    more: Mapping[str, Any] = field(default_factory=dict)
    latency: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    left_out: Sequence[Entry] = ()
    why_none: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        named = zip(labels(self.networks), self.networks, strict=True)
        return {
            "networks": [self._measured(label, entry) for label, entry in named],
            "evaluations": self.evaluations,
            "stopped": self.stopped,
            "generations": self.generations,
            "front": [entry_dict(entry.arch.id, entry) for entry in self.front],
            **self.more,
            **({"left_out": [self._measured(e.arch.id, e) for e in self.left_out]} if self.latency else {}),
        }

    def _measured(self, label: str, entry: Entry) -> dict[str, Any]:
        taken = self.latency.get(entry.arch.id)
        return entry_dict(label, entry) | ({} if taken is None else {"measured_latency": dict(taken)})


def labels(networks: Sequence[Any]) -> list[str]:
    """best, best-2, best-3, ..."""
    return [BEST if i == 0 else f"{BEST}-{i + 1}" for i in range(len(networks))]


def entry_dict(label: str, entry: Entry) -> dict[str, Any]:
    """One network as JSON."""
    scores = {name: {"value": _number(score.value), **_numbers(score.extras)} for name, score in entry.scores.items()}
    return {
        "label": label,
        "id": entry.arch.id,
        "arch": entry.arch.to_dict(),
        "score": _number(entry.value),
        "scores": scores,
        "params": int(entry.params),
        "macs": int(entry.macs),
        **further(entry),
        "generation": entry.generation,
    }


def further(entry: Entry) -> dict[str, float]:
    """What is limited besides params and MACs: latency [ms] as the table estimates it, activations [bytes]."""
    return {name: float(value) for name, value in entry.quantities.items() if name not in ("params", "macs")}


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if abs(value) < float("inf") else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {key: _number(value) for key, value in values.items()}


def read_found(path: Path) -> dict[str, Architecture]:
    """Label to architecture of a `search.json`."""
    record = read_json(path, key="search")
    try:
        return {entry["label"]: Architecture.from_dict(entry["arch"]) for entry in record["networks"]}
    except (KeyError, TypeError):
        raise UserError(f"search: {str(path)!r} is not a search.json of this version") from None


def generations_table(rows: Sequence[Mapping[str, Any]], score: str, shown: int = 12) -> str:
    """The course of a search for `score` as text: at most `shown` generations, first and last among them."""
    picked = rows
    if len(rows) > shown:
        step = (len(rows) - 1) / (shown - 1)
        picked = [rows[round(i * step)] for i in range(shown)]
    cells = [
        [
            row["generation"],
            f"{row['evaluations']:,}",
            _text(row["best"]),
            _text(row["mean"]),
            f"{100 * row['acceptance']:.0f}",
            f"{100 * row['unique']:.0f}",
        ]
        for row in picked
    ]
    names = [f"{which} {heading(score)}" for which in ("best", "mean")]
    table = text_table(["generation", "evaluations", *names, "accepted [%]", "unique [%]"], cells)
    if len(picked) < len(rows):
        table += f"\n({len(picked)} of {len(rows):,} generations; all are in {RECORD})"
    return table


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def networks_table(found: Found, score: str) -> str:
    """The best networks as text; the generation they came up in, where there were generations."""
    course = bool(found.generations)
    more = list(further(found.networks[0])) if found.networks else []
    rows = [
        [
            label,
            f"{e.params / 1e6:.3f}",
            f"{e.macs / 1e9:.4f}",
            *(f"{e.quantities[name] / _SCALES.get(name, 1):.4g}" for name in more),
            *([f"{found.latency[e.arch.id]['median_ms']:.4g}"] if found.latency else []),
            f"{e.value:.6g}",
            *([e.generation] if course else []),
            e.arch.id,
        ]
        for label, e in zip(labels(found.networks), found.networks, strict=True)
    ]
    heads = [*(_HEADS.get(name, name) for name in more), *(["latency, measured [ms]"] if found.latency else [])]
    heads += [heading(score), *(["generation"] if course else [])]
    return text_table(["network", "params [M]", "MACs [G]", *heads, "id"], rows)


def csv_text(strategy: Strategy) -> str:
    """Every network that was scored, in order, with its costs and scores."""
    entries = list(strategy.history)
    names = sorted({(name, key) for entry in entries for name, score in entry.scores.items() for key in score.extras})
    plain = sorted({name for entry in entries for name in entry.scores})
    more_costs = list(further(entries[0])) if entries else []
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["index", "generation", "id", "params", "macs", *more_costs, "objective", *plain]
        + [f"{name}.{key}" for name, key in names]
    )
    for entry in entries:
        own = [entry.scores[name].value if name in entry.scores else "" for name in plain]
        more = [entry.scores[name].extras.get(key, "") if name in entry.scores else "" for name, key in names]
        costs = [int(entry.params), int(entry.macs), *further(entry).values()]
        writer.writerow([entry.index, entry.generation, entry.arch.id, *costs, entry.value, *own, *more])
    return buffer.getvalue()


def save_state(folder: Path, key: str, state: Mapping[str, Any]) -> None:
    """Keep the state of a search that is under way; `key` says of which."""
    write_torch(folder / STATE, {"key": key, **state})


def load_state(folder: Path, key: str) -> dict[str, Any] | None:
    """The state of this very search, if it was under way.

    Raises:
        UserError: it is damaged: what may be days of work is not begun anew without a word.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = read_torch(path)
    except Exception as error:  # of many kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"search: its state {str(path)!r} cannot be read ({reason}); remove the file to begin the search anew"
        ) from error
    return dict(state) if isinstance(state, dict) and state.get("key") == key else None


def write_winners(path: Path, found: Found, settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Write a `result.json` of the networks found, not measured beyond their scores; return the record."""
    names, record = labels(found.networks), found.to_dict()
    keys = ("label", "id", "score", "latency", "measured_latency")
    lists = ("networks", "left_out") if found.latency else ()
    measured = {which: [{key: one[key] for key in keys} for one in record[which]] for which in lists}
    networks = [
        Specialised(label, e.arch, int(e.params), int(e.macs), {}, e.value)
        for label, e in zip(names, found.networks, strict=True)
    ]
    return write_result(
        path,
        networks,
        **{key: settings[key] for key in ("seed", "score", "limits", "latency") if key in settings},
        **({"measured_latency": measured} if measured else {}),
        checkpoint_sha256=settings["weights_sha256"],
        versions=provenance.versions(),
        git=provenance.git_revision(),
        command=provenance.command(),
        host=provenance.host(),
        timing={},
        **more,
    )


def write(folder: Path, strategy: Strategy | None, found: Found, settings: Mapping[str, Any], score: str) -> Path:
    """Write table, record and picture; returns the picture's path."""
    record = {**settings, **found.to_dict()}
    if strategy is not None:
        text = csv_text(strategy)
        write_text(folder / TABLE, text)
        record["table_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    write_json(folder / RECORD, record)
    history = list(strategy.history) if strategy is not None else []  # an exact search scores no network by itself
    picture = folder / PICTURE
    save_figure(search_figure(found.generations, history, found.networks, found.front, score), picture)
    return picture
