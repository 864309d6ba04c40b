"""Random search (TF-TAS; Auto-Prox): distinct random members within the limits, of which the best is kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np

from lightning_tas.proxies.registry import least
from lightning_tas.randomness import derive, numpy_generator
from lightning_tas.search.history import Codes
from lightning_tas.search.settings import NoSettings
from lightning_tas.search.strategy import Draft, Strategy, register_strategy
from lightning_tas.spaces.moves import spread

# Networks drawn for each one that is kept when parameter counts are to be spread.
_POOL = 8


@dataclass(frozen=True)
class RandomSettings(NoSettings):
    """networks: how many. batch: of them in a generation. stratify: spread them over the range of parameter counts."""

    networks: Annotated[int, least(1)] = 8000
    batch: Annotated[int, least(1)] = 50
    stratify: bool = False


@register_strategy("random")
class RandomSearch(Strategy):
    """8,000 random networks as in TF-TAS (400 in Auto-Prox), in generations that can be compared with evolutions'.

    Choices are drawn independently, so parameter counts pile up in the middle of their range; `stratify` draws more
    networks and keeps some from each part of it.
    """

    Settings = RandomSettings
    settings: RandomSettings

    @property
    def budget(self) -> int:
        return self.settings.networks

    def propose(self, draft: Draft) -> None:
        size = min(self.settings.batch, self.settings.networks - len(self.history))
        if self.settings.stratify:
            draft.offer(self._spread[len(self.history) :][:size])
        self.add_random(draft, size - len(draft))

    @cached_property
    def _spread(self) -> Codes:
        """All networks of a stratified search, in random order: a function of the seed alone."""
        n = self.settings.networks
        pool = self.region.sample(derive(self.seed, "search.stratify"), _POOL * n)
        chosen = spread(np.asarray(self.region.quantities(pool)["params"], dtype=np.float64), n)
        order = numpy_generator(self.seed, "search.stratify.order").permutation(len(chosen))
        return pool[chosen[order]]
