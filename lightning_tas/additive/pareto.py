"""Which labels no other one of their group dominates: scores not above, every cost not below.

`undominated` is exact. Where labels are many it first passes a grid over two costs, whose cells know the best score
below and left of them: that drops most of what is dominated in one pass.
"""

from __future__ import annotations

import numpy as np

from lightning_tas.additive.labels import groups
from lightning_tas.additive.plan import Indices, IntArray
from lightning_tas.additive.terms import FloatArray

_MANY = 20_000
_CELLS = 512
_PAIRS = 2048
_CHUNK = 4096


def undominated(group: IntArray, score: FloatArray, costs: IntArray, keep: int = 1) -> Indices:
    """Where the labels are that fewer than `keep` others of their group certainly dominate; of equal ones the first.

    group, score: (N,); costs: (C, N). Dominating needs a score at least and no cost above. With `keep` 1 exactly those
    that nothing dominates; above, those of the first `keep` layers (what is undominated, what is without these, ...):
    a label of a later layer has a dominator in each of them. Up to two costs take N log^2 N operations, more take N
    times the labels kept. Ascending by group and costs.
    """
    left = np.arange(len(score))
    layers = []
    for _ in range(keep):
        if not len(left):
            break
        at = left[coarse(group[left], score[left], costs[:, left])] if len(left) > _MANY else left
        at = at[_exact(group[at], score[at], costs[:, at])]
        layers.append(at)
        if keep > 1:
            left = np.setdiff1d(left, at, assume_unique=True)
    found = np.concatenate(layers) if layers else left
    return found[np.lexsort((*costs[::-1, found], group[found]))] if keep > 1 else found


def coarse(group: IntArray, score: FloatArray, costs: IntArray) -> Indices:
    """Where the labels are that none of a cell lower in both of two costs beats: what is dropped is dominated."""
    if len(costs) != 2 or not len(score):
        return np.arange(len(score))
    groups, number = np.unique(group, return_inverse=True)
    if len(groups) > 64:
        return np.arange(len(score))
    cell = number.reshape(-1).astype(np.int64)
    for cost in costs:
        least = int(cost.min())
        width = (int(cost.max()) - least) // _CELLS + 1
        cell = cell * _CELLS + (cost - least) // width
    best = np.full(len(groups) * _CELLS * _CELLS, -np.inf)
    np.maximum.at(best, cell, score)
    grid = best.reshape(len(groups), _CELLS, _CELLS)
    np.maximum.accumulate(grid, axis=1, out=grid)
    np.maximum.accumulate(grid, axis=2, out=grid)
    below = np.full_like(grid, -np.inf)
    below[:, 1:, 1:] = grid[:, :-1, :-1]  # lower in both costs, so in truth less of both
    return np.flatnonzero(below.reshape(-1)[cell] < score)


def _exact(group: IntArray, score: FloatArray, costs: IntArray) -> Indices:
    order = np.lexsort((-score, *costs[::-1], group))
    if len(costs) > 2:
        return order[_pairwise(group[order], score[order], costs[:, order])]
    # An earlier group must never dominate a later one: its second costs count as greater than all of those.
    second = costs[1, order] if len(costs) == 2 else np.zeros(len(order), dtype=np.int64)
    by_second = np.lexsort((second, -group[order]))
    rank = np.empty(len(order), dtype=np.int64)
    rank[by_second] = np.arange(len(order))  # of equal costs the earlier first
    starts = groups(group[order])
    if len(order) < _CHUNK or len(starts) * _CHUNK > len(order):
        return order[_staircases(score[order], rank)]
    parts = zip(starts, np.append(starts[1:], len(order)), strict=True)
    return order[np.concatenate([start + _swept(score[order[start:end]], rank[start:end]) for start, end in parts])]


def _swept(score: FloatArray, rank: IntArray) -> Indices:
    """As `_staircases`, chunk by chunk against the staircase of all before: chunks fit the cache."""
    kept = []
    steps, heights = np.zeros(0, dtype=np.int64), np.full(1, -np.inf)  # best score up to every rank that improves it
    for start in range(0, len(score), _CHUNK):
        here, value = rank[start : start + _CHUNK], score[start : start + _CHUNK]
        left = np.flatnonzero(heights[np.searchsorted(steps, here)] < value)
        left = left[_staircases(value[left], here[left])]
        kept.append(start + left)
        both, height = np.concatenate([steps, here[left]]), np.concatenate([heights[1:], value[left]])
        order = np.argsort(both)
        top = np.maximum.accumulate(height[order])
        rises = np.concatenate([[True], top[1:] > top[:-1]]) if len(top) else np.zeros(0, dtype=bool)
        steps, heights = both[order][rises], np.concatenate([[-np.inf], top[rises]])
    return np.concatenate(kept)


def _staircases(score: FloatArray, rank: IntArray) -> Indices:
    """The labels i that no earlier j of smaller rank beats: score[j] >= score[i].

    Bottom up: blocks of doubling width; in every pair of blocks, labels of the right one are compared with the best
    score of the left one up to their rank. A beaten label needs no further comparing: what beats it stays.
    """
    number = len(score)
    level = np.searchsorted(np.sort(score), score, side="left") + 1  # equal scores are equal levels
    span = int(rank.max(initial=0)) + 1
    alive = np.arange(number)
    width = 1
    while width < number:
        pair = alive // (2 * width)
        at = np.argsort(pair * span + rank[alive])
        item = alive[at]
        left = (item // width) % 2 == 0
        floor = pair[at] * (number + 1)
        # Floors separate the pairs: a running maximum from an earlier pair is below the floor of this one.
        best = np.maximum.accumulate(floor + np.where(left, level[item], 0)) - floor
        beaten = ~left & (best >= level[item])
        if beaten.any():
            alive = np.sort(item[~beaten])
        width *= 2
    return alive


def _pairwise(group: IntArray, score: FloatArray, costs: IntArray) -> Indices:
    """Of labels in lexicographic order of group and costs, those that none before dominates; chunk by chunk."""
    kept = np.zeros(0, dtype=np.intp)
    for start in range(0, len(score), _PAIRS):
        chunk = np.arange(start, min(start + _PAIRS, len(score)))
        for rivals in (*np.array_split(kept, len(kept) // _PAIRS + 1), chunk):
            beaten = (score[rivals] >= score[chunk, None]) & (rivals < chunk[:, None])
            beaten &= group[rivals] == group[chunk, None]
            for cost in costs:
                beaten &= cost[rivals] <= cost[chunk, None]
            chunk = chunk[~beaten.any(axis=1)]
        kept = np.concatenate([kept, chunk])
    return kept
