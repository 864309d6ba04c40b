"""Optima, fronts, counts, ranges and samples of random small spaces against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_tas.additive import Members, Problem, best, count, front, ranges

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_optimum_front_count_and_ranges(seed: int, random_problem: Any, brute: Any) -> None:
    problem = random_problem(seed, ties=seed % 4 == 0)
    truth = brute(problem)
    found = best(problem, top=5)
    assert found.score == pytest.approx(truth.top(5)) and found.optimal
    assert len(np.unique(found.codes, axis=0)) == len(found) == min(5, truth.within.sum())
    assert problem.space.valid(found.codes).all()
    for name, (low, high) in problem.bounds.items():
        assert ((found.costs[name] >= low) & (found.costs[name] <= high)).all()
    for costs in (problem.costs, {"params": problem.costs["params"]}):
        part = Problem(problem.space, problem.score, costs, {k: problem.bounds[k] for k in costs})
        points = front(part)
        rows = np.stack([*points.costs.values(), -points.score], axis=1).round(9)
        assert len(rows) == len({tuple(r) for r in rows.tolist()})
        assert {tuple(r) for r in rows.tolist()} == brute(part).front()
    assert count(problem.space, problem.costs, problem.bounds) == truth.within.sum()
    assert count(problem.space, {}) == len(truth.codes) == problem.space.size()
    for name, total in problem.costs.items():
        assert ranges(problem.space, total) == (truth.costs[name].min(), truth.costs[name].max())
    assert ranges(problem.space, problem.score) == pytest.approx((truth.score.min(), truth.score.max()))
    members = Members(problem.space, problem.costs, problem.bounds)
    every = members.codes(np.arange(len(members)))
    assert {r.tobytes() for r in every} == {r.tobytes() for r in truth.codes[truth.within]} and len(every) == len(
        {r.tobytes() for r in every}
    )
