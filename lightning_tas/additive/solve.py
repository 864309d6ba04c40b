"""The best networks and the Pareto front of an additive problem, with proof.

Of partial networks that reach one state with equal costs only the best can be part of an optimum, whatever the bounds.
Costs of a one-stage space take few values (some thousand), so merging equal ones is a dynamic programme over exact
costs that ends in milliseconds. Costs of many stages take too many. There, dominance takes the place of equality (less
of a cost is as good, where only its upper bound matters), and for optima the prices of a Lagrangian relaxation tell
which labels cannot beat the best network known. Bounds that the prices say do not bind are left out first and put back
if the optimum breaks them, because the fewer sides bind, the more is dominated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import OPEN, Bounds, by_source, check_bounds, whole_bounds
from lightning_tas.additive.members import ranges
from lightning_tas.additive.pareto import undominated
from lightning_tas.additive.plan import IntArray, Plan, make_plan
from lightning_tas.additive.problem import Problem, Solution
from lightning_tas.additive.ranked import ranked
from lightning_tas.additive.relax import relax
from lightning_tas.additive.terms import FloatArray, Total
from lightning_tas.additive.walk import Rule, Walk, walk
from lightning_tas.spaces import SearchSpace

MERGED = 3_000_000
"""Candidates that merging equal costs may take before dominance is tried: about half a second."""
CAPS = (1_000, 10_000, 100_000)
"""Labels of a level, in the rounds of a search for an optimum; the first is rarely not enough."""
FRONT_CAP = 1_000_000
ROUNDING = 1e-11
"""Relative difference below which scores count as equal where something is to be proven."""


def best(problem: Problem, top: int = 1, caps: Sequence[int] = CAPS, merged: int = MERGED) -> Solution:
    """The `top` best networks within the bounds, best first, those of equal scores in order of their codes.

    Where more networks share the last of these scores, some of them are returned: which ones is not specified, but the
    same in every call. Fewer than `top` where there are no more. caps: labels of a level in successive rounds, until
    the optimum is proven; merged: see `MERGED`. Both only trade time for proof: the defaults take at most a minute.
    """
    began = time.perf_counter()
    plan = make_plan(problem.space, problem.score, list(problem.costs.values()))
    low, high = whole_bounds(check_bounds(problem.bounds, problem.costs))
    found = ranked(plan, Rule(low, high, candidates=merged), top)
    if found is not None:
        return _solution(problem, *found, began)
    return _bounded(problem, plan, low, high, top, caps, began)


def front(problem: Problem, cap: int = FRONT_CAP, merged: int = MERGED) -> Solution:
    """The networks within the bounds that none within them dominates: scores at least, no cost above.

    One network stands for all of equal score and costs. Ascending by costs. cap: labels of a level; where there are
    more, `Solution.bound` says how much of score the front may lack (infinite where that is not known).
    """
    began = time.perf_counter()
    plan = make_plan(problem.space, problem.score, list(problem.costs.values()))
    low, high = whole_bounds(check_bounds(problem.bounds, problem.costs))
    found = walk(plan, Rule(low, high, candidates=merged))
    if not found.complete:
        found = walk(plan, Rule(low, high, compare=(1,) * len(low), cap=cap, thin="score"))
    labels = found.labels
    at = undominated(labels.state, labels.score, labels.costs)
    codes = plan.codes(found.rows(at))
    return _solution(problem, codes, found.number, began, ranked=False, gap=found.slack)


def feasible(
    space: SearchSpace, costs: Mapping[str, Total], bounds: Bounds | None = None, caps: Sequence[int] = CAPS
) -> bool | None:
    """Whether any member of `space` is within `bounds`; None where neither is shown within `caps` labels of a level."""
    for name, (low, high) in check_bounds(bounds, costs).items():
        least, most = ranges(space, costs[name])
        if least > high or most < low:
            return False
    found = best(Problem(space, Total(()), costs, bounds or {}), caps=caps)
    if len(found):
        return True
    return False if found.optimal else None


@dataclass
class _Pool:
    """The best networks within the bounds that are known so far."""

    top: int
    score: FloatArray = field(default_factory=lambda: np.zeros(0))
    codes: npt.NDArray[np.int16] | None = None

    @property
    def floor(self) -> float:
        """What a network must exceed to be among them."""
        return float(self.score[-1]) if len(self.score) == self.top else -np.inf

    def add(self, score: FloatArray, codes: npt.NDArray[np.int16]) -> None:
        held = codes if self.codes is None else np.concatenate([self.codes, codes])
        values = np.concatenate([self.score, score])
        _, first = np.unique(held, axis=0, return_index=True)
        order = first[np.argsort(-values[first], kind="stable")][: self.top]
        self.score, self.codes = values[order], held[order]


def _bounded(
    problem: Problem, plan: Plan, low: IntArray, high: IntArray, top: int, caps: Sequence[int], began: float
) -> Solution:
    """Rounds of walks with more and more labels, until none was dropped that might be better than what is known."""
    relaxation = relax(plan, low, high)
    tolerance = ROUNDING * max(abs(relaxation.bound), *(abs(side) for side in _reachable(plan)), 1e-300)
    pool, bound, number = _Pool(top), relaxation.bound, 0
    known = [n for n in relaxation.found if ((n[1] >= low) & (n[1] <= high)).all()]
    if known:
        pool.add(np.array([n[0] for n in known]), np.concatenate([plan.codes(n[2]) for n in known]))
    if bound < _reachable(plan)[0] - tolerance:  # below every score: nothing is within the bounds
        return _solution(problem, _none(plan), 0, began)
    prices = relaxation.prices
    sides = np.stack([(prices < 0) & (low > -OPEN), (prices > 0) & (high < OPEN)])
    rule = Rule(low, high, keep=top, relaxation=relaxation)
    for cap in caps:
        while True:
            found = walk(plan, replace(_held(rule, sides), cap=cap, floor=pool.floor + tolerance))
            number += found.number
            broken = _collect(pool, plan, found, low, high, tolerance)
            if broken is None:
                break
            bound = min(bound, max(found.dropped, broken[0], _head(pool)))
            assert (broken[1] & ~sides).any(), "a bound that was held is broken"
            sides |= broken[1]
        bound = min(bound, max(found.dropped, _head(pool)))
        if found.dropped <= pool.floor + tolerance:
            return _solution(problem, _none(plan) if pool.codes is None else pool.codes, number, began)
    return _solution(problem, _none(plan) if pool.codes is None else pool.codes, number, began, bound=bound)


def _held(rule: Rule, sides: npt.NDArray[np.bool_]) -> Rule:
    """The rule when only these sides (2, C) of its bounds, lower and upper, are held."""
    compare = np.where(sides[1], 1, np.where(sides[0], -1, 0))
    low, high = np.where(sides[0], rule.low, -OPEN), np.where(sides[1], rule.high, OPEN)
    return replace(rule, low=low, high=high, compare=tuple(compare.tolist()))


def _collect(
    pool: _Pool, plan: Plan, found: Walk, low: IntArray, high: IntArray, tolerance: float
) -> tuple[float, npt.NDArray[np.bool_]] | None:
    """Adds networks within all bounds to the pool; of those better than all of its, and outside, the best's sides."""
    labels = found.labels
    sides = np.stack([labels.costs < low[:, None], labels.costs > high[:, None]])  # (2, C, L)
    outside = np.asarray(sides.any(axis=(0, 1)))
    order = np.argsort(-labels.score, kind="stable")
    inside = order[~outside[order]][: pool.top]
    if len(inside):
        pool.add(labels.score[inside], plan.codes(found.rows(inside)))
    better = order[outside[order] & (labels.score[order] > pool.floor + tolerance)]
    if not len(better):
        return None
    return float(labels.score[better[0]]), sides[:, :, better[0]]


