"""Evolution by generations, and AutoFormer's: mutants and children of the best networks of all history.

After SPOS (Guo et al. 2020) and AutoFormer (Chen et al. 2021). The released code never merges its last generation into
the list of the best and lets parents of unlike depth make invalid children; neither happens here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.proxies.registry import least
from lightning_tas.search.history import Codes
from lightning_tas.search.moves import Unit
from lightning_tas.search.objective import FloatArray
from lightning_tas.search.settings import NoSettings, Probability
from lightning_tas.search.strategy import Draft, Strategy, register_strategy


@dataclass(frozen=True)
class GenerationSettings(NoSettings):
    """population: networks of a generation. generations: how many follow the first, random one. top: parents.

    mutations, crossovers: how many of a generation come from each, by default half of it; the rest is random. tries:
    proposals per place before it is filled at random. *_prob: the probability that a choice is redrawn, of depth, of
    the other choices outside blocks (width), of a block's.
    """

    FOLLOWS: ClassVar = {"top": "population"}

    population: Annotated[int, least(1)] = 50
    generations: Annotated[int, least(0)] = 20
    top: Annotated[int, least(1)] = 10
    mutations: Annotated[int | None, least(0)] = None
    crossovers: Annotated[int | None, least(0)] = None
    tries: Annotated[int, least(1)] = 10
    depth_prob: Probability = 0.4
    embed_prob: Probability = 0.4
    block_prob: Probability = 0.2

    def __post_init__(self) -> None:
        if self.mutants + self.children > self.population:
            raise UserError(
                f"mutations + crossovers: {self.mutants} + {self.children} is more than population, {self.population}"
            )

    @property
    def mutants(self) -> int:
        """How many mutants a generation gets."""
        if self.mutations is not None:
            return self.mutations
        return max(0, self.population - (self.population // 2 if self.crossovers is None else self.crossovers))

    @property
    def children(self) -> int:
        """How many children of two parents a generation gets."""
        return self.population - self.mutants if self.crossovers is None else self.crossovers


class Generational(Strategy):
    """A random generation, then generations of mutants, children and, where these do not fill it, random networks."""

    Settings = GenerationSettings
    settings: GenerationSettings
    _parents: list[Codes]

    @property
    def budget(self) -> int:
        return self.settings.population * (1 + self.settings.generations)

    def propose(self, draft: Draft) -> None:
        s = self.settings
        self._spent: set[tuple[int, int]] = set()
        if self.generation and self._begin():
            draft.fill(s.mutants, lambda slot, attempt: self._mutant(draft, slot, attempt), s.tries)
            self._cross(draft)
        self.add_random(draft, s.population - len(draft))

    @abstractmethod
    def _begin(self) -> bool:
        """Choose the parents of a generation; False when there are none (nothing valid was told)."""

    @abstractmethod
    def _mutant(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        """A mutant for a slot."""

    @abstractmethod
    def _child(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        """A child of two parents for a slot."""

    def _cross(self, draft: Draft) -> None:
        s = self.settings
        draft.fill(s.children, lambda slot, attempt: self._child(draft, slot, attempt), s.tries)

    @cached_property
    def _rates(self) -> FloatArray:
        """The probability that each choice (columns,) is redrawn."""
        s = self.settings
        skeleton = [s.depth_prob if column.name == "depth" else s.embed_prob for column in self.space.columns]
        return np.where([column.block is None for column in self.space.columns], skeleton, s.block_prob)

    def _mutate(self, draft: Draft, parent: Codes, rng: np.random.Generator, unit: Unit) -> Codes | None:
        return draft.draw(self.moves.mutation(parent, self._rates, unit), rng, [parent]).row

    def _between(self, draft: Draft, first: int, second: int, rng: np.random.Generator, unit: Unit) -> Codes | None:
        """A child of two parents by their numbers; a pair whose children are all known is not asked again."""
        pair = (min(first, second), max(first, second))
        if pair in self._spent:
            return None
        a, b = (self._parents[i] for i in pair)
        drawn = draft.draw(self.moves.crossover(a, b, unit), rng, [a, b])
        if drawn.empty or drawn.known:
            self._spent.add(pair)
        return drawn.row


@dataclass(frozen=True)
class EvolutionSettings(GenerationSettings):
    """As `GenerationSettings`; equal_depth: only parents of the same depth cross."""

    equal_depth: bool = True


@register_strategy("evolution")
class Evolution(Generational):
    """AutoFormer's evolution: each generation from the ten best networks of all before, kept over all history.

    A mutant redraws depth and width with probability .4 each and each block's heads and MLP ratio with .2 each. A child
    takes every choice from one of two parents of the same depth; a parent without such a partner is mutated instead.
    """

    Settings = EvolutionSettings
    settings: EvolutionSettings

    def _begin(self) -> bool:
        chosen = self.history.top(self.settings.top)
        self._parents = [self.history.rows[i] for i in chosen]
        depths = [c for c, column in enumerate(self.space.columns) if column.name == "depth"]
        self._depths = [tuple(row[depths].tolist()) for row in self._parents]
        return bool(chosen)

    def _mutant(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        rng = self.rng("mutant", slot, attempt)
        return self._mutate(draft, self._parents[int(rng.integers(len(self._parents)))], rng, "gene")

    def _child(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        rng = self.rng("child", slot, attempt)
        first = int(rng.integers(len(self._parents)))
        partners = [
            i
            for i in range(len(self._parents))
            if i != first and (not self.settings.equal_depth or self._depths[i] == self._depths[first])
        ]
        if not partners:
            return self._mutate(draft, self._parents[first], rng, "gene")
        return self._between(draft, first, partners[int(rng.integers(len(partners)))], rng, "gene")
