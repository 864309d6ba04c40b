"""Bins of a resource: which interval [c - margin, c) an architecture of integer cost falls in, and the best of each.

Edges are decimal numbers in the user's unit but whole numbers in parameters or multiply-accumulates, so they are made
and compared as exact fractions: an architecture of exactly 6,000,000 parameters is in bin 7, never in bin 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

UNITS = {"Mparams": 10**6, "GMACs": 10**9}
MAX_BINS = 100_000


def exact(value: float) -> Fraction:
    """The decimal number that the user wrote (0.1 is a tenth, not the nearest binary fraction)."""
    return Fraction(str(value))


@dataclass(frozen=True)
class Bins:
    """Consecutive half-open intervals; `names[k]` is the upper edge of bin k in the unit, `edges` has one more entry.

    edges: whole-number thresholds (K + 1,): cost x is in bin k when edges[k] <= x < edges[k + 1].
    """

    unit: str
    names: tuple[float, ...]
    edges: tuple[int, ...]

    @classmethod
    def build(
        cls,
        margin: float,
        unit: str,
        reach: tuple[int, int],
        limits: tuple[float | None, float | None] = (None, None),
        whole_only: bool = False,
    ) -> Bins:
        """Bins of width `margin` over `limits`, by default the multiples of `margin` that cover `reach` (min, max).

        The last bin ends at the upper limit, which no architecture exceeds; with `whole_only` (the released code) a
        last bin narrower than `margin` is left out. UserError for a margin that is not positive, inverted limits, or
        limits that no architecture meets, naming the reachable range.
        """
        if unit not in UNITS:
            raise unknown("unit", unit, UNITS)
        if not (isinstance(margin, (int, float)) and math.isfinite(margin) and margin > 0):
            raise UserError(f"margin: {margin!r} must be a positive number of {unit}")
        scale, step = UNITS[unit], exact(margin)
        least, most = (Fraction(r, scale) for r in reach)
        low = exact(limits[0]) if limits[0] is not None else math.floor(least / step) * step
        high = exact(limits[1]) if limits[1] is not None else None
        reachable = f"the space reaches {float(least):.6g} to {float(most):.6g} {unit}"
        if high is not None and high <= low:
            raise UserError(f"limits: the upper one, {float(high):g}, must exceed the lower one, {float(low):g} {unit}")
        if low > most or (high is not None and high <= least):
            wanted = f"{float(low):g} to {float(high):g}" if high is not None else f"from {float(low):g}"
            raise UserError(f"limits: no architecture has {wanted} {unit}; {reachable}")
        end = high if high is not None else (math.floor((most - low) / step) + 1) * step + low
        number = (end - low) / step
        whole = math.floor(number)
        if whole > MAX_BINS:
            raise UserError(f"margin: {margin:g} {unit} makes {whole:,} bins; {reachable}")
        tops = [low + k * step for k in range(1, whole + 1)]
        if whole != number and not whole_only:
            tops.append(end)
        if not tops:
            raise UserError(
                f"margin: {margin:g} {unit} is wider than the limits {float(low):g} to {float(end):g}; {reachable}"
            )
        edges = tuple(math.ceil(edge * scale) for edge in (low, *tops))
        return cls(unit, tuple(float(t) for t in tops), edges)

    def index(self, cost: IntArray) -> IntArray:
        """The bin of every cost, -1 for one outside all of them."""
        at = np.searchsorted(np.asarray(self.edges, dtype=np.int64), cost, side="right") - 1
        return np.where(at == len(self.names), -1, at)

    def best(self, cost: IntArray, score: FloatArray, top: int) -> list[IntArray]:
        """For every bin the indices of its `top` highest scores, best first; equal scores in order of index."""
        at = self.index(cost)
        order = np.lexsort((np.arange(len(cost)), -score, at))
        starts = np.searchsorted(at[order], np.arange(len(self.names)), side="left")
        ends = np.searchsorted(at[order], np.arange(len(self.names)), side="right")
        return [order[a : min(b, a + top)] for a, b in zip(starts, ends, strict=True)]
