"""Picture of scoring beside training: scores against inherited accuracies, at initialisation and now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lightning_tas.analysis.correlation import ranks


def scoring_scatter(
    current: Mapping[str, Sequence[float]],
    initial: Mapping[str, Sequence[float]],
    top1: Sequence[float],
    params: Sequence[int],
    taus: Mapping[str, float | None],
    title: str,
) -> Figure:
    """A panel for each proxy, two dots for each network: ranks by score against inherited top-1 accuracy [%].

    Args:
        current: proxy to the networks' scores with current weights, drawn as dots coloured by parameters [M].
        initial: the same at initialisation, for the proxies that depend on weights, drawn as hollow dots.
        params: parameter counts.
        taus: correlations written into the panels, as `<proxy>/initial` and `<proxy>/current`, or just `<proxy>`.
    """
    columns = min(len(current), 4)
    rows = math.ceil(len(current) / columns)
    figure = Figure(figsize=(1.2 + 2.3 * columns, 0.8 + 2.1 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    millions, dots = np.asarray(params, dtype=float) / 1e6, None
    for axes, (name, scores) in zip(panels, current.items(), strict=False):
        if name in initial:
            axes.scatter(ranks(initial[name]), top1, s=14, facecolors="none", edgecolors="tab:gray", linewidths=0.7)
        dots = axes.scatter(ranks(scores), top1, s=9, c=millions)
        shown = [taus[key] for key in (name, f"{name}/initial", f"{name}/current") if key in taus]
        told = " → ".join("undefined" if tau is None else f"{tau:.2f}" for tau in shown)
        axes.set_title(f"{name}  τ {told}", fontsize=8)
        axes.tick_params(labelsize=6)
    for axes in panels[len(current) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=9)
    figure.supxlabel("rank by score (hollow: at initialisation, filled: now)", fontsize=8)
    figure.supylabel("top-1 accuracy with inherited weights [%]", fontsize=8)
    if dots is not None:
        figure.colorbar(dots, ax=panels, label="parameters [M]", aspect=20 * rows, shrink=max(0.3, 1 / rows))
    return figure
