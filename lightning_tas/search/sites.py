"""Where block-wise evolution may change a network, and how its blocks stand among those of all networks.

A *site* is a block where blocks have choices of their own (heads, MLP ratio). Where they have none (PiT chooses depth
and heads per stage), it is the stage, whose choices govern its blocks; in a space without choices there either, the
network. A *position* is a place in the depth of the network: (stage, number of the block in it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_tas.search.history import Codes
from lightning_tas.search.objective import FloatArray
from lightning_tas.spaces import SearchSpace

IntArray = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Site:
    """Columns of the codes that change together, and the positions whose scores they stand for."""

    stage: int
    columns: IntArray
    positions: IntArray


def _site(stage: int, columns: Iterable[int], positions: Iterable[int]) -> Site:
    return Site(stage, np.asarray(list(columns), dtype=np.intp), np.asarray(list(positions), dtype=np.intp))


class Sites:
    """The sites of a space. `kind` is "block", "stage" or "network"; `others`: choices outside of blocks and sites."""

    def __init__(self, space: SearchSpace) -> None:
        columns = list(enumerate(space.columns))
        depths = [max(space.choices("depth", s)) for s in range(space.stages)]
        first = np.concatenate([[0], np.cumsum(depths)]).astype(int)
        self.positions = int(first[-1])
        self.first = first[:-1].tolist()
        self._depth = [next(i for i, c in columns if c.name == "depth" and c.stage == s) for s in range(space.stages)]
        self._choices = [np.asarray(space.columns[i].choices) for i in self._depth]
        free = [c for _, c in columns if len(c.choices) > 1]
        if any(c.block is not None for c in free):
            self.kind = "block"
            places = sorted({(c.stage, c.block) for c in free if c.stage is not None and c.block is not None})
            self.sites = [
                _site(s, (i for i, c in columns if (c.stage, c.block) == (s, b)), [self.first[s] + b])
                for s, b in places
            ]
        elif any(c.stage is not None for c in free):
            self.kind = "stage"
            self.sites = [
                _site(s, (i for i, c in columns if c.stage == s), range(first[s], first[s + 1]))
                for s in sorted({c.stage for c in free if c.stage is not None})
            ]
        else:
            self.kind = "network"
            self.sites = [_site(0, (i for i, c in columns if c.block is None), range(self.positions))]
        inside = {i for site in self.sites for i in site.columns.tolist()}
        self.others = [i for i, c in columns if c.block is None and i not in inside]
        self.widths = [i for i in self.others if i not in self._depth]

    def is_depth(self, column: int) -> bool:
        """Whether a column holds the depth of a stage."""
        return column in self._depth

    def depths(self, row: Codes) -> list[int]:
        """Blocks per stage of an encoded network (C,)."""
        return [int(choices[row[i]]) for i, choices in zip(self._depth, self._choices, strict=True)]

    def spread(self, row: Codes, numbers: Sequence[float]) -> FloatArray:
        """One number per block, in block order, at their positions (P,); NaN where the network has no block."""
        out = np.full(self.positions, np.nan)
        done = 0
        for start, depth in zip(self.first, self.depths(row), strict=True):
            out[start : start + depth] = numbers[done : done + depth]
            done += depth
        return out

    def of(self, scores: FloatArray) -> FloatArray:
        """Scores of the sites (..., S) from those of positions (..., P): means over blocks; NaN where there is none."""
        columns = []
        for site in self.sites:
            part = scores[..., site.positions]
            there = ~np.isnan(part)
            total = np.where(there, part, 0.0).sum(axis=-1)
            columns.append(np.where(there.any(axis=-1), total / np.maximum(there.sum(axis=-1), 1), np.nan))
        return np.stack(columns, axis=-1)


class BlockRanks:
    """Rank percentiles of numbers per block among all blocks at the same position of the networks added so far.

    Ranking per position takes out both the trend over depth and the unit. The columns are kept sorted, so that adding
    a generation and ranking a population never sorts the whole archive.
    """

    def __init__(self, quantities: int, positions: int) -> None:
        self._sorted = [[np.empty(0) for _ in range(positions)] for _ in range(quantities)]

    def add(self, table: FloatArray) -> None:
        """Add networks (N, Q, P): Q numbers at each position, NaN where there is no block."""
        for q, columns in enumerate(self._sorted):
            for p, known in enumerate(columns):
                new = table[:, q, p]
                new = np.sort(new[~np.isnan(new)])
                columns[p] = np.insert(known, np.searchsorted(known, new), new)

    def scores(self, table: FloatArray) -> FloatArray:
        """Sums over quantities of the percentiles, in (0, Q], of networks (N, Q, P) among those added: (N, P).

        Equal numbers share the mean of their ranks. Dividing a position's numbers by their median, as D[l] / median
        does, leaves their ranks as they are.
        """
        total = np.zeros((table.shape[0], table.shape[2]))
        for q, columns in enumerate(self._sorted):
            for p, known in enumerate(columns):
                value = table[:, q, p]
                low, high = np.searchsorted(known, value, "left"), np.searchsorted(known, value, "right")
                rank = (low + high + 1) / 2 / max(len(known), 1)
                total[:, p] += np.where(np.isnan(value), np.nan, rank)
        return total
