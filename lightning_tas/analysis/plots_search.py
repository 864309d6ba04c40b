"""The picture of a search: how its best score rose, and what it found at which size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from lightning_tas.analysis.plots import say
from lightning_tas.search.objective import heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightning_tas.search.history import Entry


def search_figure(
    generations: Sequence[Mapping[str, Any]],
    history: Sequence[Entry],
    best: Sequence[Entry],
    front: Sequence[Entry],
    score: str,
) -> Figure:
    """Best and mean score over evaluations beside all networks, score over parameters [M], with the Pareto front.

    A search of one generation, or of none, as an exact one is, has no course: its networks are the only panel.
    """
    course = len(generations) > 1
    figure = Figure(figsize=(10.5 if course else 5.6, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if course else 1, squeeze=False)[0]
    if course:
        _course(panels[0], generations, heading(score))
    _networks(panels[-1], history, best, front, heading(score))
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


def _course(axes: Axes, generations: Sequence[Mapping[str, Any]], score: str) -> None:
    rows = [{**row, **{key: np.nan for key in ("best", "mean") if row[key] is None}} for row in generations]
    at = [row["evaluations"] for row in rows]
    # Markers where generations are few: a value between two that are missing has no line.
    marker = "." if len(rows) <= 30 else ""
    axes.plot(at, [row["best"] for row in rows], drawstyle="steps-post", marker=marker, label="best so far")
    axes.plot(at, [row["mean"] for row in rows], alpha=0.6, marker=marker, label="mean of the generation")
    if all(row["best"] is None or not np.isfinite(row["best"]) for row in rows):
        say(axes, "no network has a score")
    axes.set(xlabel="evaluations", ylabel=score, title="Course of the search")


def _networks(axes: Axes, history: Sequence[Entry], best: Sequence[Entry], front: Sequence[Entry], score: str) -> None:
    shown = [entry for entry in history if np.isfinite(entry.value)]
    if shown:
        axes.scatter([e.params / 1e6 for e in shown], [e.value for e in shown], s=6, alpha=0.35, label="scored")
    given_up = [entry for entry in history if entry.dropped and np.isfinite(entry.estimate)]
    if given_up:
        label = "given up by racing (estimates)"
        places = [e.params / 1e6 for e in given_up]
        axes.scatter(places, [e.estimate for e in given_up], s=5, alpha=0.25, color="gray", label=label)
    if front:
        ordered = sorted(front, key=lambda entry: entry.params)
        marker = "o" if len(ordered) <= 30 else ""
        places = [e.params / 1e6 for e in ordered]
        axes.plot(places, [e.value for e in ordered], "-", lw=1, marker=marker, ms=4, mfc="none", label="Pareto front")
    if best:
        axes.scatter([e.params / 1e6 for e in best], [e.value for e in best], marker="*", s=120, label="handed on")
    if not (shown or given_up or front or best):
        say(axes, "no network has a score")
    axes.set(xlabel="parameters [M]", ylabel=score, title="Networks")