def _head(pool: _Pool) -> float:
    return float(pool.score[0]) if len(pool.score) else -np.inf


def _reachable(plan: Plan) -> tuple[float, float]:
    """The least and the greatest score."""
    least, most = np.zeros(1), np.zeros(1)
    for step in reversed(plan.steps):
        least = by_source(step, step.score + least[step.target], np.minimum, np.inf)
        most = by_source(step, step.score + most[step.target], np.maximum, -np.inf)
    return float(least[0]), float(most[0])


def _none(plan: Plan) -> npt.NDArray[np.int16]:
    return np.empty((0, plan.width), dtype=np.int16)


def _solution(
    problem: Problem,
    codes: npt.NDArray[np.int16],
    labels: int,
    began: float,
    ranked: bool = True,
    bound: float | None = None,
    gap: float = 0.0,
) -> Solution:
    """The solution of these networks; scores are summed as `problem.score` sums them."""
    score = problem.score(codes)
    if ranked:
        order = np.lexsort((*codes.T[::-1], -score))
        codes, score = codes[order], score[order]
    costs = {name: total(codes).astype(np.int64) for name, total in problem.costs.items()}
    proven = bound is None if ranked else gap == 0.0
    if ranked and bound is None:
        bound = float(score[0]) if len(score) else -np.inf
    return Solution(codes, score, costs, proven, gap if bound is None else bound, labels, time.perf_counter() - began)
