"""Search strategies as ask/tell objects: they propose networks and are told scores; they train and measure nothing.

A search goes by generations. What a generation proposes is a function of (seed, generation, slot, attempt) and of what
was told before it, so a search can be interrupted anywhere, and asked or told in pieces. A network is evaluated once.
Moves are drawn from what is within the limits (`lightning_tas.search.moves`), and what they leave open is filled with
random members. Where there are no more, the search ends and says so.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

import numpy as np

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown
from lightning_tas.limits import Region
from lightning_tas.plugins import resolve
from lightning_tas.proxies.score import INVALID, Score
from lightning_tas.randomness import Counter, derive, numpy_generator
from lightning_tas.search.draft import Draft
from lightning_tas.search.history import Codes, Entry, History
from lightning_tas.search.moves import Moves
from lightning_tas.search.objective import Objective, Scores
from lightning_tas.search.settings import NoSettings, defaults, read_settings

__all__ = [
    "Draft",
    "Entry",
    "History",
    "Objective",
    "Strategy",
    "build_strategy",
    "register_strategy",
    "run",
    "settings_of",
    "strategies",
]

ENTRY_POINTS = "lightning_tas.strategies"

# Of a saved state: 1 had moves that were proposed and rejected, so its trace would go on as another one.
_VERSION = 2

# The members of larger spaces are not counted: no search sees them all.
_COUNTED = 100_000


class Strategy(ABC):
    """A search over a `Region`. A subclass says what a generation proposes (`propose`) and how many it may cost.

    Settings are keyword arguments, by default those of the paper. Objects of the same region, objective, seed and
    settings that are told the same scores ask for the same networks, whatever else the process does.
    """

    name: ClassVar[str] = ""
    Settings: ClassVar[type] = NoSettings
    settings: Any

    def __init__(self, region: Region, objective: Objective | str, seed: int = 0, **settings: Any) -> None:
        """`UserError` for an unknown or invalid setting, and where no member of the space is within the limits."""
        self.region, self.space, self.seed = region, region.space, int(seed)
        self.objective = Objective.of(objective)
        self.settings = read_settings(self.name or type(self).__name__, self.Settings, settings)
        self.check(self.settings, self.objective)
        region.check()
        self.history = History(self.space, self.objective)
        self.generation = 0
        self.stats: list[dict[str, Any]] = []
        self.stopped = ""
        self._pending: list[Codes] = []
        self._costs: list[dict[str, float]] = []
        self._told = 0
        self._counts: dict[str, int] = {}  # of the pending generation

    @classmethod  # noqa: B027 (most strategies take every objective)
    def check(cls, settings: Any, objective: Objective) -> None:
        """`UserError` for settings that are valid, but not beside this objective; no network is needed to tell."""

    # --- what a strategy adds -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def budget(self) -> int:
        """How many networks the search evaluates unless it ends before."""

    @abstractmethod
    def propose(self, draft: Draft) -> None:
        """Put the next networks to ask for into `draft`, once all before were told; none says that there are no more.

        Use `add_random`, ``draft.fill`` with moves drawn by ``draft.draw``, or ``draft.offer`` with networks made in
        any other way. All randomness is to come from `rng`.
        """

    @property
    def needs(self) -> tuple[str, ...]:
        """The scores that the networks of the next `ask` must be told with."""
        return self.objective.needs

    @property
    def protects(self) -> int | None:
        """How many of the best it hands on or breeds from: a scorer may give up on others. None: it needs every one."""
        return max(int(getattr(self.settings, key, 1)) for key in ("top", "first"))

    def finished(self) -> str:
        """Why the search is over before another generation, or ""."""
        return f"budget: {self.budget} evaluations" if len(self.history) >= self.budget else ""

    def check_scores(self, place: int, row: Codes, scores: Scores) -> None:
        """`UserError` where the scores of network `place` among those told will not do; nothing was taken in yet."""
        lacking = [name for name in self.needs if name not in scores]
        if lacking:
            raise UserError(f"tell: result {place} lacks the score of {', '.join(lacking)}; it has {sorted(scores)}")

    def record(self, row: Codes, scores: Scores, costs: Mapping[str, float]) -> None:
        """Take in one result."""
        self.history.add(row, scores, costs, self.generation)

    def complete(self) -> None:
        """All pending networks were told."""
        self.close_generation(self._counts)

    def eligible(self) -> Sequence[int] | None:
        """Which of the history may be `best`; None for all."""
        return None

    def extra_state(self) -> dict[str, Any]:
        """Further state as primitives, beyond history, generation and pending networks."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most strategies have none)
        """Read `extra_state`'s form."""

    # --- tools for it -------------------------------------------------------------------------------------------------

    def rng(self, *counters: Counter) -> np.random.Generator:
        """The stream of one purpose in this generation."""
        return numpy_generator(self.seed, "search", self.generation, *counters)

    def derived(self, *counters: Counter) -> int:
        """The seed of one purpose in this generation."""
        return derive(self.seed, "search", self.generation, *counters)

    def draft(self) -> Draft:
        """A generation without networks."""
        return Draft(self.moves, self.history.seen, self._size)

    @cached_property
    def moves(self) -> Moves:
        """Laws of mutation and crossover, drawn from what is within the limits."""
        return Moves(self.region)

    @cached_property
    def _size(self) -> int | None:
        return self.region.size() if self.space.size() <= _COUNTED else None

    def add_random(self, draft: Draft, most: int) -> None:
        """Fill a draft up with at most so many random members, fewer only where there are no more."""
        draft.fill_random(most, self.rng("random"), self.derived("rest"))

    def close_generation(self, counts: Mapping[str, int]) -> None:
        """Write a row of `stats` with the counts of the generation's draft, and begin the next generation."""
        values = self.history.estimates[self.history.since(self.generation)]
        valid = values[values > INVALID]
        best = self.history.top(1)
        self.stats.append(
            {
                "generation": self.generation,
                "evaluations": self.evaluations,
                "best": float(self.history.values[best[0]]) if best else None,
                "mean": float(valid.mean()) if len(valid) else None,
                "acceptance": counts["accepted"] / max(counts["proposed"], 1),
                "unique": counts["distinct"] / max(counts["proposed"], 1),
                **{name: counts[name] for name in ("drawn", "outside", "again", "released")},
            }
        )
        self.generation += 1

    # --- the outside --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Propose the next generation, or stop."""
        if self._pending or self.stopped:
            return
        self.stopped = self.finished()
        if self.stopped:
            return
        draft = self.draft()
        self.propose(draft)
        if not len(draft):
            self.stopped = self._exhausted()
            return
        self._pending, self._told = draft.rows, 0
        self._counts = draft.counts
        costs = self.region.quantities(np.stack(draft.rows))
        self._costs = [dict(zip(costs, map(float, row), strict=True)) for row in zip(*costs.values(), strict=True)]

    def _exhausted(self) -> str:
        """Why there is nothing left to propose; "all" only where their number is known."""
        number = len(self.history)
        if self.region.size() == number:
            return f"exhausted: all {number} networks within the limits are evaluated"
        return f"exhausted: no network within the limits was found beyond the {number} that are evaluated"

    @property
    def done(self) -> bool:
        """Whether the search is over; `stopped` then says why."""
        self._prepare()
        return bool(self.stopped)

    @property
    def evaluations(self) -> int:
        """How many networks were evaluated, each once."""
        return len(self.history)

    def ask(self, n: int | None = None) -> list[Architecture]:
        """The networks of this generation not told yet, at most `n`; [] when the search is over.

        Asking again without telling repeats the answer. `UserError` for an `n` that is no whole number of at least 1.
        """
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise UserError(f"ask: n={n!r} is not valid; valid: a whole number of at least 1, or None for all")
        self._prepare()
        rows = self._pending[self._told :][: len(self._pending) if n is None else n]
        return self.space.decode(np.stack(rows)) if rows else []

    def tell(self, results: Sequence[Mapping[str, Score]]) -> None:
        """The scores of the networks asked for, by name, in their order; fewer than asked for are a part of them.

        Raises:
            UserError: more results than networks, or a score of `needs` is missing; then nothing was taken in.
        """
        if not isinstance(results, Sequence) or not all(isinstance(scores, Mapping) for scores in results):
            raise UserError(f"tell: {results!r} is not valid; valid: a list of mappings from names to scores")
        self._prepare()
        left = len(self._pending) - self._told
        if len(results) > left:
            raise UserError(f"tell: {len(results)} results for {left} networks asked for")
        for i, scores in enumerate(results):
            self.check_scores(i, self._pending[self._told + i], scores)
        for scores in results:
            self.record(self._pending[self._told], scores, self._costs[self._told])
            self._told += 1
        if self._pending and self._told == len(self._pending):
            self._pending, self._costs = [], []
            self.complete()

    @property
    def best(self) -> Entry | None:
        """The network of the greatest objective, of equals the first by id; None while there is no valid one."""
        found = self.top(1)
        return found[0] if found else None

    def top(self, k: int) -> list[Entry]:
        """The `k` best networks, best first; never an invalid one or one that racing dropped."""
        return [self.history.entry(i) for i in self.history.top(k, self.eligible())]

    def _identity(self) -> dict[str, Any]:
        """What two searches must share for one to continue the other."""
        settings = {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.settings).items()
        }
        return {
            "strategy": self.name,
            "seed": self.seed,
            "objective": self.objective.name,
            "space": self.space.id,
            "limits": self.region.limits.to_dict(),
            "settings": settings,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that the search knows, as primitives; networks asked for and not told yet will be asked again."""
        return {
            "version": _VERSION,
            "identity": self._identity(),
            "history": self.history.state_dict(),
            "generation": self.generation,
            "stats": [dict(row) for row in self.stats],
            "stopped": self.stopped,
            "pending": [row.tolist() for row in self._pending],
            "costs": [dict(costs) for costs in self._costs],
            "told": self._told,
            "counts": dict(self._counts),
            "extra": self.extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another search of the same identity, bit for bit; `UserError` where it was another one."""
        if state.get("version") != _VERSION:
            raise UserError(
                "search: the saved state is of another version of lightning_tas, whose moves were others: it would go "
                "on as another search; begin it anew in a run folder of its own"
            )
        for name, value in self._identity().items():
            theirs = state["identity"].get(name)
            if theirs != value:
                raise UserError(f"search: the saved state has {name} {theirs!r}, this search {value!r}")
        self.history = History.from_state(self.space, self.objective, state["history"])
        self.generation, self.stopped, self._told = state["generation"], state["stopped"], state["told"]
        self.stats = [dict(row) for row in state["stats"]]
        self._pending = [np.asarray(row, dtype=np.int16) for row in state["pending"]]
        self._costs = [dict(costs) for costs in state["costs"]]
        self._counts = dict(state["counts"])
        self.load_extra_state(state["extra"])


_S = TypeVar("_S", bound=type[Strategy])
_STRATEGIES: dict[str, type[Strategy]] = {}
_MODULES = ("random_search", "evolution", "s3_evolution", "blockwise", "etas", "exhaustive", "nsga2")


def register_strategy(name: str) -> Callable[[_S], _S]:
    """Decorator of a `Strategy`: make ``build_strategy(name, ...)`` build it.

    Commands import it by ``search.strategy=MODULE:NAME``. A package offers strategies without being imported by an
    entry point of the group ``lightning_tas.strategies``, whose value is the class.
    """

    def add(strategy: _S) -> _S:
        if name in _STRATEGIES and _STRATEGIES[name] is not strategy:
            raise UserError(f"strategy: {name!r} is registered already")
        strategy.name = name
        _STRATEGIES[name] = strategy
        return strategy

    return add


def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"lightning_tas.search.{module}")


