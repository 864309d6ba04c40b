"""One pass over a plan with labels: grow a layer, leave out what cannot matter, go on.

What cannot matter is for the caller to say (`Rule`): labels that no completion brings within bounds; labels that
cannot beat what is known; of labels with one state and equal costs all but the best; labels that others dominate.
Only where more than `cap` labels are left are some dropped that might matter, and the walk says what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import OPEN, Labels, extend, first_of_best, groups, pack, reach, trace, units
from lightning_tas.additive.pareto import coarse, undominated
from lightning_tas.additive.plan import Indices, IntArray, Plan, Step
from lightning_tas.additive.relax import Relaxation

Level = tuple[npt.NDArray[Any], npt.NDArray[Any]]
CHUNK = 4_000_000
"""Candidates made at once."""


@dataclass(frozen=True)
class Rule:
    """What a walk may leave out.

    low, high: (C,) whole bounds that must be kept; beyond all costs where a side is open. compare: per cost 1 where
    less is better, -1 where more is, 0 where it does not matter; None: labels of equal costs compete, others never.
    keep: how many layers of dominance stay. relaxation, floor: labels whose upper
    bound does not exceed `floor` are out. cap: labels of a level; thin: drop the least upper bounds beyond it
    ("bound", None: those and, half of the cap, evenly), or dominate up to a growing difference in score ("score").
    """

    low: IntArray
    high: IntArray
    compare: tuple[int, ...] | None = None
    keep: int = 1
    relaxation: Relaxation | None = None
    floor: float = -np.inf
    cap: int | None = None
    thin: str = "bound"
    candidates: int | None = None  # in all levels together; more end the walk


@dataclass
class Walk:
    """Labels of the whole networks, their levels, and what dropping cost.

    dropped: no network that was dropped for want of room scores above it. slack: of a front, by how much at most a
    dropped network's score exceeds that of a kept one of no greater costs.
    """

    labels: Labels
    levels: list[Level] = field(default_factory=list)
    dropped: float = -np.inf
    slack: float = 0.0
    complete: bool = True

    def rows(self, at: Indices) -> list[Indices]:
        """The rows of every step of the networks `at`."""
        return trace(self.levels, at)

    @property
    def number(self) -> int:
        """Labels of all levels."""
        return sum(len(parent) for parent, _ in self.levels)


def walk(plan: Plan, rule: Rule) -> Walk:
    """The labels that `rule` leaves; `complete` is false where it took more candidates than `rule` allows."""
    least, most = reach(plan)
    unit = units(plan)
    found = Walk(Labels.start(len(rule.low)))
    used, step_of = 0, 0.0
    for level, step in enumerate(plan.steps, start=1):
        state = found.labels.state
        used += int((step.first[state + 1] - step.first[state]).sum())
        if rule.candidates is not None and used > rule.candidates:
            found.complete = False
            return found
        grown, parent, row = grow(found.labels, step, level, rule, least[level], most[level])
        at = _select(grown, rule, unit, least[level])
        if rule.cap is not None and len(at) > rule.cap:
            if rule.thin == "score":
                at, step_of = _thin_scores(grown, at, rule, unit, least[level], step_of)
                found.slack += step_of
            else:
                at, dropped = _thin_bounds(grown, at, rule, level)
                found.dropped = max(found.dropped, dropped)
        found.labels = grown.take(at)
        found.levels.append((parent[at].astype(np.int32), row[at].astype(np.int32)))
    return found


def grow(
    labels: Labels, step: Step, level: int, rule: Rule, least: IntArray, most: IntArray
) -> tuple[Labels, Indices, Indices]:
    """Continuations that bounds and floor allow, with their parents and rows; chunk by chunk, coarsely filtered."""
    degree = step.first[labels.state + 1] - step.first[labels.state]
    ends = np.cumsum(degree)
    cuts = np.searchsorted(ends, np.arange(CHUNK, int(ends[-1]) if len(ends) else 0, CHUNK))
    parts = []
    for part in np.split(np.arange(len(labels)), np.unique(cuts)):
        parent, edge = extend(step, labels.state[part])
        parent = part[parent]
        grown = Labels(
            step.target[edge], labels.costs[:, parent] + step.costs[:, edge], labels.score[parent] + step.score[edge]
        )
        possible = np.ones(len(parent), dtype=bool)
        for i, (low, high) in enumerate(zip(rule.low, rule.high, strict=True)):
            possible &= grown.costs[i] + least[i, grown.state] <= high
            possible &= grown.costs[i] + most[i, grown.state] >= low
        if rule.relaxation is not None and np.isfinite(rule.floor):
            possible &= rule.relaxation.of(level, grown.state, grown.costs, grown.score) > rule.floor
        at = np.flatnonzero(possible)
        if len(cuts) and rule.keep == 1:
            at = at[_coarse(grown.take(at), rule, least)]
        parts.append((grown.take(at), parent[at], step.row[edge[at]]))
    if len(parts) == 1:
        return parts[0]
    whole = Labels(
        np.concatenate([p[0].state for p in parts]),
        np.concatenate([p[0].costs for p in parts], axis=1),
        np.concatenate([p[0].score for p in parts]),
    )
    return whole, np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])


def _compared(labels: Labels, rule: Rule) -> IntArray:
    """The costs that dominance looks at, less being better."""
    assert rule.compare is not None
    signs = np.asarray(rule.compare, dtype=np.int64)
    return labels.costs[signs != 0] * signs[signs != 0, None]


def _groups(labels: Labels, rule: Rule, unit: IntArray, least: IntArray) -> IntArray:
    """Labels that may dominate one another: of one state, and of equal costs where less of them may be too little."""
    assert rule.compare is not None
    held = [i for i, sign in enumerate(rule.compare) if sign > 0 and rule.low[i] > -OPEN]
    costs = labels.costs[held]
    settled = costs + least[held][:, labels.state] >= rule.low[held, None]
    return pack(labels.state, costs, unit[held], settled)


def _coarse(labels: Labels, rule: Rule, least: IntArray) -> Indices:
    if rule.compare is None or not len(labels):
        return np.arange(len(labels))
    return coarse(
        _groups(labels, rule, np.ones(len(rule.low), dtype=np.int64), least), labels.score, _compared(labels, rule)
    )


def _select(labels: Labels, rule: Rule, unit: IntArray, least: IntArray) -> Indices:
    """Where the labels are that may matter."""
    if not len(labels):
        return np.arange(0)
    if rule.compare is None:
        return merged(labels, unit)
    return undominated(_groups(labels, rule, unit, least), labels.score, _compared(labels, rule), rule.keep)


def merged(labels: Labels, unit: IntArray) -> Indices:
    """Where the best of every (state, costs) are, ascending by these; of equal scores the first."""
    key = pack(labels.state, labels.costs, unit)
    order = np.argsort(key, kind="stable")
    return order[first_of_best(labels.score[order], groups(key[order]))]


def _thin_bounds(labels: Labels, at: Indices, rule: Rule, level: int) -> tuple[Indices, float]:
    """`cap` labels of the greatest upper bounds, and the greatest bound dropped."""
    assert rule.cap is not None and rule.relaxation is not None
    bound = rule.relaxation.of(level, labels.state[at], labels.costs[:, at], labels.score[at])
    order = np.argsort(-bound, kind="stable")
    if np.isfinite(rule.floor):
        kept, rest = order[: rule.cap], order[rule.cap :]
        return at[np.sort(kept)], float(bound[rest].max())
    # Nothing within the bounds is known yet: good labels may all be too costly, so others go on, too.
    best, others = order[: rule.cap // 2], np.sort(order[rule.cap // 2 :])
    spread = others[np.linspace(0, len(others) - 1, rule.cap - len(best)).astype(np.intp)]
    kept = np.union1d(best, spread)
    rest = np.setdiff1d(np.arange(len(at)), kept)
    return at[kept], float(bound[rest].max())


def _thin_scores(
    labels: Labels, at: Indices, rule: Rule, unit: IntArray, least: IntArray, step: float
) -> tuple[Indices, float]:
    """At most `cap` labels: scores count in steps, which grow until enough are dominated; and the step.

    A label is dropped only where one that stays has at least its step, so at most a step less. An infinite step: there
    were too many still, and some were dropped for no reason.
    """
    assert rule.cap is not None
    score = labels.score[at]
    least_score, span = float(score.min()), float(np.ptp(score))
    step = max(step, span * 2.0**-16)
    part = labels.take(at)
    group, costs = _groups(part, rule, unit, least), _compared(part, rule)
    while True:
        coarser = np.floor((score - least_score) / step)
        # Of one step the best is to stay, so it comes first among equals.
        order = np.lexsort((-score, group))
        kept = order[undominated(group[order], coarser[order], costs[:, order])]
        if len(kept) <= rule.cap:
            return at[np.sort(kept)], step
        if step > span:
            return at[np.sort(kept)[np.linspace(0, len(kept) - 1, rule.cap).astype(np.intp)]], np.inf
        step *= 2
