"""Labels: what is known of the partial networks that reach a state, and how a layer of them grows by one step.

A label is a state, the costs so far and whatever a solver keeps with them. Costs are exact int64; labels of one state
with equal costs are one key, packed into an int64, so that merging them is a sort.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.plan import Indices, IntArray, Plan, Step
from lightning_tas.additive.terms import FloatArray, Total
from lightning_tas.errors import UserError, unknown

Bounds = Mapping[str, tuple[float, float]]
OPEN = 1 << 62
"""Beyond every cost: the whole-number form of an open side (its negative below)."""


@dataclass
class Labels:
    """Labels of one level: state (L,), costs (C, L), score (L,)."""

    state: Indices
    costs: IntArray
    score: FloatArray

    @classmethod
    def start(cls, costs: int) -> Labels:
        """The one of no columns assigned."""
        return cls(np.zeros(1, dtype=np.intp), np.zeros((costs, 1), dtype=np.int64), np.zeros(1))

    def take(self, at: npt.NDArray[np.intp]) -> Labels:
        """Those at `at`."""
        return Labels(self.state[at], self.costs[:, at], self.score[at])

    def __len__(self) -> int:
        return len(self.state)


def check_bounds(bounds: Bounds | None, costs: Mapping[str, Total]) -> dict[str, tuple[float, float]]:
    """Bounds of all costs, open where none is given; `UserError` for unknown names and for inverted bounds."""
    found = {name: (-math.inf, math.inf) for name in costs}
    for name, (low, high) in (bounds or {}).items():
        if name not in costs:
            raise unknown("bounds", name, costs)
        if math.isnan(low) or math.isnan(high) or low > high:
            raise UserError(f"bounds: of {name} the lower, {low}, exceeds the upper, {high}")
        found[name] = (float(low), float(high))
    return found


def whole_bounds(bounds: Mapping[str, tuple[float, float]]) -> tuple[IntArray, IntArray]:
    """The least and greatest whole numbers within the bounds, (C,) each; open sides are beyond every cost."""
    low = [-OPEN if math.isinf(b[0]) else math.ceil(b[0]) for b in bounds.values()]
    high = [OPEN if math.isinf(b[1]) else math.floor(b[1]) for b in bounds.values()]
    return np.asarray(low, dtype=np.int64), np.asarray(high, dtype=np.int64)


def extend(step: Step, state: Indices) -> tuple[Indices, Indices]:
    """(parent, edge) of every way to continue labels in the states `state` (L,) along the step's edges."""
    start = step.first[state]
    degree = step.first[state + 1] - start
    parent = np.repeat(np.arange(len(state)), degree)
    edge = np.arange(len(parent)) + np.repeat(start - (np.cumsum(degree) - degree), degree)
    return parent, edge


def by_source(step: Step, values: npt.NDArray[Any], ufunc: np.ufunc, empty: Any) -> npt.NDArray[Any]:
    """`ufunc` over the last axis of `values` (..., E), per source state; `empty` for states without edges."""
    out = np.full((*values.shape[:-1], len(step.first) - 1), empty, dtype=values.dtype)
    filled = step.first[:-1] < step.first[1:]
    out[..., filled] = ufunc.reduceat(values, step.first[:-1][filled], axis=-1)
    return out


def reach(plan: Plan) -> tuple[list[IntArray], list[IntArray]]:
    """The least and the most that completions of a state add to every cost: per level (C, S)."""
    number = len(plan.steps[0].costs)
    least, most = [np.zeros((number, 1), dtype=np.int64)], [np.zeros((number, 1), dtype=np.int64)]
    for step in reversed(plan.steps):
        least.append(by_source(step, step.costs + least[-1][:, step.target], np.minimum, OPEN))
        most.append(by_source(step, step.costs + most[-1][:, step.target], np.maximum, -OPEN))
    return least[::-1], most[::-1]


def units(plan: Plan) -> IntArray:
    """Per cost the greatest whole number that all differences between networks are multiples of: (C,), at least 1."""
    found = np.zeros(len(plan.steps[0].costs), dtype=np.int64)
    for step in plan.steps:
        if step.costs.size:
            found = np.gcd(found, np.gcd.reduce(step.costs - step.costs[:, :1], axis=1))
    return np.maximum(found, 1)


def pack(state: Indices, costs: IntArray, unit: IntArray, settled: npt.NDArray[np.bool_] | None = None) -> IntArray:
    """One int64 a label, equal where state and costs (C, L) are; where `settled` (C, L), the cost does not count."""
    key = state.astype(np.int64)
    size = int(key.max(initial=0)) + 1
    for i, cost in enumerate(costs):
        least = int(cost.min(initial=OPEN))
        place = (cost - least) // unit[i]
        if settled is not None:
            place = np.where(settled[i], 0, place + 1)
        number = int(place.max(initial=0)) + 1
        if size * number >= OPEN:  # ranks instead of values: there are no more than labels
            key, size = _ranks(key)
            if size * number >= OPEN:
                place, number = _ranks(place)
        key = key * number + place
        size *= number
    return key


def _ranks(values: IntArray) -> tuple[IntArray, int]:
    different, rank = np.unique(values, return_inverse=True)
    return rank.reshape(-1).astype(np.int64), len(different)


def groups(sorted_keys: IntArray) -> Indices:
    """Where runs of equal keys start."""
    if not len(sorted_keys):
        return np.zeros(0, dtype=np.intp)
    return np.concatenate([[0], np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1])


def first_of_best(score: FloatArray, starts: Indices) -> Indices:
    """Of every run the place of its first greatest score."""
    lengths = np.diff(np.append(starts, len(score)))
    hits = np.flatnonzero(score == np.repeat(np.maximum.reduceat(score, starts), lengths))
    run = np.searchsorted(starts, hits, side="right")
    return hits[np.concatenate([[True], run[1:] != run[:-1]])]


def trace(levels: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], last: Indices) -> list[Indices]:
    """The row of every step of the labels `last`, from the (parent, row) that every level keeps of its labels."""
    rows: list[Indices] = []
    at = last
    for parent, row in reversed(levels):
        rows.append(row[at].astype(np.intp))
        at = parent[at]
    return rows[::-1]
