"""What networks are judged by in a search: proxies, inherited accuracy, or anything else that gives `Score`s by name.

A scorer is a function of (architectures, names of scores) that returns one mapping of `Score`s per architecture. In a
distributed run every rank calls it with the same networks; they share the work, and each gets all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_tas.architecture import Architecture
from lightning_tas.errors import unknown
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.session import Session
from lightning_tas.search.objective import ACCURACY

if TYPE_CHECKING:
    from lightning_tas.population import Population

__all__ = ["ACCURACY", "AccuracyScorer", "ProxyScorer", "Result", "Scorer", "Scorers"]

Result = Mapping[str, Score]
Scorer = Callable[[Sequence[Architecture], Sequence[str]], list[Result]]


class ProxyScorer:
    """Scores by zero-cost proxies; arguments are those of `proxies.session.Session` but for the names.

    `costs` (params and macs in the registry) are proxies like others.
    """

    def __init__(self, net: Any, **settings: Any) -> None:
        self._net, self._settings = net, settings
        self._sessions: dict[tuple[str, ...], Session] = {}

    def __call__(self, archs: Sequence[Architecture], names: Sequence[str]) -> list[Result]:
        key = tuple(names)
        if key not in self._sessions:
            options = self._settings.get("options") or {}
            own = {name: given for name, given in options.items() if name in key}
            self._sessions[key] = Session(list(names), self._net, **{**self._settings, "options": own})
        scores = self._sessions[key].score(archs)
        return [{name: scores.score(name, place) for name in names} for place in range(len(archs))]


class AccuracyScorer:
    """Top-1 [%] of sub-networks with inherited weights, on held-out images; higher is better.

    racing: stop a network that cannot be among the best `top` any more, with a probability of `error` that this changes
    them; its score is an estimate then, with the extra ``dropped``, and never counts as one of the best.
    """

    def __init__(
        self, population: Population, racing: bool = True, top: int = 10, error: float = 0.05, seed: int = 0
    ) -> None:
        self.population = population
        self._racing = racing
        self._race: dict[str, Any] = {"top": top, "error": error, "seed": seed}

    @property
    def racing(self) -> dict[str, Any] | None:
        """Its stated error and how many of the best it protects; None where all networks see all images."""
        return {key: self._race[key] for key in ("error", "top")} if self._racing else None

    def __call__(self, archs: Sequence[Architecture], names: Sequence[str]) -> list[Result]:
        if self._racing:
            raced = self.population.race(archs, **self._race)
            return [{ACCURACY: _accuracy(one.top1, one.images, one.dropped)} for one in raced]
        return self.whole(archs, names)

    def whole(self, archs: Sequence[Architecture], names: Sequence[str]) -> list[Result]:
        """The same without racing: final numbers."""
        return [{ACCURACY: _accuracy(one.top1, one.samples, False)} for one in self.population.accuracies(archs)]

    def state_dict(self) -> dict[str, Any]:
        """What racing compares with, as primitives and tensors."""
        return dict(self.population.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on racing against the best of `state`."""
        self.population.load_state_dict(state)


def _accuracy(top1: float, images: int, dropped: bool) -> Score:
    extras = {"images": float(images)}
    return Score(top1, extras={**extras, "dropped": 1.0} if dropped else extras)


class Scorers:
    """Several scorers as one: each name goes to the scorer that has it, everything else to `proxies`."""

    def __init__(self, proxies: Scorer | None, special: Mapping[str, Scorer]) -> None:
        self._proxies, self.special = proxies, dict(special)

    def __call__(self, archs: Sequence[Architecture], names: Sequence[str]) -> list[Result]:
        found: list[dict[str, Score]] = [{} for _ in archs]
        others = [name for name in names if name not in self.special]
        groups: list[tuple[Scorer | None, list[str]]] = [(self.special[n], [n]) for n in names if n in self.special]
        if others:
            groups.append((self._proxies, others))
        for scorer, own in groups:
            if scorer is None:
                raise unknown("search.score", own[0], self.special)
            for row, result in zip(found, scorer(archs, own), strict=True):
                row.update(result)
        return list(found)

    def whole(self, archs: Sequence[Architecture], names: Sequence[str]) -> list[Result]:
        """Final numbers of networks that racing gave up."""
        own = [name for name in names if isinstance(self.special.get(name), AccuracyScorer)]
        found = [one.whole(archs, [n]) for n in own if isinstance(one := self.special[n], AccuracyScorer)]
        return [{name: score for part in parts for name, score in part.items()} for parts in zip(*found, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The states of the scorers that have one, by name, as primitives and tensors."""
        return {name: one.state_dict() for name, one in self.special.items() if isinstance(one, AccuracyScorer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        for name, own in state.items():
            scorer = self.special[name]
            assert isinstance(scorer, AccuracyScorer)
            scorer.load_state_dict(own)
