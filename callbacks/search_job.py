"""One search from beginning to end: ask, score, tell; keep the state after every generation; write what was found.

The same job runs as a phase of its own, inside `Trainer.fit` (`searches`) and behind `python -m lightning_tas.search`.
On several processes each runs the strategy, which is a function of counters, and the scorer shares the networks out;
only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tas.callbacks import search_record as record
from lightning_tas.callbacks.latency_limit import SPARE, LatencyLimit, keep_limit
from lightning_tas.callbacks.search_record import Found
from lightning_tas.progress import Progress
from lightning_tas.proxies.shards import share_of
from lightning_tas.search.history import Entry
from lightning_tas.search.scorers import Scorer
from lightning_tas.search.strategy import Strategy

OnGeneration = Callable[[Mapping[str, Any]], None]


@dataclass
class SearchJob:
    """A search that is ready to run.

    strategy, scorer: what proposes, what judges. score: the objective's name, for tables and pictures. top: how many
    networks it hands on. folder: where state and results are written; None keeps all in memory. key: what decides the
    result (weights, settings, seed, limits), so that a state is continued by no other search. settings: what
    `search.json` says about the search. on_generation: called with the row of every generation, on rank 0.
    limit: generations to run now; None: all. piece: networks scored between two savings of the state; None: a
    generation's. latency: its limit, which decides among the networks found, see `keep_limit`.
    """

    strategy: Strategy
    scorer: Scorer
    score: str
    top: int = 1
    folder: Path | None = None
    key: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_generation: OnGeneration | None = None
    progress: bool = False
    limit: int | None = None
    piece: int | None = None
    latency: LatencyLimit | None = None

    def run(self) -> Found:
        """Search, going on from a kept state, and write the results. Collective."""
        self._restore()
        done = self.strategy.generation
        bar = _Progress(self.strategy, self.progress and self._main)
        try:
            while not self.strategy.done and (self.limit is None or self.strategy.generation - done < self.limit):
                self._generation(bar)
        finally:
            bar.close()
        spare = 0 if self.latency is None else SPARE
        found = keep_limit(self.found(self.top + spare), self.top, self.latency)
        if self.folder is not None:
            into = self.folder  # what fails in rank 0, as on a full disk, ends all
            share_of(None).first(lambda: record.write(into, self.strategy, found, self.settings, self.score))
        return found

    @property
    def _main(self) -> bool:
        return share_of(None).rank == 0

    def found(self, most: int | None = None) -> Found:
        """What the search has found by now, with at most so many networks (None: `top`)."""
        strategy = self.strategy
        own = getattr(strategy, "front", None)  # of a strategy with several objectives
        front = own() if own is not None else self._front()
        return Found(
            strategy.top(most or self.top), list(strategy.stats), strategy.evaluations, strategy.stopped, front
        )

    def _front(self) -> list[Entry]:
        """The front of score and params; of networks that racing gave up, those that seem to lie on it see all images.

        Few are: a search of hundreds gives up nearly all small networks, and the front is of them.
        """
        entries = list(self.strategy.history)
        while True:
            front = front_of(entries)
            rough = [entry for entry in front if entry.dropped]
            if not rough:
                return front
            results = self.scorer.whole([entry.arch for entry in rough], self.strategy.needs)  # type: ignore[attr-defined]
            for entry, scores in zip(rough, results, strict=True):
                value = self.strategy.objective.values([scores])[0]
                entries[entry.index] = replace(entry, scores=scores, value=float(value), estimate=float(value))

    def _generation(self, bar: _Progress) -> None:
        """Ask and tell until the strategy has finished a generation; ETAS asks twice for each."""
        before = len(self.strategy.stats)
        while not self.strategy.done and len(self.strategy.stats) == before:
            archs = self.strategy.ask(self.piece)
            if not archs:
                break
            self.strategy.tell(self.scorer(archs, self.strategy.needs))
            bar.told(len(archs))
            if self.piece is not None:
                self._save()
        self._save()
        if self.on_generation is not None and self._main:
            for row in self.strategy.stats[before:]:
                self.on_generation(row)

    def _save(self) -> None:
        if self.folder is not None:
            into = self.folder
            share_of(None).first(lambda: record.save_state(into, self.key, self.state_dict()))

    def _restore(self) -> None:
        if self.folder is None or self.strategy.evaluations:
            return  # what a checkpoint has brought goes before
        folder = self.folder
        state = share_of(None).first(lambda: record.load_state(folder, self.key))
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Strategy and scorer as primitives and tensors."""
        own = getattr(self.scorer, "state_dict", None)
        return {"strategy": self.strategy.state_dict(), "scorer": own() if own is not None else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.strategy.load_state_dict(state["strategy"])
        if state.get("scorer") and hasattr(self.scorer, "load_state_dict"):
            self.scorer.load_state_dict(state["scorer"])


def front_of(entries: Iterable[Entry]) -> list[Entry]:
    """The networks that no other one beats in score (or its estimate) at as few parameters, by ascending parameters."""
    valid = [e for e in entries if np.isfinite(e.estimate)]
    front: list[Entry] = []
    for entry in sorted(valid, key=lambda e: (e.params, -e.estimate, e.arch.id)):
        if not front or entry.estimate > front[-1].estimate:
            front.append(entry)
    return front


class _Progress:
    """How many networks are scored, with the best so far, acceptance rate and share of distinct proposals."""

    def __init__(self, strategy: Strategy, shown: bool) -> None:
        self._strategy = strategy
        self._shown = Progress("search", "net", strategy.budget, shown, strategy.evaluations)
        self.close = self._shown.close

    def told(self, number: int) -> None:
        """`number` more networks are scored."""
        self._shown.advance(number, self._line, self._facts)

    def _line(self, after: str) -> str:
        facts = ", ".join(f"{key} {value}" for key, value in self._facts().items())
        return f"search: {self._strategy.evaluations} networks after {after}, {facts}"

    def _facts(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        best = self._strategy.best
        if best is not None:
            facts["best"] = f"{best.value:.6g}"
        if self._strategy.stats:
            last = self._strategy.stats[-1]
            facts |= {"accepted": f"{100 * last['acceptance']:.0f}%", "unique": f"{100 * last['unique']:.0f}%"}
        return facts
