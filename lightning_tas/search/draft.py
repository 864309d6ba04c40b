"""A generation while it is proposed: what may enter it, and how its places are filled by moves that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import numpy as np

from lightning_tas.limits import Region
from lightning_tas.search.history import Codes, key
from lightning_tas.search.moves import Drawn, Moves, Tally
from lightning_tas.search.objective import FloatArray

# Moves in a row that bring nothing before a draft gives up on them; AutoFormer's limit on tries is as high.
_IDLE = 250
# Rounds of random draws before the region is asked for what is left: it knows where to look, but counts nothing.
_ROUNDS = 8

Make = Callable[[int, int], "Codes | None"]


class Draft:
    """One generation while it is proposed: members within the limits, distinct, none of them seen before.

    proposed, distinct: networks that were offered or should have come from a move, and those of them that were new.
    """

    def __init__(self, moves: Moves, seen: Iterable[bytes], size: int | None = None) -> None:
        """size: how many networks there are within the limits, where that is known."""
        self.moves = moves
        self.region: Region = moves.region
        self.seen = set(seen)
        self._size = size
        self.rows: list[Codes] = []
        self.proposed = self.distinct = 0
        self.tally = Tally()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """What it took: networks proposed, distinct and accepted, and the draws of moves (`Tally`)."""
        own = {"proposed": self.proposed, "distinct": self.distinct, "accepted": len(self)}
        return {**own, **asdict(self.tally)}

    @property
    def exhausted(self) -> bool:
        """Whether no network is left to enter, as far as is known."""
        return self._size is not None and len(self.seen) >= self._size

    def offer(self, codes: Codes, most: int | None = None) -> list[bool]:
        """Accept what may enter of (n, C) codes, in order, up to `most`; which of them did."""
        member = self.region.space.valid(codes)
        fits = np.zeros(len(codes), dtype=bool)
        fits[member] = self.region.allowed(codes[member])
        taken = []
        room = len(codes) if most is None else most
        for row, ok in zip(codes, fits.tolist(), strict=True):
            if not room:
                taken.append(False)
                continue
            new = key(row) not in self.seen
            self.proposed += 1
            self.distinct += new
            taken.append(ok and new)
            if ok and new:
                self._take(row)
                room -= 1
        return taken

    def _take(self, row: Codes) -> None:
        self.seen.add(key(row))
        self.rows.append(row.astype(np.int16))

    def draw(self, laws: Sequence[FloatArray], rng: np.random.Generator, avoid: Sequence[Codes] = ()) -> Drawn:
        """A network by one of the laws of `moves`: within the limits, new, and none of `avoid`, the parents."""
        drawn = self.moves.draw(laws, rng, self.seen, avoid, self.tally)
        self.proposed += drawn.row is None and not (drawn.empty or drawn.known)  # in vain, where there may be some
        return drawn

    def fill(self, slots: int, make: Make, tries: int) -> None:
        """Give each slot the first network of ``make(slot, attempt)``, attempt < `tries`, that is one; None is none.

        `make` draws by `draw`. When many moves in a row bring nothing the rest of the slots stay open: there is
        nothing left around the parents.
        """
        idle = 0
        for slot in range(slots):
            for attempt in range(tries):
                if idle >= _IDLE or self.exhausted:
                    return
                row = make(slot, attempt)
                if row is not None and self.offer(row[None])[0]:
                    idle = 0
                    break
                idle += 1

    def fill_random(self, most: int, rng: np.random.Generator, seed: int) -> None:
        """At most so many random members, every choice uniform; fewer only where there are no more."""
        wanted = len(self) + most
        for _ in range(_ROUNDS):
            if len(self) >= wanted or self.exhausted:
                return
            for row in self.moves.random(rng, wanted - len(self), self.tally):
                if key(row) in self.seen:
                    self.tally.again += 1
                else:
                    self.offer(row[None])
        if len(self) < wanted:
            self.offer(self.region.sample(seed, wanted - len(self), self.seen), wanted - len(self))
