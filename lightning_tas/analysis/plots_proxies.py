"""Pictures of the score command: scores against accuracies, and correlations with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

Interval = tuple[float | None, float | None, float | None]
"""Value, lower and upper bound; None is undefined."""


def score_scatter(
    order: Mapping[str, NDArray[np.float64]],
    accuracies: Mapping[str, NDArray[np.float64]],
    params: NDArray[np.float64],
    taus: Mapping[tuple[str, str], float | None],
) -> Figure:
    """A grid: a row for each proxy, a column for each accuracy [%], a dot for each network, coloured by parameters [M].

    Args:
        order: proxy to the networks' ranks by score (mean over initialisations), the highest is best.
        accuracies: name to accuracy of every network; NaN is left out.
        params: parameter counts.
        taus: (accuracy, proxy) to the correlation written into the panel.
    """
    rows, columns = len(order), len(accuracies)
    figure = Figure(figsize=(1.2 + 2.1 * columns, 0.8 + 1.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="col")
    dots = None
    for row, (proxy, places) in enumerate(order.items()):
        for column, (name, truth) in enumerate(accuracies.items()):
            axes = panels[row, column]
            known = np.isfinite(truth)
            dots = axes.scatter(
                places[known],
                truth[known],
                c=params[known] / 1e6,
                s=6,
                vmin=params.min() / 1e6,
                vmax=params.max() / 1e6,
            )
            tau = taus[name, proxy]
            axes.set_title(f"{proxy}  τ {'undefined' if tau is None else f'{tau:.2f}'}", fontsize=8)
            axes.tick_params(labelsize=6)
            if row == rows - 1:
                axes.set_xlabel("rank by score", fontsize=7)
            axes.set_ylabel(f"{name} [%]", fontsize=7)
    if dots is not None:
        figure.colorbar(dots, ax=list(panels.flat), label="parameters [M]", shrink=max(0.2, 2 / rows), aspect=30)
    return figure


def correlation_bars(columns: Mapping[str, Mapping[str, Interval]], baselines: Sequence[str]) -> Figure:
    """Tau-b of every proxy with its interval, a panel for each accuracy, the first baseline drawn across as a line.

    Args:
        columns: accuracy to proxy to interval, proxies in the order in which they are drawn from the top.
        baselines: proxies drawn in another colour.
    """
    height = 1.0 + 0.24 * max(len(proxies) for proxies in columns.values())
    figure = Figure(figsize=(1.4 + 2.6 * len(columns), height), layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)
    drawn = None
    for axes, (name, proxies) in zip(panels.flat, columns.items(), strict=True):
        places = np.arange(len(proxies))
        values = np.array([np.nan if value is None else value for value, _, _ in proxies.values()])
        bounds = np.array([[np.nan if b is None else b for b in bound] for _, *bound in proxies.values()]).reshape(
            -1, 2
        )
        # A percentile interval need not hold the value itself.
        errors = np.clip(np.stack([values - bounds[:, 0], bounds[:, 1] - values]), 0, None)
        colours = ["tab:gray" if proxy in baselines else "tab:blue" for proxy in proxies]
        axes.barh(places, np.nan_to_num(values), color=colours, height=0.7)
        axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        line = proxies.get(baselines[0], (None,))[0]
        if line is not None:
            drawn = axes.axvline(line, color="tab:red", linewidth=0.8, linestyle="--")
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("Kendall τ-b", fontsize=7)
        axes.set_yticks(places, list(proxies), fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
        axes.axvline(0, color="black", linewidth=0.6)
    panels[0, 0].invert_yaxis()
    if drawn is not None:
        figure.legend([drawn], [baselines[0]], fontsize=7, loc="outside lower right")
    return figure
