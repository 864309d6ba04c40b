"""ETAS (Algorithm 1): evolution in which a proxy picks, out of a pool of mutants, the few worth a true evaluation.

Each iteration has two parts: the pool is asked for with the filter's scores, then its best are asked for with the
truth's. `Etas.needs` says which. The filter ranks within the pool (NTSR's ranks belong to the pool, as in the paper).
"Regularised" evolution is the paper's name for it; nothing ages in Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.limits import Region
from lightning_tas.proxies.registry import least
from lightning_tas.search.history import Codes, key, pack, unpack
from lightning_tas.search.objective import Objective, Scores, best_first
from lightning_tas.search.settings import NoSettings, Probability
from lightning_tas.search.strategy import Draft, Strategy, register_strategy


@dataclass(frozen=True)
class EtasSettings(NoSettings):
    """The paper's values for ViT (for GPT-2: first_pool 300, mutate_prob .3).

    filter: a proxy, or None, which makes the choice random. first_pool, first: random networks filtered, and how many
    of them are evaluated (N0, n0); the n0 best evaluated are the parents ever after. pool, keep: mutants of an
    iteration, and how many are evaluated (Nm, nm). iterations: M. patience: iterations without a new best that end the
    search. tries: proposals per mutant before a random network takes its place.
    """

    FOLLOWS: ClassVar = {"first": "first_pool", "keep": "pool"}

    filter: str | None = "ntsr"
    first_pool: Annotated[int, least(1)] = 500
    first: Annotated[int, least(1)] = 3
    pool: Annotated[int, least(1)] = 100
    keep: Annotated[int, least(1)] = 3
    iterations: Annotated[int, least(0)] = 10
    mutate_prob: Probability = 0.4
    patience: Annotated[int, least(1)] = 5
    tries: Annotated[int, least(1)] = 10

    def __post_init__(self) -> None:
        for pool, kept in (("first_pool", "first"), ("pool", "keep")):
            if getattr(self, kept) > getattr(self, pool):
                raise UserError(f"{kept}: {getattr(self, kept)} networks cannot come from {pool}={getattr(self, pool)}")


@register_strategy("etas")
class Etas(Strategy):
    """3 of 500 random networks, then 10 times 3 of 100 mutants of the best three: 33 true evaluations.

    `objective` is the truth (supernet accuracy, a training run's, or any score). `history` holds what was evaluated
    truly, with the scores of both; `filtered` counts networks seen by the filter, each once.
    """

    Settings = EtasSettings
    settings: EtasSettings

    def __init__(self, region: Region, objective: Objective | str, seed: int = 0, **settings: Any) -> None:
        super().__init__(region, objective, seed, **settings)
        name = self.settings.filter
        self.filter = None if name is None else Objective.of(name)
        self._scores: dict[bytes, Scores] = {}
        self._pool: list[Codes] = []
        self._pool_counts: dict[str, int] = {}
        self._filtering = False

    @classmethod
    def check(cls, settings: Any, objective: Objective) -> None:
        name = settings.filter
        if name is not None and set(Objective.of(name, "filter of etas").needs) & set(objective.needs):
            raise UserError(f"filter of etas: {name!r} needs the same score as the objective, {objective.name!r}")

    @property
    def budget(self) -> int:
        return self.settings.first + self.settings.iterations * self.settings.keep

    @property
    def filtered(self) -> int:
        """How many networks the filter scored."""
        return len(self._scores)

    @property
    def needs(self) -> tuple[str, ...]:
        self._prepare()
        return self.filter.needs if self.filter is not None and self._filtering else self.objective.needs

    def finished(self) -> str:
        if self._pool or not self.generation:
            return ""
        if self.generation > self.settings.iterations:
            return f"budget: {self.settings.iterations} iterations"
        best = self.history.top(1)
        last = self.generation - 1
        if best and last - self.history.generations[best[0]] >= self.settings.patience:
            return f"converged: no better network in {self.settings.patience} iterations"
        return ""

    def propose(self, draft: Draft) -> None:
        s = self.settings
        keep, size = (s.keep, s.pool) if self.generation else (s.first, s.first_pool)
        if not self._pool:
            pool = self._new_pool(keep if self.filter is None else size)
            self._pool, self._pool_counts = pool.rows, pool.counts
        if self.filter is None:
            draft.rows = list(self._pool)
            return
        unknown = [row for row in self._pool if key(row) not in self._scores]
        self._filtering = bool(unknown)
        if unknown:
            draft.rows = unknown
            return
        values = self.filter.values([self._scores[key(row)] for row in self._pool])
        order = best_first(values)
        # Networks that the filter finds invalid are taken only where there are no others.
        order += [i for i in range(len(self._pool)) if i not in set(order)]
        draft.rows = [self._pool[i] for i in order[:keep]]

    def _new_pool(self, size: int) -> Draft:
        draft = self.draft()
        self._parents = [self.history.rows[i] for i in self.history.top(self.settings.first)]
        if self._parents:
            draft.fill(size, lambda slot, attempt: self._mutant(draft, slot, attempt), self.settings.tries)
        self.add_random(draft, size - len(draft))
        return draft

    def _mutant(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        rng = self.rng("mutant", slot, attempt)
        parent = self._parents[int(rng.integers(len(self._parents)))]
        rates = np.full(len(parent), self.settings.mutate_prob)
        return draft.draw(self.moves.mutation(parent, rates), rng, [parent]).row

    def record(self, row: Codes, scores: Scores, costs: Mapping[str, float]) -> None:
        if self._filtering:
            self._scores[key(row)] = dict(scores)
        else:
            super().record(row, {**self._scores.get(key(row), {}), **scores}, costs)

    def complete(self) -> None:
        if self._filtering:
            return
        self._pool = []
        self.close_generation(self._pool_counts)
        self.stats[-1]["filtered"] = self.filtered

    def extra_state(self) -> dict[str, Any]:
        return {
            "filtered": [
                [np.frombuffer(row, dtype=np.int16).tolist(), {name: pack(one) for name, one in scores.items()}]
                for row, scores in self._scores.items()
            ],
            "pool": [row.tolist() for row in self._pool],
            "pool_counts": dict(self._pool_counts),
            "filtering": self._filtering,
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._scores = {
            key(np.asarray(row, dtype=np.int16)): {name: unpack(one) for name, one in scores.items()}
            for row, scores in state["filtered"]
        }
        self._pool = [np.asarray(row, dtype=np.int16) for row in state["pool"]]
        self._pool_counts = dict(state["pool_counts"])
        self._filtering = state["filtering"]