def strategies() -> list[str]:
    """The names that `build_strategy` knows, sorted."""
    _load()
    return sorted({*_STRATEGIES, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def strategy_class(name: str) -> type[Strategy]:
    """The strategy called `name`, or that of "MODULE:NAME", see `plugins.resolve`; `UserError` with the nearest one."""
    _load()
    if ":" in name:
        name = resolve("search.strategy", name, lambda: _STRATEGIES, "lightning_tas.search.strategy.register_strategy")
    if name not in _STRATEGIES:
        for point in entry_points(group=ENTRY_POINTS):
            if point.name == name:
                register_strategy(name)(point.load())
    if name not in _STRATEGIES:
        raise unknown("strategy", name, strategies())
    return _STRATEGIES[name]


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a strategy with their defaults."""
    return defaults(strategy_class(name).Settings)


def build_strategy(name: str, region: Region, objective: Objective | str, seed: int = 0, **settings: Any) -> Strategy:
    """The strategy called `name`; `UserError` for an unknown name, setting or value, and for limits nothing meets."""
    return strategy_class(name)(region, objective, seed, **settings)


def run(
    strategy: Strategy,
    scorer: Callable[[list[Architecture], tuple[str, ...]], Sequence[Mapping[str, Score]]],
    on_generation: Callable[[Strategy], None] | None = None,
) -> Strategy:
    """Search to the end: ``scorer(archs, needs)`` gives the scores by name of each network, in order."""
    while not strategy.done:
        before = strategy.generation
        archs = strategy.ask()
        strategy.tell(scorer(archs, strategy.needs))
        if on_generation is not None and strategy.generation != before:
            on_generation(strategy)
    return strategy
