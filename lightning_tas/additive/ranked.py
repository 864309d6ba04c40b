"""The k best networks of a dynamic programme: its labels once, and then one network after the other.

Merging keeps the best way to every label, but remembers the others. What precedes a label at best is known exactly, so
from the end networks are completed backwards, best first, and come out in order: k costs only the ways looked at.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import Labels, first_of_best, groups, pack, reach, units
from lightning_tas.additive.plan import Plan
from lightning_tas.additive.walk import Rule, grow

_Link = tuple[int, Any]


def ranked(plan: Plan, rule: Rule, top: int) -> tuple[npt.NDArray[np.int16], int] | None:
    """Codes (at most `top`, K) of the best networks, best first, and the number of labels.

    None where merging labels of equal costs takes more candidates than `rule` allows.
    """
    least, most = reach(plan)
    unit = units(plan)
    labels, used, number = Labels.start(len(rule.low)), 0, 0
    best = [labels.score]
    layers = []
    for level, step in enumerate(plan.steps, start=1):
        used += int((step.first[labels.state + 1] - step.first[labels.state]).sum())
        if rule.candidates is not None and used > rule.candidates:
            return None
        grown, parent, row = grow(labels, step, level, rule, least[level], most[level])
        if not len(grown):
            return np.empty((0, plan.width), dtype=np.int16), number
        key = pack(grown.state, grown.costs, unit)
        order = np.argsort(key, kind="stable")
        starts = groups(key[order])
        score = grown.score[order]
        layers.append((np.append(starts, len(order)), parent[order], row[order], score))
        labels = grown.take(order[first_of_best(score, starts)])
        best.append(labels.score)
        number += len(labels)
    return _unwind(plan, layers, best, top), number


def _unwind(
    plan: Plan, layers: Sequence[tuple[npt.NDArray[Any], ...]], best: list[npt.NDArray[np.float64]], top: int
) -> npt.NDArray[np.int16]:
    """Completes networks from their ends, those of the greatest score first; of equal ones in order of finding."""
    order = itertools.count()
    last = len(layers)
    # (less is better: - score of the best completion, age, level, label, score of what follows, rows of what follows)
    heap: list[tuple[float, int, int, int, float, _Link | None]] = [
        (-score, next(order), last, label, 0.0, None) for label, score in enumerate(best[last].tolist())
    ]
    heapq.heapify(heap)
    found: list[list[int]] = []
    while heap and len(found) < top:
        _, _, level, label, after, link = heapq.heappop(heap)
        if not level:
            rows = []
            while link is not None:
                rows.append(link[0])
                link = link[1]
            found.append(rows)
            continue
        starts, parent, row, score = layers[level - 1]
        ways = slice(starts[label], starts[label + 1])
        before = best[level - 1][parent[ways]]
        for p, r, s, b in zip(
            parent[ways].tolist(), row[ways].tolist(), score[ways].tolist(), before.tolist(), strict=True
        ):
            heapq.heappush(heap, (-(s + after), next(order), level - 1, p, s - b + after, (r, link)))
    rows_by_step = np.array(found, dtype=np.intp).reshape(len(found), last).T
    return plan.codes(list(rows_by_step))
