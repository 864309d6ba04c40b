"""S3's evolution (Chen et al. 2021, Searching the Search Space of Vision Transformer, Algorithm 3).

Written for networks of several stages; a plain ViT is the case of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from lightning_tas.proxies.registry import least
from lightning_tas.search.evolution import Generational, GenerationSettings
from lightning_tas.search.history import Codes
from lightning_tas.search.settings import Probability
from lightning_tas.search.strategy import Draft, register_strategy


@dataclass(frozen=True)
class S3Settings(GenerationSettings):
    """As `GenerationSettings`, with S3's probabilities per stage and per block.

    elitist: parents and the best come from all history; the text takes both from the last generation alone.
    """

    top: Annotated[int, least(1)] = 10
    depth_prob: Probability = 0.2
    embed_prob: Probability = 0.2
    block_prob: Probability = 0.4
    elitist: bool = True


@register_strategy("s3_evolution")
class S3Evolution(Generational):
    """S3's evolution: each stage's depth and width change with probability .2, a block's choices together with .4.

    A child has each stage's own choices from one parent and every block, whole, from one parent that has it. The paper
    does not say how many of a generation are mutants: half of it.
    """

    Settings = S3Settings
    settings: S3Settings

    @property
    def protects(self) -> int | None:
        return super().protects if self.settings.elitist else None  # parents and the winner are of one generation

    def _begin(self) -> bool:
        last = None if self.settings.elitist else self.history.since(self.generation - 1)
        self._parents = [self.history.rows[i] for i in self.history.top(self.settings.top, last)]
        return bool(self._parents)

    def eligible(self) -> Sequence[int] | None:
        if self.settings.elitist or not self.generation:
            return None
        # The last generation that is complete.
        return [i for i in self.history.since(self.generation - 1) if self.history.generations[i] < self.generation]

    def _mutant(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        rng = self.rng("mutant", slot, attempt)
        return self._mutate(draft, self._parents[int(rng.integers(len(self._parents)))], rng, "block")

    def _child(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        if len(self._parents) < 2:
            return None
        rng = self.rng("child", slot, attempt)
        first, second = rng.choice(len(self._parents), size=2, replace=False).tolist()
        return self._between(draft, first, second, rng, "block")
