"""Pictures of the score command: one panel for each proxy and accuracy, intervals, undefined values."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_tas.analysis.plots_proxies import correlation_bars, score_scatter
from lightning_tas.randomness import numpy_generator


def test_the_grid_holds_every_network_in_its_panel() -> None:
    generator = numpy_generator(0, "picture")
    order = {name: generator.permutation(9) + 1.0 for name in ("params", "macs", "snip")}
    accuracies = {"a": generator.normal(size=9), "b": generator.normal(size=9)}
    accuracies["b"][[2, 5]] = np.nan
    taus = {(column, name): None if name == "snip" else 0.5 for column in accuracies for name in order}
    figure = score_scatter(order, accuracies, generator.uniform(1e6, 2e6, size=9), taus)
    axes, bar = figure.axes
    (dots,) = [found for found in axes.collections if len(found.get_offsets()) > 1]
    panels = np.floor(np.asarray(dots.get_offsets())).astype(int)
    counts = {panel: int((panels == panel).all(axis=1).sum()) for panel in {(c, r) for c in (0, 1) for r in (0, 1, 2)}}
    assert counts == {(c, r): 9 if c == 0 else 7 for c, r in counts}
    # The best by score is the rightmost dot of its panel.
    own = np.asarray(dots.get_offsets())[(panels == (0, 2)).all(axis=1)]
    assert int(own[:, 0].argmax()) == int(order["snip"].argmax())
    # The most accurate one is the highest, and the axis points down.
    assert int(own[:, 1].argmin()) == int(accuracies["a"].argmax())
    assert [text.get_text() for text in axes.get_yticklabels()] == list(order)
    assert sum("undefined" in text.get_text() for text in axes.texts) == 2
    assert bar.get_ylabel() == "parameters [M]"


def test_equal_accuracies_lie_on_the_bottom() -> None:
    """As of a supernet that has learnt nothing yet; NaN places would warn, and show nothing."""
    figure = score_scatter({"snip": np.arange(1, 6.0)}, {"a": np.full(5, 10.0)}, np.full(5, 1e6), {("a", "snip"): None})
    (dots,) = [found for found in figure.axes[0].collections if len(found.get_offsets()) > 1]
    assert len(set(np.asarray(dots.get_offsets())[:, 1])) == 1


def test_bars_draw_the_baseline_across() -> None:
    columns = {"a": {"params": (0.5, 0.4, 0.6), "snip": (0.3, None, None), "zen": (None, None, None)}}
    figure = correlation_bars(columns, ["params", "macs"])
    (axes,) = figure.axes
    assert [patch.get_width() for patch in axes.patches] == [0.5, 0.3, 0.0]
    assert [float(line.get_xdata()[0]) for line in axes.lines if line.get_linestyle() == "--"] == [0.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["params", "snip", "zen"]
    assert axes.yaxis.get_inverted()


def test_panels_of_bars_share_one_range_and_explain_what_they_show() -> None:
    columns = {"a": {"params": (0.5, 0.4, 0.6)}, "b": {"params": (-0.1, None, None)}, "c": {"params": (None,) * 3}}
    figure = correlation_bars(columns, ["params"])
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert "no proxy has a correlation" in figure.axes[2].texts[0].get_text()
    assert figure.get_supxlabel() == "black bars: 95 % bootstrap interval over networks"
    nothing = correlation_bars({"c": columns["c"]}, ["params"])
    assert nothing.axes[0].get_xlim() == (-1, 1) and nothing.get_supxlabel() == ""


def test_names_are_no_formulas(tmp_path: Path) -> None:
    """Between dollar signs matplotlib reads mathematics, and raises where it is none."""
    name = "a$b_{c$_acc"
    bars = correlation_bars({name: {"x$y_{$": (0.5, None, None)}}, ["params"])
    grid = score_scatter({"x$y_{$": np.arange(1, 6.0)}, {name: np.arange(5.0)}, np.full(5, 1e6), {(name, "x$y_{$"): 1})
    for figure in (bars, grid):
        figure.savefig(tmp_path / "a.png")


def test_many_accuracies_have_several_rows() -> None:
    columns = {name: {"params": (0.5, 0.4, 0.6)} for name in "abcd"}
    figure = correlation_bars(columns, ["params"])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == list("abcd")
    assert figure.get_size_inches()[0] < 10
    assert all(axes.yaxis.get_inverted() for axes in shown)
