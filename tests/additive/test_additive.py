"""Optima, fronts, counts, ranges and samples of random small spaces against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from lightning_tas.additive import Members, Problem, Term, Total, best, count, feasible, front, ranges, sample
from lightning_tas.errors import UserError
from lightning_tas.spaces import Dimension, Predicate, SearchSpace

SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 80))]
# With many labels allowed, how the answer is found must not matter: by merging equal costs, or by dominance.
WAYS: list[dict[str, Any]] = [{}, {"merged": 0}]


def within(problem: Problem, found: Any) -> bool:
    return all(
        ((found.costs[name] >= low) & (found.costs[name] <= high)).all() for name, (low, high) in problem.bounds.items()
    )


def points(costs: dict[str, Any], score: np.ndarray) -> set[tuple[float, ...]]:
    return {tuple(row) for row in np.stack([*costs.values(), -score], axis=1).round(9).tolist()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", SEEDS)
def test_optimum_and_front(seed: int, way: dict[str, Any], random_problem: Any, brute: Any) -> None:
    problem = random_problem(seed, ties=seed % 4 == 0)
    truth = brute(problem)
    for top in (1, 5):
        found = best(problem, top, **way)
        assert found.score == pytest.approx(truth.top(top)) and found.optimal and within(problem, found)
        assert len(np.unique(found.codes, axis=0)) == len(found) and problem.space.valid(found.codes).all()
        assert len(found) == 0 or found.bound == found.score[0]
    for costs in (problem.costs, {"params": problem.costs["params"]}):
        part = Problem(problem.space, problem.score, costs, {k: problem.bounds[k] for k in costs})
        found = front(part, **way)
        assert points(found.costs, found.score) == brute(part).front() and found.optimal and found.bound == 0
        assert len(points(found.costs, found.score)) == len(found) and within(part, found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", SEEDS[::3])
def test_of_equal_networks(seed: int, way: dict[str, Any], random_problem: Any, brute: Any) -> None:
    """Ordered by their codes, the same in every call, and all of them where there is room."""
    problem = random_problem(seed, ties=True)
    truth = brute(problem)
    for top in (1, 3, 10**4):
        found, again = best(problem, top, **way), best(problem, top, **way)
        assert (found.codes == again.codes).all() and found.score == pytest.approx(truth.top(top))
        rows = [(-score, *row) for score, row in zip(found.score.round(9).tolist(), found.codes.tolist(), strict=True)]
        assert rows == sorted(rows) and len(set(rows)) == len(rows) == min(top, truth.within.sum())


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_little_room_gives_bounds_that_hold(seed: int, random_problem: Any, brute: Any) -> None:
    problem = random_problem(seed)
    truth = brute(problem)
    found = best(problem, 2, caps=(2,), merged=0)
    assert within(problem, found) and set(found.score.round(9)) <= set(truth.score.round(9))
    assert truth.top(1) == [] or found.bound >= truth.top(1)[0] - 1e-9
    assert not found.optimal or found.score == pytest.approx(truth.top(2))
    # A front of few labels lacks no more score than it says, whatever the costs.
    free = Problem(problem.space, problem.score, problem.costs)
    thin = front(free, cap=6, merged=0)
    costs = np.stack(list(thin.costs.values()))
    for score, own in zip(truth.score, np.stack(list(truth.costs.values())).T, strict=True):
        best_of_less = thin.score[(costs <= own[:, None]).all(axis=0)].max(initial=-np.inf)
        assert best_of_less >= score - thin.bound - 1e-9
    assert thin.optimal == (thin.bound == 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_count_ranges_and_numbers(seed: int, random_problem: Any, brute: Any) -> None:
    problem = random_problem(seed)
    truth = brute(problem)
    space, costs, bounds = problem.space, problem.costs, problem.bounds
    assert count(space, costs, bounds) == truth.within.sum()
    assert count(space, costs) == count(space, {}) == len(truth.codes) == space.size()
    assert count(space, costs, {"params": (0, np.inf)}, max_labels=0) is None
    assert feasible(space, costs, bounds) == truth.within.any()
    for name, total in costs.items():
        assert ranges(space, total) == (truth.costs[name].min(), truth.costs[name].max())
    assert ranges(space, problem.score) == pytest.approx((truth.score.min(), truth.score.max()))
    members = Members(space, costs, bounds)
    every = members.codes(np.arange(len(members)))
    assert {r.tobytes() for r in every} == {r.tobytes() for r in truth.codes[truth.within]}
    assert len({r.tobytes() for r in every}) == len(every)


def test_rules_over_the_depths_of_all_stages(brute: Any, tables: Any) -> None:
    """What one stage's depth leaves to the others is remembered while their blocks share work over depths."""
    dimensions = [Dimension("depth", "stage", (1, 2, 3)), Dimension("heads", "block", (1, 2))]
    space = SearchSpace("tied", "any", dimensions, [Predicate("total_between", ("depth", 4, 6))], stages=3)
    costs = {"params": tables(space, 1, whole=True), "macs": tables(space, 2, whole=True)}
    problem = Problem(space, tables(space, 4), costs, {"params": (-np.inf, 300), "macs": (150, 250)})
    truth = brute(problem)
    assert 100 < truth.within.sum() < len(truth.codes) == count(space, {}) == space.size()
    assert count(space, costs, problem.bounds) == truth.within.sum()
    for way in WAYS:
        assert best(problem, 4, **way).score == pytest.approx(truth.top(4))


