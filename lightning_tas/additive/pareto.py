"""Which labels no other one dominates: scores not above, every cost not below.

`nondominated` is exact. `thinned` is a coarse filter for many labels, of one pass over a grid: what it drops is
dominated, what it keeps need not be undominated. Both treat groups (states) apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.plan import Indices, IntArray
from lightning_tas.additive.terms import FloatArray

BoolArray = npt.NDArray[np.bool_]
_PAIRS = 2048


def nondominated(score: FloatArray, costs: IntArray) -> Indices:
    """The labels (score (N,), costs (C, N)) that no other dominates, ascending by costs; of equal ones the first.

    One and two costs take N log^2 N operations, more costs N times the labels kept.
    """
    order = np.lexsort((np.arange(len(score)), -score, *costs[::-1]))
    if not len(order) or not len(costs):
        return order[:1]
    if len(costs) == 1:
        value = score[order]
        best = np.maximum.accumulate(value)
        return order[np.concatenate([[True], value[1:] > best[:-1]])]
    if len(costs) == 2:
        return order[_staircases(score[order], costs[1, order])]
    return order[_pairwise(score[order], costs[:, order])]


def _staircases(score: FloatArray, second: IntArray) -> Indices:
    """Of labels ascending by the first cost, those that no earlier one beats in score and second cost.

    Bottom up: blocks of doubling width; in every pair of blocks, labels of the right one are compared with the best
    score of the left one up to their second cost. A dominated label needs no further comparing: its dominator stays.
    """
    number = len(score)
    alive = np.arange(number)
    by_second = np.argsort(second, kind="stable")
    rank = np.empty(number, dtype=np.int64)
    rank[by_second] = np.arange(number)  # of equal costs the earlier first
    level = np.empty(number, dtype=np.int64)
    level[np.argsort(score, kind="stable")] = np.arange(number)
    ordered = np.sort(score)
    level = np.searchsorted(ordered, score, side="left")  # equal scores are equal levels
    width = 1
    while width < number:
        pair = alive // (2 * width)
        at = np.argsort(pair * number + rank[alive])
        item = alive[at]
        left = (item // width) % 2 == 0
        floor = pair[at] * (number + 1)
        # Within a pair the running maximum is of its left block only: other pairs' values are below the floor.
        best = np.maximum.accumulate(floor + np.where(left, level[item] + 1, 0))
        beaten = ~left & (best - floor >= level[item] + 1)
        alive = np.sort(item[~beaten])
        width *= 2
    return alive


def _pairwise(score: FloatArray, costs: IntArray) -> Indices:
    """Of labels in lexicographic order of costs, those that none before dominates; chunk by chunk."""
    kept = np.zeros(0, dtype=np.intp)
    for start in range(0, len(score), _PAIRS):
        chunk = np.arange(start, min(start + _PAIRS, len(score)))
        for against in (*np.array_split(kept, len(kept) // _PAIRS + 1), None):
            rivals = chunk if against is None else against
            beaten = (score[rivals] >= score[chunk, None]) & (rivals < chunk[:, None])
            for cost in costs:
                beaten &= cost[rivals] <= cost[chunk, None]
            chunk = chunk[~beaten.any(axis=1)]
        kept = np.concatenate([kept, chunk])
    return kept
