"""Moves that respect limits by construction: laws of mutation and crossover, conditioned and drawn exactly.

A law gives every choice a weight (see `lightning_tas.additive.paths`): what a strategy keeps of a parent, what it
redraws and with which probability. A draw is the law conditioned on the limits, on the space's predicates, on being
none of the parents, and on being new to the search. Nothing is rejected but networks seen before, and those beyond a
limit that is no sum of tables, or whose sums had to be rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_tas.additive.paths import Conditional, Paths
from lightning_tas.limits import Region
from lightning_tas.search.history import Codes, key
from lightning_tas.search.objective import FloatArray

# Draws looked at together until one is new, and how many members are listed instead when those brought none.
_ROUNDS, _LISTED = (4, 32, 256), 1024

Unit = Literal["gene", "block"]


@dataclass
class Tally:
    """What a generation's draws met: of `drawn` networks `outside` were not within the limits, `again` seen before.

    released: blocks that had to change beside those that a strategy chose, as nothing else was within the limits.
    """

    drawn: int = 0
    outside: int = 0
    again: int = 0
    released: int = 0


@dataclass(frozen=True)
class Drawn:
    """What a move brought: a new network, or None: there is none within the limits (`empty`), or all are `known`.

    Where neither is proven, there may be some that were not found.
    """

    row: Codes | None
    empty: bool = False
    known: bool = False


class Moves:
    """Laws over the members of a region and draws from them. Laws are lists: a draw takes one of them by its weight."""

    def __init__(self, region: Region) -> None:
        self.region, self.space = region, region.space
        self.paths: Paths = region.paths
        self._certain = region.exact and self.paths.exact
        self._first = np.append(np.arange(len(self.space.columns)), len(self.space.columns))[self.paths.column[:, 0]]
        stages = [c.stage if c.block is None else None for c in self.space.columns]
        self._own = [[i for i, at in enumerate(stages) if at == s] for s in range(self.space.stages)]
        self._everything: Conditional | None = None

    # --- laws ---------------------------------------------------------------------------------------------------------

    def kept(self, row: Codes) -> FloatArray:
        """Weights of choices (columns, most choices) that keep those of a network; uniform where it has no block."""
        genes = self.paths.uniform.copy()
        there = np.flatnonzero(row >= 0)
        genes[there] = 0.0
        genes[there, row[there]] = 1.0
        return genes

    def mutation(self, parent: Codes, rates: FloatArray, unit: Unit = "gene") -> list[FloatArray]:
        """Every choice is redrawn uniformly with its probability, `rates` (columns,); new blocks are uniform.

        ``unit="block"``: all choices of a block together, with the probability of the first.
        """
        genes, uniform = self.kept(parent), self.paths.uniform
        if unit == "gene":
            return [self.paths.law(rates[:, None] * uniform + (1.0 - rates[:, None]) * genes)]
        rate = np.append(rates, 1.0)[self._first]
        return [rate * self.paths.law(uniform) + (1.0 - rate) * self.paths.law(genes)]

    def crossover(self, a: Codes, b: Codes, unit: Unit = "gene", rates: FloatArray | None = None) -> list[FloatArray]:
        """Every choice comes from either parent; a block that only one has from that one.

        ``unit="block"``: blocks are whole, and a stage's own choices come from one parent together. rates: then every
        choice is redrawn with this probability (columns,).
        """
        if unit == "gene":
            genes = self._either(a, b)
            if rates is not None:
                genes = rates[:, None] * self.paths.uniform + (1.0 - rates[:, None]) * genes
            return [self.paths.law(genes)]
        tied = [own for own in self._own if (a[own] != b[own]).sum() > 1]
        laws = []
        for donors in itertools.product((a, b), repeat=len(tied)):
            first, second = a.copy(), b.copy()
            for own, donor in zip(tied, donors, strict=True):
                first[own] = second[own] = donor[own]
            laws.append(self.halves(first, second))
        return laws

    def _either(self, a: Codes, b: Codes) -> FloatArray:
        there = np.stack([a >= 0, b >= 0]).astype(np.float64)
        there[:, ~there.any(axis=0)] = 1.0  # both give what `kept` gives where they have no block
        both = np.stack([self.kept(a), self.kept(b)])
        return np.asarray((there[:, :, None] * both).sum(axis=0) / there.sum(axis=0)[:, None])

    def halves(self, a: Codes, b: Codes) -> FloatArray:
        """Whole blocks and every other choice come from either; a block that only one has from that one."""
        there = np.stack([np.append(row >= 0, True)[self._first] for row in (a, b)]).astype(np.float64)
        there[:, ~there.any(axis=0)] = 1.0
        return np.asarray((there * [self.paths.law(self.kept(a)), self.paths.law(self.kept(b))]).sum(0) / there.sum(0))

    def at(self, columns: Iterable[int]) -> np.ndarray:
        """Which rows of a law decide any of the columns: for a block, all of its choices at once."""
        return np.isin(self._first, list(columns))

    # --- draws --------------------------------------------------------------------------------------------------------

    def draw(
        self,
        laws: Sequence[FloatArray],
        rng: np.random.Generator,
        seen: Collection[bytes],
        avoid: Sequence[Codes] = (),
        tally: Tally | None = None,
    ) -> Drawn:
        """A network by one of the laws, within the limits, none of `avoid` and none of the `seen` keys."""
        tally = tally or Tally()
        parts = [part for law in laws if (part := Conditional(self.paths, law, avoid)).weight > 0]
        within = False
        for turn, n in enumerate(_ROUNDS if parts else ()):
            if turn == 1 and sum(part.count() for part in parts) <= _LISTED:
                return self._listed(parts, rng, seen)
            rows = self._sample(parts, rng, n)
            for row, ok in zip(rows, self._allowed(rows).tolist(), strict=True):
                tally.drawn += 1
                tally.outside += not ok
                within |= ok
                if ok and key(row) not in seen:
                    return Drawn(row)
                tally.again += ok
        return Drawn(None, empty=not within)

    def _sample(self, parts: Sequence[Conditional], rng: np.random.Generator, n: int) -> Codes:
        if len(parts) == 1:
            return parts[0].sample(rng, n)
        weights = np.array([part.weight for part in parts])
        which = rng.choice(len(parts), size=n, p=weights / weights.sum())
        rows = np.empty((n, len(self.space.columns)), dtype=np.int16)
        for i in np.unique(which).tolist():
            rows[which == i] = parts[i].sample(rng, int((which == i).sum()))
        return rows

    def _listed(self, parts: Sequence[Conditional], rng: np.random.Generator, seen: Collection[bytes]) -> Drawn:
        """The draw among all members of the laws, where they are few and most of them seen."""
        codes, weights = (np.concatenate(both) for both in zip(*(part.all() for part in parts), strict=True))
        allowed = self._allowed(codes)
        new = np.array([key(row) not in seen for row in codes], dtype=bool) & allowed
        if not new.any():
            return Drawn(None, empty=not allowed.any(), known=bool(allowed.any()))
        codes, upto = codes[new], np.cumsum(weights[new])
        return Drawn(codes[min(int(np.searchsorted(upto, rng.random() * upto[-1], side="right")), len(codes) - 1)])

    def _allowed(self, rows: Codes) -> np.ndarray:
        return np.ones(len(rows), dtype=bool) if self._certain else self.region.allowed(rows)

    def random(self, rng: np.random.Generator, n: int, tally: Tally) -> Codes:
        """At most `n` networks within the limits, every choice uniform; fewer where a limit is no exact sum."""
        if self._everything is None:
            self._everything = Conditional(self.paths, self.paths.law(self.paths.uniform))
        if not self._everything.weight:
            return np.empty((0, len(self.space.columns)), dtype=np.int16)
        rows = self._everything.sample(rng, n)
        allowed = self._allowed(rows)
        tally.drawn, tally.outside = tally.drawn + n, tally.outside + int((~allowed).sum())
        return rows[allowed]
