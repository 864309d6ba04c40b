"""Upper bounds on what a partial network can still reach within the bounds: Lagrangian relaxation.

For prices l of the costs, no network within the bounds scores above  max (score - l . cost) + l . limit,  where the
limit of a positive price is the upper bound and of a negative price the lower one. The maximum over all completions of
a state is one sweep back over the plan. The prices of the least such bound are found by cutting planes (Kelley 1960):
every sweep also finds a network, and its line is a cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_tas.additive.labels import OPEN, by_source
from lightning_tas.additive.plan import Indices, IntArray, Plan
from lightning_tas.additive.terms import FloatArray

SWEEPS = 60
_BOX = 1e3
"""The greatest price, in units of all scores over all costs."""


@dataclass
class Relaxation:
    """Prices (C,), and what they prove: `bound` for the whole space, `potential` (S,) of every state of every level.

    A label's bound is its score - prices . costs + potential + offset. networks: the edges' rows of every network
    that a sweep found, with its score and costs.
    """

    prices: FloatArray
    offset: float
    bound: float
    potential: list[FloatArray]
    found: list[tuple[float, IntArray, list[Indices]]] = field(default_factory=list)

    def of(self, level: int, state: Indices, costs: IntArray, score: FloatArray) -> FloatArray:
        """Upper bounds of labels (L,) of a level."""
        value = score + self.potential[level][state] + self.offset
        for price, cost in zip(self.prices, costs, strict=True):
            if price:
                value -= price * cost
        return value


def sweep(plan: Plan, prices: FloatArray) -> list[FloatArray]:
    """Per level and state the most that completions add to score - prices . costs."""
    best = [np.zeros(1)]
    for step in reversed(plan.steps):
        value = step.score + best[-1][step.target]
        for price, cost in zip(prices, step.costs, strict=True):
            if price:
                value -= price * cost
        best.append(by_source(step, value, np.maximum, -np.inf))
    return best[::-1]


def follow(plan: Plan, prices: FloatArray, potential: list[FloatArray]) -> tuple[float, IntArray, list[Indices]]:
    """Score, costs and rows of the network that attains the sweep's maximum."""
    state, score, costs = 0, 0.0, np.zeros(len(prices), dtype=np.int64)
    rows = []
    for level, step in enumerate(plan.steps, start=1):
        edges = np.arange(step.first[state], step.first[state + 1])
        value = step.score[edges] - prices @ step.costs[:, edges] + potential[level][step.target[edges]]
        edge = edges[int(np.argmax(value))]
        score += float(step.score[edge])
        costs = costs + step.costs[:, edge]
        rows.append(step.row[edge : edge + 1])
        state = int(step.target[edge])
    return score, costs, rows


def relax(plan: Plan, low: IntArray, high: IntArray, sweeps: int = SWEEPS) -> Relaxation:
    """The relaxation of the least bound that `sweeps` sweeps find. low, high: whole bounds (C,), beyond `OPEN` if open.

    Where nothing is within the bounds, its bound falls without end: below every score there is.
    """
    from scipy.optimize import linprog  # not before it is needed: checks of a command line import this module

    sides = [(i, 1.0, float(b)) for i, b in enumerate(high) if b < OPEN]
    sides += [(i, -1.0, float(b)) for i, b in enumerate(low) if b > -OPEN]
    count = len(low)
    best: Relaxation | None = None
    found = []
    cuts: list[tuple[list[float], float]] = []
    # Costs and prices in units of how far networks can differ (at most), so that the linear programme is well scaled.
    scale = np.maximum(np.sum([np.ptp(step.costs, axis=1) for step in plan.steps], axis=0), 1.0)
    span = max(sum(float(np.ptp(step.score)) for step in plan.steps), 1e-300)
    weights = np.zeros(len(sides))
    for _ in range(sweeps):
        prices = np.zeros(count)
        offset = 0.0
        for w, (i, sign, b) in zip(weights, sides, strict=True):
            prices[i] += sign * w / scale[i]
            offset += sign * w / scale[i] * b
        potential = sweep(plan, prices)
        bound = float(potential[0][0]) + offset
        network = follow(plan, prices, potential)
        found.append(network)
        if best is None or bound < best.bound:
            best = Relaxation(prices, offset, bound, potential)
        score, costs, _ = network
        # The line of this network: score + sum of w * sign * (b - cost) / scale.
        cuts.append(([sign * (b - float(costs[i])) / scale[i] for i, sign, b in sides], score))
        if not sides:
            break
        result = linprog(
            [*np.zeros(len(sides)), 1.0],
            A_ub=[[*slope, -1.0] for slope, _ in cuts],
            b_ub=[-value for _, value in cuts],
            bounds=[(0, _BOX * span)] * len(sides) + [(None, None)],
        )
        if not result.success or result.fun >= best.bound - 1e-12 * abs(best.bound):
            break
        weights = result.x[:-1]
    assert best is not None
    best.found = found
    return best
