"""All networks within the limits, one after another: the truth on small spaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Annotated, Any

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.limits import Region
from lightning_tas.proxies.registry import least
from lightning_tas.randomness import derive
from lightning_tas.search.history import Codes
from lightning_tas.search.objective import Objective
from lightning_tas.search.settings import NoSettings
from lightning_tas.search.strategy import Draft, Strategy, register_strategy

# Spaces up to here are walked through; of larger ones the region must know its members.
_WALK = 200_000
_CHUNK = 4096


@dataclass(frozen=True)
class ExhaustiveSettings(NoSettings):
    """cap: the most networks that are meant to be evaluated. batch: networks of a generation."""

    cap: Annotated[int, least(1)] = 20_000
    batch: Annotated[int, least(1)] = 50


@register_strategy("exhaustive")
class Exhaustive(Strategy):
    """Every network within the limits, in the order of `SearchSpace.enumerate` (random in spaces too large for that).

    The constructor raises `UserError` with their number where they are more than `cap`.
    """

    Settings = ExhaustiveSettings
    settings: ExhaustiveSettings

    def __init__(self, region: Region, objective: Objective | str, seed: int = 0, **settings: Any) -> None:
        super().__init__(region, objective, seed, **settings)
        size = self.region.size()
        if size is None and self.space.size() <= _WALK:
            size = len(self._all)
        if size is None or size > self.settings.cap:
            number = f"{self.space.size():,} at most" if size is None else f"{size:,}"
            raise UserError(
                f"exhaustive: {number} networks of space {self.space.name!r} are within the limits, which is more than "
                f"cap={self.settings.cap:,}; set narrower limits or a greater cap"
            )
        self._number = size

    @property
    def budget(self) -> int:
        return self._number

    def finished(self) -> str:
        # The budget is their number: the search ends because there are no more, not because it was cut short.
        if len(self.history) < self._number:
            return ""
        return f"exhausted: all {self._number} networks within the limits are evaluated"

    @cached_property
    def _all(self) -> Codes:
        if self.space.size() > _WALK:
            return self.region.sample(derive(self.seed, "search.exhaustive"), self._number)
        walk, found = self.space.enumerate(), []
        while archs := list(islice(walk, _CHUNK)):
            codes = self.space.encode(archs)
            found.append(codes[self.region.allowed(codes)])
        return np.concatenate(found)

    def propose(self, draft: Draft) -> None:
        draft.offer(self._all[len(self.history) :][: self.settings.batch])
