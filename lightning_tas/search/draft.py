"""A generation while it is proposed: what may enter it, and how its places are filled by moves that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lightning_tas.limits import Region
from lightning_tas.search.history import Codes, key

# Proposals in a row that may not enter before a draft gives up on moves; AutoFormer's limit on tries is as high.
_IDLE = 250

Make = Callable[[int, int], Codes | None]


class Draft:
    """One generation while it is proposed: members within the limits, distinct, none of them seen before."""

    def __init__(self, region: Region, seen: Iterable[bytes], size: int | None = None) -> None:
        """size: how many networks there are within the limits, where that is known."""
        self.region = region
        self.seen = set(seen)
        self._size = size
        self.rows: list[Codes] = []
        self.proposed = self.distinct = 0

    def __len__(self) -> int:
        return len(self.rows)

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
                self.seen.add(key(row))
                self.rows.append(row.astype(np.int16))
                room -= 1
        return taken

    def fill(self, slots: int, make: Make, tries: int) -> None:
        """Give each slot the first of ``make(slot, attempt)``, attempt < `tries`, that may enter; None is no proposal.

        All open slots try together, so that membership and costs are computed for many networks at once. When many
        proposals in a row are in vain the rest of the slots stay open: there is nothing left around the parents.
        """
        open_slots, idle = list(range(slots)), 0
        for attempt in range(tries):
            if not open_slots or idle >= _IDLE or self.exhausted:
                return
            made = [(slot, row) for slot in open_slots if (row := make(slot, attempt)) is not None]
            if made:
                taken = self.offer(np.stack([row for _, row in made]))
                filled = {slot for (slot, _), ok in zip(made, taken, strict=True) if ok}
                open_slots = [slot for slot in open_slots if slot not in filled]
                idle = 0 if filled else idle + len(made)
