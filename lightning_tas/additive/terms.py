"""Sums of tables over the columns of codes: the form of scores and costs that can be optimised exactly.

Shapes: N codes, K columns of a space; a term's table has one axis for each column that it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
CHUNK = 1 << 16
"""Codes looked up at once: more do not fit the cache, and memory would grow with them."""


@dataclass(frozen=True)
class Term:
    """One summand of a network's score: a table over some columns of its code.

    Codes of -1, of block slots beyond the depth, meet zeros at the end of their axes.
    """

    columns: tuple[int, ...]
    table: FloatArray

    def __call__(self, codes: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """The summand of every code (N, K): (N,)."""
        flat = np.zeros(len(codes), dtype=np.intp)
        for column, size in zip(self.columns, self.table.shape, strict=True):
            flat *= size
            flat += codes[:, column] % size
        return self.table.ravel()[flat]


@dataclass(frozen=True)
class Total:
    """A sum of terms."""

    terms: tuple[Term, ...]

    def __call__(self, codes: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """The sums of codes (N, K), float64 (N,)."""
        out = np.zeros(len(codes))
        for start in range(0, len(codes), CHUNK):
            chunk = np.asfortranarray(codes[start : start + CHUNK])  # one column is read at a time
            for term in self.terms:
                out[start : start + CHUNK] += term(chunk)
        return out

    def __add__(self, other: Total) -> Total:
        return Total((*self.terms, *other.terms))

    def scaled(self, factor: float) -> Total:
        """This sum times `factor`."""
        return Total(tuple(Term(term.columns, factor * term.table) for term in self.terms))
