"""What a search maximises: any proxy, or the accuracy of a sub-network, as numbers for the networks told so far.

A rank-combined proxy (DSS++, NTSR, TE-NAS) has no value of its own: it ranks a network among all others, so its values
change with each network told. `Values` keeps what ranking needs and ranks once per question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.archive import Archive
from lightning_tas.proxies.registry import known_names, named
from lightning_tas.proxies.score import INVALID, Score

FloatArray = npt.NDArray[np.float64]
Scores = Mapping[str, Score]

ACCURACY, TRAINED = "accuracy", "trained"
OTHERS = (ACCURACY, TRAINED)
"""Objectives that are no proxies: top-1 [%] on held-out images, with inherited weights or after a training alone."""


def heading(name: str) -> str:
    """What tables and figures call an objective: accuracies with their unit, as everywhere; proxies have none."""
    return "top-1 [%]" if name in OTHERS else name


def dropped(score: Score) -> bool:
    """Whether racing gave this network up before it had seen all images, so that its accuracy is a rough one."""
    return bool(score.extras.get("dropped"))


@dataclass(frozen=True)
class Objective:
    """A named quantity to maximise. needs: the scores that a network must be told with. ranked: see the module."""

    name: str
    needs: tuple[str, ...]
    ranked: bool = False

    @classmethod
    def of(cls, name: str | Objective, key: str = "objective") -> Objective:
        """The objective "accuracy", "trained" or a proxy's name ("MODULE:NAME" too); `UserError` naming `key`."""
        if isinstance(name, Objective):
            return name
        if name in OTHERS:
            return cls(name, (name,))
        try:
            one = named(name)
        except UserError:
            if isinstance(name, str) and ":" in name:
                raise
            raise unknown(key, name, [*OTHERS, *known_names()]) from None
        return cls(one.name, one.combines or (one.name,), bool(one.combines))

    def values(self, rows: Sequence[Scores]) -> FloatArray:
        """Values (N,) of networks from their scores; `INVALID`, minus infinity, where there is none.

        A network that racing dropped has none either: it was seen to be no winner, and how good it is is not known.
        """
        table = self.table()
        for row in rows:
            table.add(row)
        return table.values

    def table(self) -> Values:
        """A table of values to which networks are added one by one."""
        return Values(self)


class Values:
    """Values of an objective for a growing list of networks."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._plain: list[float] = []
        self._rough: list[float] = []
        self._archive = Archive(objective.name) if objective.ranked else None

    def __len__(self) -> int:
        return len(self._plain if self._archive is None else self._archive)

    def add(self, scores: Scores) -> None:
        """Add a network; `UserError` where a score is missing."""
        lacking = [name for name in self.objective.needs if name not in scores]
        if lacking:
            raise UserError(
                f"objective {self.objective.name}: no score of {', '.join(lacking)} was told; got {sorted(scores)}"
            )
        out = any(dropped(scores[name]) for name in self.objective.needs)
        if self._archive is not None:
            # An invalid network stays out of the ranks of the others.
            gone = Score.invalid("dropped by racing")
            self._archive.add({name: gone if out else scores[name] for name in self.objective.needs})
            return
        score = scores[self.objective.needs[0]]
        value = score.value if score.valid and math.isfinite(score.value) else INVALID
        self._plain.append(INVALID if out else value)
        self._rough.append(value)

    @property
    def values(self) -> FloatArray:
        """The value of every network in the order of adding, ranked among all of them where the objective ranks."""
        return self._archive.values if self._archive is not None else np.asarray(self._plain, dtype=np.float64)

    @property
    def estimates(self) -> FloatArray:
        """As `values`, with the estimates of networks that racing gave up: good for means, not to choose by."""
        return self._archive.values if self._archive is not None else np.asarray(self._rough, dtype=np.float64)


def best_first(values: FloatArray, k: int | None = None) -> list[int]:
    """Indices of the `k` (None: all) greatest values, greatest first, the earlier first among equals; no `INVALID`."""
    order = np.argsort(-values, kind="stable")
    order = order[values[order] > INVALID]
    return [int(i) for i in order[: len(order) if k is None else k]]
