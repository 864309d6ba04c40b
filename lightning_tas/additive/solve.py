"""The best networks and the Pareto front of an additive problem, by merging partial networks of equal costs.

Of partial networks that reach one state with equal costs only the best can be part of an optimum, whatever the bounds:
a dynamic programme over exact costs, without bins. Costs of a one-stage space take few values (a thousand or so), so
this is the whole solution there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import (
    check_bounds,
    extend,
    first_of_best,
    groups,
    pack,
    reach,
    trace,
    units,
    whole_bounds,
)
from lightning_tas.additive.pareto import nondominated
from lightning_tas.additive.plan import Indices, IntArray, Plan, make_plan
from lightning_tas.additive.problem import Problem, Solution
from lightning_tas.additive.terms import FloatArray

Level = tuple[npt.NDArray[Any], npt.NDArray[Any]]
MAX_LABELS = 20_000_000


@dataclass
class Labels:
    """Labels of one level: state (L,), costs (C, L), score (L,)."""

    state: Indices
    costs: IntArray
    score: FloatArray

    @classmethod
    def start(cls, costs: int) -> Labels:
        """The empty network."""
        return cls(np.zeros(1, dtype=np.intp), np.zeros((costs, 1), dtype=np.int64), np.zeros(1))

    def take(self, at: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Labels:
        """Those at `at`."""
        return Labels(self.state[at], self.costs[:, at], self.score[at])

    def __len__(self) -> int:
        return len(self.state)


def merged(labels: Labels, unit: IntArray, keep: int = 1) -> Indices:
    """Where the `keep` best of every (state, costs) are, ascending by these; of equal scores the first."""
    key = pack(labels.state, labels.costs, unit)
    if keep == 1:
        order = np.argsort(key, kind="stable")
        starts = groups(key[order])
        return order[first_of_best(labels.score[order], starts)] if len(order) else order
    order = np.lexsort((-labels.score, key))
    starts = groups(key[order])
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return order[place < keep]


def solve_merging(
    plan: Plan, low: IntArray, high: IntArray, keep: int, max_labels: int
) -> tuple[Labels, list[Level]] | None:
    """All labels of whole networks within the bounds (C,), with their levels; None beyond `max_labels`."""
    least, most = reach(plan)
    unit = units(plan)
    labels = Labels.start(len(low))
    levels: list[Level] = []
    used = 0
    for number, step in enumerate(plan.steps, start=1):
        used += int((step.first[labels.state + 1] - step.first[labels.state]).sum())
        if used > max_labels:
            return None
        parent, edge = extend(step, labels.state)
        grown = Labels(
            step.target[edge], labels.costs[:, parent] + step.costs[:, edge], labels.score[parent] + step.score[edge]
        )
        possible = np.ones(len(parent), dtype=bool)
        for i in range(len(low)):
            possible &= grown.costs[i] + least[number][i, grown.state] <= high[i]
            possible &= grown.costs[i] + most[number][i, grown.state] >= low[i]
        kept = np.flatnonzero(possible)
        kept = kept[merged(grown.take(kept), unit, keep)]
        labels = grown.take(kept)
        levels.append((parent[kept].astype(np.int32), step.row[edge[kept]].astype(np.int32)))
    return labels, levels


def best(problem: Problem, top: int = 1, max_labels: int = MAX_LABELS) -> Solution:
    """The `top` best networks within the bounds; equal scores in order of their codes."""
    began = time.perf_counter()
    plan = make_plan(problem.space, problem.score, list(problem.costs.values()))
    low, high = whole_bounds(check_bounds(problem.bounds, problem.costs))
    found = solve_merging(plan, low, high, top, max_labels)
    assert found is not None
    labels, levels = found
    at = np.argsort(-labels.score, kind="stable")[:top]
    return finish(problem, plan, levels, at, began, ranked=True)


def front(problem: Problem, max_labels: int = MAX_LABELS) -> Solution:
    """The networks within the bounds that none within them dominates: scores at least, no cost above.

    One network stands for all of equal score and costs.
    """
    began = time.perf_counter()
    plan = make_plan(problem.space, problem.score, list(problem.costs.values()))
    low, high = whole_bounds(check_bounds(problem.bounds, problem.costs))
    found = solve_merging(plan, low, high, 1, max_labels)
    assert found is not None
    labels, levels = found
    at = nondominated(labels.score, labels.costs)
    return finish(problem, plan, levels, at, began, ranked=False)


def finish(
    problem: Problem,
    plan: Plan,
    levels: list[Level],
    last: Indices,
    began: float,
    ranked: bool,
    bound: float | None = None,
) -> Solution:
    """The solution of the labels `last`; scores are summed as `problem.score` sums them."""
    codes = plan.codes(trace(levels, last))
    score = problem.score(codes)
    if ranked:
        order = np.lexsort((*codes.T[::-1], -score))
        codes, score = codes[order], score[order]
    costs = {name: total(codes).astype(np.int64) for name, total in problem.costs.items()}
    if bound is None:
        bound = (float(score[0]) if len(score) else -np.inf) if ranked else 0.0
    labels = sum(len(parent) for parent, _ in levels)
    return Solution(codes, score, costs, True, bound, labels, time.perf_counter() - began)
