"""Dominance filters against comparing all pairs, with every path of the code forced on few labels."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_tas.additive import pareto


def naive(group: np.ndarray, score: np.ndarray, costs: np.ndarray, keep: int) -> set[int]:
    """The first `keep` layers, of equal labels the first; by comparing all pairs."""
    left, found = list(range(len(score))), []
    for _ in range(keep):
        layer = [
            i
            for i in left
            if not any(
                group[j] == group[i]
                and score[j] >= score[i]
                and (costs[:, j] <= costs[:, i]).all()
                and (score[j] > score[i] or (costs[:, j] < costs[:, i]).any() or j < i)
                for j in left
                if j != i
            )
        ]
        found += layer
        left = [i for i in left if i not in layer]
    return set(found)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("keep", [1, 3])
def test_undominated_is_what_no_pair_excludes(number: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(10 * number + keep)
    for size, few in ((1, False), (40, False), (120, True), (120, False)):
        if few:
            for name, value in (("_MANY", 10), ("_CELLS", 4), ("_CHUNK", 16), ("_PAIRS", 16)):
                monkeypatch.setattr(pareto, name, value)
        for _ in range(6):
            group = rng.integers(0, 3, size)
            score = rng.integers(0, 12, size).astype(float)  # with ties
            costs = rng.integers(0, 15, (number, size))
            found = pareto.undominated(group, score, costs, keep)
            assert set(found.tolist()) == naive(group, score, costs, keep) and len(set(found.tolist())) == len(found)
            order = [(group[i], *costs[:, i]) for i in found]
            assert order == sorted(order)


def test_the_grid_drops_only_what_is_dominated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "_CELLS", 8)
    rng = np.random.default_rng(0)
    group, costs = rng.integers(0, 2, 300), rng.integers(-500, 500, (2, 300))
    score = costs.sum(axis=0) + rng.normal(scale=100, size=300)
    kept = set(pareto.coarse(group, score, costs).tolist())
    assert naive(group, score, costs, 1) <= kept and len(kept) < 300
