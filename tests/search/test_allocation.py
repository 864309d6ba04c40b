"""Allocation against exhaustive search, the paper's greedy against the optimum, the released rule against a loop."""

from __future__ import annotations

import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tas.errors import UserError
from lightning_tas.search.allocation import Allocator, count_vectors, units


def gains_of(seed: int, embeds: int, layers: int, choices: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(embeds, layers, choices))


def score(gains: np.ndarray, allocation: np.ndarray) -> np.ndarray:
    """(E, K) total gain of allocations (E, K, depth), entry by entry."""
    return np.array(
        [[sum(gains[e, layer, c] for layer, c in enumerate(row)) for row in rows] for e, rows in enumerate(allocation)]
    )


def exhaustive(gains: np.ndarray, values: tuple[float, ...], depth: int, classes: str) -> dict[object, float]:
    """Class -> best score, of one width, by trying every allocation."""
    best: dict[object, float] = {}
    for choice in itertools.product(range(len(values)), repeat=depth):
        total = sum(gains[layer, c] for layer, c in enumerate(choice))
        counts = tuple(choice.count(c) for c in range(len(values)))
        key = sum(values[c] for c in choice) if classes == "sums" else counts
        best[key] = max(best.get(key, -np.inf), total)
    return best


def keys_of(rows: np.ndarray, values: tuple[float, ...], classes: str) -> list[object]:
    if classes == "sums":
        return [sum(values[c] for c in row) for row in rows]
    return [tuple(int((row == c).sum()) for c in range(len(values))) for row in rows]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(3, 4), (5, 6, 7), (3.0, 3.5, 4.0), (2, 3, 8), (1, 2, 4, 8)]),
    st.integers(1, 5),
    st.sampled_from(["sums", "counts"]),
)
def test_dp_is_the_optimum_of_every_class(seed: int, values: tuple[float, ...], layers: int, classes: str) -> None:
    gains = gains_of(seed, 2, layers, len(values))
    allocator = Allocator(gains, values, "dp", classes)
    for depth in range(1, layers + 1):
        found = allocator.allocate(depth)
        totals = score(gains, found)
        for e in range(2):
            best = exhaustive(gains[e], values, depth, classes)
            keys = keys_of(found[e], values, classes)
            assert len(set(keys)) == len(keys) == len(best)
            assert dict(zip(keys, totals[e], strict=True)) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from(["sums", "counts"]))
def test_greedy_is_optimal_for_two_choices(seed: int, layers: int, classes: str) -> None:
    gains = gains_of(seed, 3, layers, 2)
    for depth in {1, layers}:
        greedy = Allocator(gains, (3, 4), "greedy", classes).allocate(depth)
        exact = Allocator(gains, (3, 4), "dp", classes).allocate(depth)
        released = Allocator(gains, (3, 4), "released", classes).allocate(depth)
        by_sum = {
            name: dict(zip(found[-1].sum(axis=1), score(gains, found)[-1], strict=True))
            for name, found in {"greedy": greedy, "exact": exact, "released": released}.items()
        }
        assert by_sum["greedy"] == pytest.approx(by_sum["exact"])
        assert by_sum["released"] == pytest.approx(by_sum["exact"])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8))
def test_greedy_is_optimal_when_no_gain_increases(seed: int, layers: int) -> None:
    steps = np.sort(np.random.default_rng(seed).random((2, layers, 2)), axis=2)[:, :, ::-1]
    gains = np.concatenate([np.zeros((2, layers, 1)), steps.cumsum(axis=2)], axis=2)
    greedy = Allocator(gains, (5, 6, 7), "greedy", "sums").allocate(layers)
    exact = Allocator(gains, (5, 6, 7), "dp", "sums").allocate(layers)
    np.testing.assert_allclose(score(gains, greedy), score(gains, exact))


def test_greedy_can_miss_the_optimum_of_three_choices() -> None:
    # Layer 1 gains nothing by its first unit and most by both: greedy never sees beyond the first.
    gains = np.array([[[0.0, 1.0, 1.0], [0.0, 0.0, 9.0]]])
    greedy = Allocator(gains, (5, 6, 7), "greedy", "sums").allocate(2)
    exact = Allocator(gains, (5, 6, 7), "dp", "sums").allocate(2)
    assert score(gains, greedy)[0].tolist() == [0.0, 1.0, 1.0, 1.0, 10.0]
    assert score(gains, exact)[0].tolist() == [0.0, 1.0, 9.0, 10.0, 10.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7))
def test_released_rule_from_the_largest_choice_down(seed: int, layers: int) -> None:
    gains = gains_of(seed, 3, layers, 3)
    found = Allocator(gains, (3, 3.5, 4), "released", "counts").allocate(layers)
    steps = np.diff(gains[-1], axis=1)  # published code ranks by the widest network whatever the width
    for row, (_, middle, most) in zip(found[0], count_vectors(layers, 3), strict=True):
        expected = [0] * layers
        free = set(range(layers))
        for choice, count in ((2, most), (1, middle)):
            for layer in sorted(free, key=lambda i: -steps[i, choice - 1])[:count]:
                expected[layer] = choice
                free.discard(layer)
        assert row.tolist() == expected
    assert (found == found[:1]).all()


@pytest.mark.parametrize(("layers", "choices"), [(14, 2), (14, 3), (5, 4), (3, 1)])
def test_numbers_of_count_classes(layers: int, choices: int) -> None:
    rows = count_vectors(layers, choices)
    assert len(rows) == len({tuple(r) for r in rows}) == comb(layers + choices - 1, choices - 1)
    assert (rows.sum(axis=1) == layers).all() and (rows >= 0).all()
    visited = count_vectors(layers, choices, skip_unused_middle=True)
    assert (visited[:, 1:-1] >= 1).all()
    if choices == 3:
        assert len(visited) == comb(layers + 1, 2)  # what the released loop visits
    if choices == 2:
        assert len(visited) == layers + 1


def test_units_are_exact() -> None:
    assert units((3, 3.5, 4)) == (0, 1, 2)
    assert units((0.1, 0.2, 0.3, 0.7)) == (0, 1, 2, 6)
    assert units((5,)) == (0,)
    assert units((2, 4, 8)) == (0, 1, 3)


def test_settings_that_do_not_fit_are_refused() -> None:
    gains = gains_of(0, 1, 3, 3)
    with pytest.raises(UserError, match="evenly spaced"):
        Allocator(gains, (2, 4, 8), "greedy", "sums")
    with pytest.raises(UserError, match="classes='sums'"):
        Allocator(gains, (2, 3, 4), "greedy", "counts")
    with pytest.raises(UserError, match="classes='counts'"):
        Allocator(gains, (2, 3, 4), "released", "sums")
    with pytest.raises(UserError, match="Did you mean 'greedy'"):
        Allocator(gains, (2, 3, 4), "gredy", "sums")
    with pytest.raises(UserError, match=r"use classes='sums'"):
        Allocator(gains_of(0, 1, 14, 12), tuple(range(1, 13)), "dp", "counts")
