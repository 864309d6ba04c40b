"""Bins: exact edges, names, limits, and the best of each against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_tas.errors import UserError
from lightning_tas.search.bins import Bins

TINY = (5_366_056, 10_517_272)


def test_default_bins_cover_the_reachable_range() -> None:
    bins = Bins.build(1.0, "Mparams", TINY)
    assert bins.names == (6.0, 7.0, 8.0, 9.0, 10.0, 11.0)
    assert bins.edges[0] == 5_000_000 and bins.edges[-1] == 11_000_000
    assert Bins.build(1, "Mparams", (6_000_000, 7_000_000)).names == (7.0, 8.0)


def test_an_edge_belongs_to_the_next_bin() -> None:
    bins = Bins.build(1.0, "Mparams", TINY)
    index = bins.index(np.array([4_999_999, 5_000_000, 5_999_999, 6_000_000, 10_999_999, 11_000_000]))
    assert index.tolist() == [-1, 0, 0, 1, 5, -1]


def test_decimal_margins_make_exact_edges() -> None:
    # In binary floating point 3 * 0.1 exceeds 0.3 and 0.7 / 0.1 is 6.999...
    bins = Bins.build(0.1, "Mparams", (0, 999_999), (0.0, 1.0))
    assert bins.edges == tuple(range(0, 1_000_001, 100_000))
    assert bins.names == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert bins.index(np.array([299_999, 300_000])).tolist() == [2, 3]
    third = Bins.build(0.0000003, "Mparams", (1, 2))  # 0.3 parameters: edges between whole numbers round up
    assert third.index(np.array([1, 2])).min() >= 0


def test_released_bins_and_a_last_partial_bin() -> None:
    assert Bins.build(12, "Mparams", (41_688_000, 76_882_000), (30, 70), whole_only=True).names == (42.0, 54.0, 66.0)
    assert Bins.build(12, "Mparams", (41_688_000, 76_882_000), (30, 70)).names == (42.0, 54.0, 66.0, 70.0)
    assert Bins.build(5, "Mparams", (13_057_000, 34_790_000), (13, 33), whole_only=True).names == (18, 23, 28, 33)
    assert Bins.build(0.5, "GMACs", (1_200_000_000, 2_300_000_000)).names == (1.5, 2.0, 2.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, "Mparams", TINY, (12, None)), r"no architecture has from 12.*reaches 5\.36606 to 10\.5173 Mparams"),
        ((1.0, "Mparams", TINY, (1, 5)), "no architecture has 1 to 5 Mparams"),
        ((1.0, "Mparams", TINY, (9, 7)), "must exceed"),
        ((0.0, "Mparams", TINY), "positive"),
        ((float("nan"), "Mparams", TINY), "positive"),
        ((1e-9, "Mparams", TINY), "bins"),
        ((1.0, "GMAC", TINY), "Did you mean 'GMACs'"),
    ],
)
def test_wrong_settings(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Bins.build(*arguments)
    with pytest.raises(UserError, match=r"wider than the limits.*reaches"):
        Bins.build(20.0, "Mparams", TINY, (5, 12), whole_only=True)


def test_best_of_every_bin_equals_a_loop() -> None:
    rng = np.random.default_rng(0)
    cost = rng.integers(5_000_000, 12_000_000, 500)
    score = rng.integers(0, 40, 500).astype(float)  # many ties
    bins = Bins.build(0.5, "Mparams", TINY)
    for k, members in enumerate(bins.best(cost, score, top=3)):
        inside = [i for i in range(500) if bins.edges[k] <= cost[i] < bins.edges[k + 1]]
        assert members.tolist() == sorted(inside, key=lambda i: (-score[i], i))[:3]
