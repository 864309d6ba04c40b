"""Plots and tables show what they are given."""

import numpy as np
import pytest

from lightning_tas.analysis.plots import accuracy_over_params, allocation_per_layer, save_figure
from lightning_tas.analysis.tables import text_table
from lightning_tas.architecture import Architecture

ARCHS = [
    Architecture.vit(192, num_heads=[3, 4, 3], mlp_ratio=[3.5, 4, 4]),
    Architecture.vit(216, num_heads=[4, 4], mlp_ratio=[4, 3.5]),
]


def test_accuracy_is_drawn_in_the_order_of_size(tmp_path):
    figure = accuracy_over_params(["big", "small"], [2_000_000, 1_000_000], {"inherited": [80.0, 70.0]}, samples=100)
    axes = figure.axes[0]
    x, y = axes.lines[0].get_data()
    assert list(x) == [1.0, 2.0] and list(y) == [70.0, 80.0]
    # Standard errors of 70 % and 80 % of 100 images: 4.6 and 4.0 points.
    spans = [np.ptp(segment[:, 1]) / 2 for segment in axes.collections[0].get_segments()]
    np.testing.assert_allclose(spans, [np.sqrt(21), 4.0])
    assert [text.get_text() for text in axes.texts] == ["small", "big", "bars: ± one standard error of 100 images"]
    assert axes.lines[0].get_linestyle() == "None", "the networks are no series"
    assert "[M]" in axes.get_xlabel() and "[%]" in axes.get_ylabel()
    path = save_figure(figure, tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_allocation_shows_every_layer_and_nothing_beyond_the_depth():
    figure = allocation_per_layer(["a", "b"], ARCHS)
    heads, ratios = figure.axes[:2]
    np.testing.assert_array_equal(heads.images[0].get_array().filled(np.nan), [[0, 1, 0], [1, 1, np.nan]])
    assert [t.get_text() for t in heads.texts] == ["3", "4", "3", "4", "4"]
    assert [t.get_text() for t in ratios.texts] == ["3.5", "4", "4", "4", "3.5"]


def test_the_bar_of_an_allocation_has_the_values_that_networks_have():
    """Neither 6 nor 7 between 5 and 8, and one colour each."""
    figure = allocation_per_layer(["a"], [Architecture.vit(192, num_heads=[5, 8, 5], mlp_ratio=[4, 4, 4])])
    heads, ratios, *bars = figure.axes
    assert [[t.get_text() for t in bar.get_yticklabels()] for bar in bars] == [["5", "8"], ["4"]]
    assert [axes.images[0].cmap.N for axes in (heads, ratios)] == [2, 1]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_formats(tmp_path, suffix):
    assert save_figure(allocation_per_layer(["a", "b"], ARCHS), tmp_path / f"x.{suffix}").stat().st_size > 1000


def test_table_aligns_numbers_right_and_text_left():
    lines = text_table(["name", "params [M]"], [["a", "5.9"], ["long", "12.25"]]).splitlines()
    assert lines[0] == "name  params [M]"
    assert lines[2:] == ["a            5.9", "long       12.25"]


@pytest.mark.parametrize("number", ["1,050", "12,345,678", "-1,000.5", "7", "-", "1e-3"])
def test_numbers_are_numbers_however_they_are_written(number):
    rows = [["123,456,789"], [number]]
    assert text_table(["n"], rows).splitlines()[3] == number.rjust(11).rstrip()


@pytest.mark.parametrize("text", ["1,2", "1,0500", ",000", "seed=1,000"])
def test_lists_of_numbers_are_text(text):
    assert text_table(["overrides"], [["123,456,789"], [text]]).splitlines()[3] == text


def test_an_empty_table_is_its_header():
    assert text_table(["name"], []).splitlines() == ["name", "----"]
