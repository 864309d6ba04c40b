"""The members of a space whose costs are within bounds: how many, which is number r, and uniform samples of them.

Partial networks of one state and equal costs are one label that knows how many they are, so counting is a sum over
layers; and because every label knows its predecessors, the networks within bounds are numbered from 0 and number r is
found in one walk back. A uniform number is a uniform network, with no rejection however narrow the bounds are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import (
    Bounds,
    by_source,
    check_bounds,
    extend,
    groups,
    pack,
    reach,
    units,
    whole_bounds,
)
from lightning_tas.additive.plan import Indices, Plan, Step, make_plan
from lightning_tas.additive.terms import Total
from lightning_tas.errors import UserError
from lightning_tas.randomness import numpy_generator
from lightning_tas.spaces import SearchSpace

Counts = npt.NDArray[Any]
"""int64 where the space's size fits, else Python integers (dtype object)."""
MAX_LABELS = 5_000_000
"""Partial networks to tell apart, all layers together: at most some seconds and 0.5 GB."""


def ranges(space: SearchSpace, total: Total) -> tuple[float, float]:
    """The least and the greatest value of a sum over the whole space, exact but for float64's rounding."""
    plan = make_plan(space, total)
    least, most = np.zeros(1), np.zeros(1)
    for step in reversed(plan.steps):
        least = by_source(step, step.score + least[step.target], np.minimum, np.inf)
        most = by_source(step, step.score + most[step.target], np.maximum, -np.inf)
    return float(least[0]), float(most[0])


@dataclass(frozen=True)
class _Layer:
    """The ways to reach the labels of one level: those of label i are start[i]..start[i + 1], counted up in `upto`."""

    parent: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    start: Indices
    upto: Counts
    sources: int  # labels of the level before


class Members:
    """The members of `space` whose `costs` are within `bounds` (inclusive; open where infinite or not given).

    ``len`` is `total`, a Python int. Raises `TooMany` when more than `max_labels` partial networks must be told apart,
    which happens in spaces of several stages of many blocks (their costs have too many different values).
    """

    def __init__(
        self, space: SearchSpace, costs: Mapping[str, Total], bounds: Bounds | None = None, max_labels: int = MAX_LABELS
    ) -> None:
        given = check_bounds(bounds, costs)
        limited = {name: b for name, b in given.items() if b != (-np.inf, np.inf)}
        self.space = space
        self.plan = make_plan(space, None, [costs[name] for name in limited])
        self._dtype = np.int64 if space.size() < 2**62 else object
        low, high = whole_bounds(limited)
        self.layers = list(self._grow(self.plan, low[:, None], high[:, None], max_labels))
        last = self.layers[-1].upto
        self.total = int(last[-1]) if len(last) else 0

    def _grow(self, plan: Plan, low: npt.NDArray[Any], high: npt.NDArray[Any], max_labels: int) -> Any:
        least, most = reach(plan)
        unit = units(plan)
        state, cost = np.zeros(1, dtype=np.intp), np.zeros((len(low), 1), dtype=np.int64)
        settled, count = np.zeros((len(low), 1), dtype=bool), np.ones(1, dtype=self._dtype)
        left = max_labels
        for level, step in enumerate(plan.steps, start=1):
            left -= _growth(step, state)
            if left < 0:
                raise TooMany(f"more than {max_labels:,} partial networks of space {self.space.name!r} differ in costs")
            parent, edge = extend(step, state)
            sources = len(state)
            state, cost, settled = step.target[edge], cost[:, parent] + step.costs[:, edge], settled[:, parent]
            lowest, highest = cost + least[level][:, state], cost + most[level][:, state]
            # A cost that stays within bounds whatever follows needs no telling apart.
            possible = (settled | ((lowest <= high) & (highest >= low))).all(axis=0)
            settled |= (lowest >= low) & (highest <= high)
            key = pack(state[possible], cost[:, possible], unit, settled[:, possible])
            order = np.flatnonzero(possible)[np.argsort(key, kind="stable")]
            key.sort()
            starts = groups(key)
            upto = np.cumsum(count[parent[order]])
            kept = order[starts]
            state, cost, settled = state[kept], cost[:, kept], settled[:, kept]
            ends = np.append(starts[1:], len(order)) - 1
            count = np.diff(np.concatenate([np.zeros(1, dtype=self._dtype), upto[ends]])) if len(kept) else upto
            rows = step.row[edge[order]].astype(np.int32)
            yield _Layer(parent[order].astype(np.int32), rows, np.append(starts, len(order)), upto, sources)

    def __len__(self) -> int:
        return self.total

    def codes(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int16]:
        """The codes (N, K) of the members with these numbers, each from 0 to `total` - 1."""
        rank = np.asarray(numbers, dtype=self._dtype).reshape(-1)
        if len(rank) and not 0 <= rank.min() <= rank.max() < self.total:
            raise UserError(f"numbers: {int(rank.min())} to {int(rank.max())} are not all of 0..{self.total - 1}")
        if not len(rank):
            return np.empty((0, self.plan.width), dtype=np.int16)
        rows: list[Indices] = []
        label = np.zeros(len(rank), dtype=np.intp)
        for layer in reversed(self.layers):
            before = np.concatenate([np.zeros(1, dtype=self._dtype), layer.upto])
            place = rank + before[layer.start[label]]
            way = np.searchsorted(layer.upto, place, side="right")
            rank = place - before[way]
            rows.append(layer.row[way].astype(np.intp))
            label = layer.parent[way].astype(np.intp)
        return self.plan.codes(rows[::-1])

    def sample(self, seed: int, n: int) -> npt.NDArray[np.int16]:
        """Codes (n, K) of independent uniform members; the first are the same for every `n`. `UserError` if empty."""
        if not self.total:
            raise UserError(f"sample: no member of space {self.space.name!r} is within the bounds")
        rng = numpy_generator(seed, "additive.sample")
        if self._dtype is np.int64:
            return self.codes(rng.integers(0, self.total, size=n))
        return self.codes(np.array([_below(rng, self.total) for _ in range(n)], dtype=object))


class TooMany(Exception):
    """Counting would have to tell too many partial networks apart."""


def _growth(step: Step, state: Indices) -> int:
    return int((step.first[state + 1] - step.first[state]).sum())


def _below(rng: np.random.Generator, total: int) -> int:
    """A uniform whole number in [0, total), by rejection of equal powers of two."""
    bits = total.bit_length()
    while True:
        drawn = int.from_bytes(rng.bytes((bits + 7) // 8), "little") >> (-bits % 8)
        if drawn < total:
            return drawn


def count(
    space: SearchSpace, costs: Mapping[str, Total], bounds: Bounds | None = None, max_labels: int = MAX_LABELS
) -> int | None:
    """How many members of `space` are within `bounds`; None where that takes more than `max_labels` labels."""
    try:
        return Members(space, costs, bounds, max_labels).total
    except TooMany:
        return None


def sample(
    space: SearchSpace, costs: Mapping[str, Total], bounds: Bounds | None, seed: int, n: int
) -> npt.NDArray[np.int16]:
    """Codes (n, K) of independent members, exactly uniform over those within `bounds`.

    `UserError` where there is none, `TooMany` where they cannot be counted. For more draws keep a `Members`.
    """
    return Members(space, costs, bounds).sample(seed, n)