def test_samples_are_uniform(random_problem: Any, brute: Any) -> None:
    problem = next(p for p in map(random_problem, (1, 7, 13, 29, 31)) if 20 < brute(p).within.sum() < 300)
    truth = brute(problem)
    drawn = sample(problem.space, problem.costs, problem.bounds, seed=3, n=20_000)
    number = {row.tobytes(): i for i, row in enumerate(truth.codes[truth.within])}
    seen = np.bincount([number[row.tobytes()] for row in drawn], minlength=len(number))
    assert chisquare(seen).pvalue > 1e-3
    again = sample(problem.space, problem.costs, problem.bounds, seed=3, n=50)
    assert (again == drawn[:50]).all()
    assert (sample(problem.space, problem.costs, problem.bounds, seed=4, n=50) != again).any()
    # Beyond 64 bits numbers are Python's, with the same networks behind them.
    members = Members(problem.space, problem.costs, problem.bounds)
    every = members.codes(range(len(members)))
    members._dtype = object  # type: ignore[assignment]
    assert (members.codes(range(len(members))) == every).all()
    big = members.sample(0, 5000)
    assert chisquare(np.bincount([number[r.tobytes()] for r in big], minlength=len(number))).pvalue > 1e-3


def test_mistakes(random_problem: Any) -> None:
    problem = random_problem(1)
    space, costs = problem.space, problem.costs
    with pytest.raises(UserError, match="'latency' is not valid; valid: params, macs"):
        count(space, costs, {"latency": (0, 1)})
    with pytest.raises(UserError, match="of macs the lower, 2, exceeds the upper, 1"):
        Problem(space, problem.score, costs, {"macs": (2, 1)})
    with pytest.raises(UserError, match="is within the bounds"):
        sample(space, costs, {"params": (10**9, np.inf)}, 0, 1)
    with pytest.raises(UserError, match="numbers: 0 to 10000000 are not all of 0"):
        Members(space, costs).codes([0, 10_000_000])
    columns = [i for i, c in enumerate(space.columns) if c.block is not None][:1]
    last = [i for i, c in enumerate(space.columns) if c.block is not None][-1:]
    sizes = [len(space.columns[c].choices) + 1 for c in (*columns, *last)]
    for term, message in (
        (Term((*columns, *last), np.ones(sizes)), "two slots"),
        (Term((999,), np.ones(2)), r"columns \[999\]"),
        (Term((0,), np.ones(17)), "17 entries for the"),
        (Term((), np.array(np.nan)), "not finite"),
    ):
        with pytest.raises(UserError, match=message):
            best(Problem(space, Total((term,))))
    with pytest.raises(UserError, match="whole numbers"):
        best(Problem(space, problem.score, {"params": Total((Term((), np.array(0.5)),))}))
