"""Pictures of the score command: scores against accuracies, and correlations with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from lightning_tas.analysis.correlation import LEVEL
from lightning_tas.analysis.plots import say

Interval = tuple[float | None, float | None, float | None]
"""Value, lower and upper bound; None is undefined."""
ACROSS = 3
"""Panels of bars beside one another."""
PAD = 0.06
"""Space around panels, as a share of one."""


def plain(text: str) -> str:
    """`text` as it is: matplotlib takes what stands between dollar signs for a formula."""
    return text.replace("$", r"\$")


def score_scatter(
    order: Mapping[str, NDArray[np.float64]],
    accuracies: Mapping[str, NDArray[np.float64]],
    params: NDArray[np.float64],
    taus: Mapping[tuple[str, str], float | None],
) -> Figure:
    """A grid: a row for each proxy, a column for each accuracy [%], a dot for each network, coloured by parameters [M].

    Across a panel runs the rank by score, from the worst network to the best; upwards the accuracy, over the range that
    the column's title states. All panels are drawn in one set of axes: a hundred sets would take half a minute.

    Args:
        order: proxy to the networks' ranks by score (mean over initialisations), the highest is best.
        accuracies: name to accuracy of every network; NaN is left out.
        params: parameter counts.
        taus: (accuracy, proxy) to the correlation written over the panel.
    """
    rows, columns = len(order), len(accuracies)
    figure = Figure(figsize=(2.2 + 1.7 * columns, 1.2 + 1.25 * rows), layout="constrained")
    axes = figure.subplots()
    points: list[NDArray[np.float64]] = []
    for row, (proxy, places) in enumerate(order.items()):
        for column, (name, truth) in enumerate(accuracies.items()):
            known = np.isfinite(truth)
            # Accuracies that are all equal lie on the bottom.
            up = (truth[known] - truth[known].min()) / (np.ptp(truth[known]) or 1.0)
            across = places[known] / len(places)
            inside = (column + PAD + (1 - 3 * PAD) * across, row + 1 - 2 * PAD - (1 - 5 * PAD) * up)
            points.append(np.stack([*inside, params[known] / 1e6]))
            tau = taus[name, proxy]
            said = "undefined" if tau is None else f"{tau:.2f}"
            axes.text(column + PAD, row + 2 * PAD, f"τ {said}", fontsize=7, va="center")
    corners = [(column, row + 2.5 * PAD) for row in range(rows) for column in range(columns)]
    frames = [Rectangle(corner, 1 - PAD, 1 - 3 * PAD) for corner in corners]
    axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor="lightgray", linewidth=0.8))
    x, y, millions = np.concatenate(points, axis=1)
    dots = axes.scatter(x, y, c=millions, s=5, vmin=params.min() / 1e6, vmax=params.max() / 1e6)
    axes.set_xlim(-PAD, columns)
    axes.set_ylim(rows, 0)
    titles = [f"{plain(name)}\n{np.nanmin(v):.2f} to {np.nanmax(v):.2f} %" for name, v in accuracies.items()]
    axes.set_xticks(np.arange(columns) + 0.5, titles, fontsize=8)
    axes.set_yticks(np.arange(rows) + 0.55, [plain(proxy) for proxy in order], fontsize=8)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("across: rank by score, the best on the right; upwards: accuracy, over the range above", fontsize=8)
    figure.colorbar(dots, ax=axes, label="parameters [M]", shrink=max(0.2, min(1.0, 4 / rows)), aspect=25)
    return figure


def correlation_bars(columns: Mapping[str, Mapping[str, Interval]], baselines: Sequence[str]) -> Figure:
    """Tau-b of every proxy with its interval, a panel for each accuracy, the first baseline drawn as a line.

    Args:
        columns: accuracy to proxy to interval, proxies in the order in which they are drawn from the top.
        baselines: proxies drawn in another colour.
    """
    height = 1.0 + 0.24 * max(len(proxies) for proxies in columns.values())
    rows, across = -(-len(columns) // ACROSS), min(len(columns), ACROSS)
    figure = Figure(figsize=(1.4 + 2.6 * across, height * rows), layout="constrained")
    panels = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True)
    for empty in panels.flat[len(columns) :]:
        empty.set_visible(False)
    drawn, undefined, intervals = None, True, False
    for axes, (name, proxies) in zip(panels.flat, columns.items(), strict=False):
        places = np.arange(len(proxies))
        values = np.array([np.nan if value is None else value for value, _, _ in proxies.values()])
        bounds = np.array([[np.nan if b is None else b for b in bound] for _, *bound in proxies.values()]).reshape(
            -1, 2
        )
        # A bootstrap interval need not hold the value itself.
        errors = np.clip(np.stack([values - bounds[:, 0], bounds[:, 1] - values]), 0, None)
        colours = ["tab:gray" if proxy in baselines else "tab:blue" for proxy in proxies]
        axes.barh(places, np.nan_to_num(values), color=colours, height=0.7)
        axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        line = proxies.get(baselines[0], (None,))[0]
        if line is not None:
            drawn = axes.axvline(line, color="tab:red", linewidth=0.8, linestyle="--")
        axes.set_title(plain(name), fontsize=8)
        axes.set_xlabel("Kendall τ-b", fontsize=7)
        axes.set_yticks(places, [plain(proxy) for proxy in proxies], fontsize=7)
        axes.tick_params(axis="x", labelsize=6, labelbottom=True)
        axes.axvline(0, color="black", linewidth=0.6)
        if np.isnan(values).all():
            say(axes, "no proxy has a correlation:\nall scores or all accuracies are equal")
        undefined &= bool(np.isnan(values).all())
        intervals |= not np.isnan(bounds).all()
    panels[0, 0].invert_yaxis()
    if undefined:
        panels[0, 0].set_xlim(-1, 1)
    if intervals:
        note = f"black bars: {LEVEL} % bootstrap interval over networks"
        figure.supxlabel(note, fontsize=7, color="dimgray")
    if drawn is not None:
        figure.legend([drawn], [baselines[0]], fontsize=7, loc="outside lower right")
    return figure
