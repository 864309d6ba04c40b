"""Search strategies beside each other: the best network so far after equal numbers of evaluations, over several seeds.

Curves come from searches in memory (`Curve.of`) or from the run folders that a search has written (`read_runs`). A
rank-combined proxy has no value of its own, so there the networks of all runs are ranked together, once.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_tas.analysis.tables import text_table
from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json
from lightning_tas.proxies.registry import proxies, proxy
from lightning_tas.search.objective import heading

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One search: `best` (evaluations,) is the greatest value among the first 1, 2, 3, ... networks."""

    strategy: str
    seed: int
    best: Floats

    @classmethod
    def of(cls, strategy: str, seed: int, values: Sequence[float] | Floats) -> Curve:
        """From the values of the networks in the order in which they were evaluated; -inf where there is none."""
        found = np.asarray(values, dtype=np.float64)
        if found.ndim != 1 or not len(found) or np.isnan(found).any():
            raise UserError(f"strategies: {strategy} of seed {seed} has no values, or some that are not numbers")
        return cls(strategy, seed, np.maximum.accumulate(found))

    def after(self, evaluations: int) -> float:
        """The best after so many evaluations; a search that ended before has found what it will find."""
        return float(self.best[min(evaluations, len(self.best)) - 1])


def read_runs(folders: Sequence[Path]) -> list[Curve]:
    """Curves of searches by the files in their run folders.

    Raises:
        UserError: a folder without a search; searches of different spaces or for different scores.
    """
    records, tables = [], []
    for folder in folders:
        records.append(read_json(folder / "search.json", key="runs"))
        path = folder / "search.csv"
        if not path.exists():
            raise UserError(f"runs: {str(folder)!r} has no search.csv; valid: folders of searches that are finished")
        content = path.read_bytes()
        if records[-1].get("table_sha256") not in (None, hashlib.sha256(content).hexdigest()):
            raise UserError(f"runs: {str(path)!r} is damaged, or was edited: it is not what search.json was written of")
        tables.append(list(csv.DictReader(io.StringIO(content.decode(), newline=""))))
    for key in ("score", "space"):
        different = [str(f) for f, r in zip(folders, records, strict=True) if r[key] != records[0][key]]
        if different:
            raise UserError(f"runs: {', '.join(different)} has another {key} than {str(folders[0])!r}")
    values = iter(_values(str(records[0]["score"]), [row for table in tables for row in table]).tolist())
    return [
        Curve.of(str(record["strategy"]), int(record["seed"]), [next(values) for _ in table])
        for record, table in zip(records, tables, strict=True)
    ]


def _values(score: str, rows: Sequence[Mapping[str, str]]) -> Floats:
    """The objective of all networks of all runs; a rank-combined one ranks them together."""
    combined = proxy(score) if score in proxies() else None
    if combined is None or combined.combine is None:
        return np.array([float(row["objective"]) for row in rows])
    parts = combined.combines
    names = [(name, f"{name}.value") for name in parts]
    names += [(key, key) for key in rows[0] if any(key.startswith(f"{part}.") for part in parts)]
    valid = np.array([all(row[key] not in ("", "-inf", "nan") for key, _ in names) for row in rows])
    raw = {name: np.array([float(row[key]) for row, ok in zip(rows, valid, strict=True) if ok]) for key, name in names}
    found = np.full(len(rows), -np.inf)
    if valid.any():
        found[valid] = combined.combine(raw)
    return found


def comparison_table(curves: Sequence[Curve], score: str, at: Sequence[int], optimum: float | None = None) -> str:
    """Mean and standard deviation over seeds of the best `score` after each of the numbers of evaluations `at`.

    With the `optimum` of the whole space also the share of seeds that found it, and what the mean lacks of it [%].
    """
    rows = []
    for name, group in grouped(curves).items():
        cells: list[str] = []
        for evaluations in at:
            best = np.array([curve.after(evaluations) for curve in group])
            spread = best.std(ddof=1) if len(best) > 1 else float("nan")
            cells.append(f"{best.mean():.6g} ± {spread:.2g}")
        final = np.array([curve.after(at[-1]) for curve in group])
        if optimum is not None:
            cells.append(f"{100 * (optimum - final.mean()) / abs(optimum):.3f}")
            cells.append(f"{np.isclose(final, optimum, rtol=1e-12).sum()}/{len(final)}")
        rows.append([name, len(group), *cells])
    heads = [f"best {heading(score)} after {evaluations:,}" for evaluations in at]
    more = ["short of the optimum [%]", "found it"] if optimum is not None else []
    return text_table(["strategy", "seeds", *heads, *more], rows)


def grouped(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Curves by strategy, in the order of first appearance."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.strategy, []).append(curve)
    return found


def comparison_figure(
    curves: Sequence[Curve], score: str, evaluations: int, title: str, optimum: float | None = None
) -> Figure:
    """Best `score` so far over evaluations: the mean over seeds, and the range of the seeds as a band."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    at = np.unique(np.geomspace(1, evaluations, 400).round().astype(int))
    for name, group in grouped(curves).items():
        best = np.array([[curve.after(int(n)) for n in at] for curve in group])  # (seeds, points)
        best = np.where(np.isfinite(best), best, np.nan)
        label = f"{name} ({len(group)} seed{'s' if len(group) > 1 else ''})"
        marker = "." if len(at) <= 30 else ""  # one evaluation would have no line
        (line,) = axes.plot(at, np.nanmean(best, axis=0), drawstyle="steps-post", marker=marker, label=label)
        band = (np.nanmin(best, axis=0), np.nanmax(best, axis=0))
        axes.fill_between(at, *band, step="post", alpha=0.2, color=line.get_color())
    if optimum is not None:
        axes.axhline(optimum, color="black", linestyle="--", linewidth=1, label="optimum of the whole space")
    axes.set(xscale="log", xlabel="evaluations", ylabel=f"best {heading(score)} so far", title=title)
    axes.grid(alpha=0.3)
    axes.legend(title="line: mean of the seeds, band: their range", title_fontsize=8)
    return figure
