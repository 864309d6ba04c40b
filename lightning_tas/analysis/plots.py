"""Pictures of a run: accuracy over parameters, and how heads and MLP ratios are spread over the layers.

Figures are built through matplotlib's object interface: nothing global is touched, no window opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lightning_tas.architecture import Architecture
from lightning_tas.launch.files import write_atomically, writing

DPI = 150


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write `figure` as the format that the suffix of `path` names, atomically."""
    with writing(path):
        return write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=DPI, bbox_inches="tight"))


def say(axes: Axes, reason: str) -> None:
    """Write into a panel why there is nothing in it."""
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", fontsize=8, color="dimgray")


def accuracy_over_params(
    labels: Sequence[str],
    params: Sequence[int],
    series: Mapping[str, Sequence[float]],
    samples: int | None = None,
    title: str = "Specialised networks",
) -> Figure:
    """Top-1 accuracy [%] over parameters [M], one marker a network, one colour a series.

    With the number of test `samples` each marker carries its standard error, so that noise does not pass for a trend.
    No line joins the markers: a search's winner and the networks it is compared with are no series of sizes.

    Args:
        labels: name of each network, written beside the first series.
        params: parameter counts.
        series: name of the measurement (for example `preferred`) to one accuracy per network.
    """
    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.subplots()
    order = np.argsort(params)
    millions = np.asarray(params, dtype=float)[order] / 1e6
    for number, (name, values) in enumerate(series.items()):
        accuracy = np.asarray(values, dtype=float)[order]
        error = None if samples is None else np.sqrt(accuracy * (100 - accuracy) / samples)
        axes.errorbar(millions, accuracy, yerr=error, fmt="o", capsize=3, label=name)
        if number == 0:
            for x, y, index in zip(millions, accuracy, order, strict=True):
                axes.annotate(labels[index], (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axes.set_xlabel("parameters [M]")
    axes.set_ylabel("top-1 accuracy [%]")
    axes.set_title(title)
    if samples is not None:
        note = f"bars: ± one standard error of {samples:,} images"
        axes.text(0.99, 0.01, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color="dimgray")
    axes.grid(alpha=0.3)
    axes.margins(x=0.12, y=0.15)
    if len(series) > 1:
        axes.legend()
    return figure


def allocation_per_layer(labels: Sequence[str], archs: Sequence[Architecture]) -> Figure:
    """Heads and MLP ratio of every layer: a row per network, a column per layer, one panel for each quantity."""
    depth = max(arch.depth for arch in archs)
    size = (1.6 + 0.42 * depth, 1.5 + 0.62 * len(archs))
    figure = Figure(figsize=(size[0], 2 * size[1]), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    _grid(upper, "heads", labels, [arch.num_heads for arch in archs], depth)
    _grid(lower, "MLP ratio", labels, [arch.mlp_ratio for arch in archs], depth)
    lower.set_xlabel("layer")
    return figure


def _grid(axes: Axes, name: str, labels: Sequence[str], rows: Sequence[Sequence[float]], depth: int) -> None:
    """One colour for each value that a network has; a cell beyond a network's depth is empty."""
    present = sorted({float(value) for row in rows for value in row})
    values = np.full((len(rows), depth), np.nan)
    for index, row in enumerate(rows):
        values[index, : len(row)] = [present.index(float(value)) for value in row]
    colours = ListedColormap(colormaps["viridis"](np.linspace(0.15, 1, len(present))))
    image = axes.imshow(values, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(present) - 0.5)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            dark = len(present) == 1 or value < (len(present) - 1) / 2
            axes.text(
                column, row, f"{present[int(value)]:g}", ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
    axes.set_title(name)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_xticks(range(depth), [str(layer + 1) for layer in range(depth)], fontsize=8)
    bar = axes.figure.colorbar(image, ax=axes, label=name, ticks=range(len(present)), aspect=max(20, 3 * len(rows)))
    bar.ax.set_yticklabels([f"{value:g}" for value in present])
