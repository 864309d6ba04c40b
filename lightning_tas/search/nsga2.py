"""NSGA-II (Deb et al. 2002): evolution towards the whole front of several objectives at once.

Libraries have it (pymoo, for one), but their random state lives inside the algorithm's object, which is saved by
pickling it whole; a search here is a function of counters, is saved as primitives and never evaluates twice. What
remains, sorting and crowding, is short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown
from lightning_tas.limits import Region
from lightning_tas.proxies.registry import least
from lightning_tas.proxies.score import INVALID
from lightning_tas.search.history import Codes, Entry
from lightning_tas.search.objective import FloatArray, Objective, Values, best_first
from lightning_tas.search.settings import NoSettings, Probability
from lightning_tas.search.strategy import Draft, Strategy, register_strategy

IntArray = npt.NDArray[np.intp]


def nondominated(points: FloatArray) -> IntArray:
    """Indices, ascending, of the `points` (N, M), all to be maximised, that no other one dominates.

    A point dominates another when it is nowhere less and somewhere greater, so equal points stay together.
    """
    # By descending coordinates a point comes after all that dominate it, so those met first are never dominated later.
    rest = np.lexsort(tuple(-points[:, m] for m in reversed(range(points.shape[1]))))
    kept = []
    while len(rest):
        first = points[rest[0]]
        equal = (points[rest] == first).all(axis=1)
        kept += rest[equal].tolist()
        rest = rest[(points[rest] > first).any(axis=1) & ~equal]
    return np.asarray(sorted(kept), dtype=np.intp)


def fronts(points: FloatArray) -> list[IntArray]:
    """Indices of the points by front: those that nothing dominates, then those that only they dominate, and so on."""
    left, found = np.arange(len(points)), []
    while len(left):
        best = left[nondominated(points[left])]
        found.append(best)
        left = np.setdiff1d(left, best)
    return found


def crowding(points: FloatArray) -> FloatArray:
    """Distance of each point (N, M) of a front to its neighbours, summed over objectives; infinite at the ends."""
    distance = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        span = column[order[-1]] - column[order[0]]
        distance[order[[0, -1]]] = np.inf
        if span > 0 and len(points) > 2:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / span
    return distance


@dataclass(frozen=True)
class Nsga2Settings(NoSettings):
    """objectives: proxies or "accuracy" to maximise beside the strategy's objective. minimise: quantities, as "params".

    population: of each generation, and of the survivors. crossover_prob: children of two parents, the others are copies
    of one. gene_prob: chance that a choice is then redrawn; None is one over the number of choices. tries: proposals
    per child before a random network takes its place.
    """

    objectives: tuple[str, ...] = ()
    minimise: tuple[str, ...] = ("params",)
    population: Annotated[int, least(2)] = 50
    generations: Annotated[int, least(0)] = 20
    crossover_prob: Probability = 0.9
    gene_prob: Probability | None = None
    tries: Annotated[int, least(1)] = 10

    def __post_init__(self) -> None:
        for key in ("objectives", "minimise"):
            names = getattr(self, key)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise UserError(f"{key}: {names!r} is not valid; valid: a list of names")


@register_strategy("nsga2")
class Nsga2(Strategy):
    """Survivors by front and crowding, parents by binary tournaments; `front` is the front of all networks told.

    `best` and `top` are by the first objective alone.
    """

    Settings = Nsga2Settings
    settings: Nsga2Settings

    def __init__(self, region: Region, objective: Objective | str, seed: int = 0, **settings: Any) -> None:
        super().__init__(region, objective, seed, **settings)
        s = self.settings
        self._objectives = [Objective.of(name) for name in s.objectives]
        known = self.region.quantities(self.space.encode(self.space.smallest()))
        for name in s.minimise:
            if name not in known:
                raise unknown("minimise of nsga2", name, known)
        self._members: list[int] = []  # the survivors, as indices of the history
        self._ranked: list[tuple[int, int, float]] = []
        self._tables: list[Values] = []
        self._tabled = 0
        self._forget()

    @classmethod
    def check(cls, settings: Any, objective: Objective) -> None:
        for name in settings.objectives:
            Objective.of(name, "objectives of nsga2")
        if not settings.objectives and not settings.minimise:
            raise UserError("nsga2: one objective alone has no front; name further objectives or what to minimise")

    @property
    def budget(self) -> int:
        return self.settings.population * (1 + self.settings.generations)

    @property
    def protects(self) -> int | None:
        return None  # a network of the front may be worse than all others in accuracy

    @property
    def needs(self) -> tuple[str, ...]:
        every = [name for objective in (self.objective, *self._objectives) for name in objective.needs]
        return tuple(dict.fromkeys(every))

    def points(self) -> FloatArray:
        """(N, M) of all networks told, each column to be maximised; minus infinity where an objective has no value."""
        for scores in self.history.scores[self._tabled :]:
            for table in self._tables:
                table.add(scores)
        self._tabled = len(self.history)
        costs = [[-q[name] for q in self.history.quantities] for name in self.settings.minimise]
        return np.stack([self.history.values, *(table.values for table in self._tables), *map(np.asarray, costs)], -1)

    def front(self) -> list[Entry]:
        """The networks that no other one told surpasses in all objectives, the greatest first objective first."""
        points = self.points()
        valid = np.flatnonzero((points > INVALID).all(axis=1))
        if not len(valid):
            return []
        chosen = valid[nondominated(points[valid])]
        return [self.history.entry(int(chosen[i])) for i in best_first(self.history.values[chosen])]

    def propose(self, draft: Draft) -> None:
        s = self.settings
        if self.generation:
            points = self.points()
            survivors = self._select(points, sorted({*self._members, *self.history.since(self.generation - 1)}))
            self._members, self._ranked = [i for i, _, _ in survivors], survivors
            if survivors:
                draft.fill(s.population, lambda slot, attempt: self._child(draft, slot, attempt), s.tries)
        self.add_random(draft, s.population - len(draft))

    def _select(self, points: FloatArray, pool: Sequence[int]) -> list[tuple[int, int, float]]:
        """The `population` best of a pool as (index, front, -crowding); the last front is cut by crowding."""
        valid = np.asarray([i for i in pool if (points[i] > INVALID).all()], dtype=np.intp)
        chosen: list[tuple[int, int, float]] = []
        for rank, front in enumerate(fronts(points[valid]) if len(valid) else []):
            members = valid[front]
            far = crowding(points[members])
            order = np.argsort(-far, kind="stable")[: self.settings.population - len(chosen)]
            chosen += [(int(members[i]), rank, -float(far[i])) for i in order]
            if len(chosen) == self.settings.population:
                break
        return chosen

    def _child(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        rng = self.rng("child", slot, attempt)

        def parent() -> Codes:
            two = [self._ranked[int(i)] for i in rng.integers(len(self._ranked), size=2)]
            return self.history.rows[min(two, key=lambda one: one[1:])[0]]

        parents = [parent()]
        if rng.random() < self.settings.crossover_prob:
            parents.append(parent())
        return draft.draw(self.moves.crossover(parents[0], parents[-1], rates=self._rates), rng, parents).row

    @cached_property
    def _rates(self) -> FloatArray:
        """The probability that each choice (columns,) is redrawn."""
        genes = np.array([len(column.choices) > 1 for column in self.space.columns])
        chance = self.settings.gene_prob
        return genes * (1 / max(int(genes.sum()), 1) if chance is None else chance)

    def extra_state(self) -> dict[str, Any]:
        return {"members": list(self._members)}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._members = list(state["members"])
        self._forget()

    def _forget(self) -> None:
        """Drop the values of further objectives; they follow from the history."""
        self._tables = [objective.table() for objective in self._objectives]
        self._tabled = 0
