"""What a search knows: every network told, in order, with its scores; and this as JSON.

Networks are held as codes and keys, so a generation of thousands costs no architecture objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.proxies.score import Score
from lightning_tas.search.objective import FloatArray, Objective, Scores, best_first, dropped
from lightning_tas.spaces import SearchSpace

Codes = npt.NDArray[np.int16]


def key(row: npt.NDArray[Any]) -> bytes:
    """What makes an encoded network (C,) the same network."""
    return row.astype(np.int16).tobytes()


@dataclass(frozen=True)
class Entry:
    """A network that was told: its value among all told, its scores, its costs, its place in the search.

    generation counts from 0, and so does index, the place in the whole history. quantities: params, macs and whatever
    else the search limits. estimate: the value, or that of some images for a network that racing gave up.
    """

    arch: Architecture
    value: float
    scores: Mapping[str, Score]
    params: int
    macs: int
    generation: int
    index: int
    quantities: Mapping[str, float] = field(default_factory=dict)
    estimate: float = -math.inf

    @property
    def dropped(self) -> bool:
        """Whether racing gave the network up, so that it has no value and `estimate` is a rough one."""
        return any(dropped(score) for score in self.scores.values())


class History(Sequence[Entry]):
    """All networks told, in order; as a sequence it gives `Entry` values."""

    def __init__(self, space: SearchSpace, objective: Objective) -> None:
        self.space, self.objective = space, objective
        self.rows: list[Codes] = []
        self.scores: list[Scores] = []
        self.quantities: list[dict[str, float]] = []
        self.generations: list[int] = []
        self.seen: set[bytes] = set()
        self._table = objective.table()
        self._values: FloatArray | None = None
        self._estimates: FloatArray | None = None
        self._ids: dict[int, str] = {}

    def add(self, row: Codes, scores: Scores, quantities: Mapping[str, float], generation: int) -> None:
        """Append a network that was never told before."""
        assert key(row) not in self.seen, "a network was evaluated twice"
        self._table.add(scores)
        self._values = self._estimates = None
        self.seen.add(key(row))
        self.rows.append(row)
        self.scores.append(dict(scores))
        self.quantities.append(dict(quantities))
        self.generations.append(generation)

    @property
    def values(self) -> FloatArray:
        """The objective of every network (N,), ranked anew among all of them where it ranks; do not write to it."""
        if self._values is None:
            self._values = self._table.values
        return self._values

    @property
    def estimates(self) -> FloatArray:
        """As `values`, with the estimates of networks that racing gave up."""
        if self._estimates is None:
            self._estimates = self._table.estimates
        return self._estimates

    def top(self, k: int | None = None, among: Sequence[int] | None = None) -> list[int]:
        """Indices of the `k` best (None: all), best first, equals by the id of the network; never an invalid one.

        By id, as racing does, so that it decides nothing which of two equal networks was proposed first.
        """
        chosen = np.arange(len(self)) if among is None else np.asarray(sorted(among), dtype=np.intp)
        order = chosen[best_first(self.values[chosen])].tolist()
        found: list[int] = []
        for _, equals in groupby(order, key=self.values.__getitem__):
            if k is not None and len(found) >= k:
                break
            group = list(equals)
            found += sorted(group, key=self._id) if len(group) > 1 else group
        return found[:k]

    def _id(self, index: int) -> str:
        if index not in self._ids:
            self._ids[index] = self.space.decode(self.rows[index])[0].id
        return self._ids[index]

    def since(self, generation: int) -> list[int]:
        """Indices of the networks of one generation and later ones."""
        return [i for i, g in enumerate(self.generations) if g >= generation]

    def entry(self, index: int) -> Entry:
        """One network as a value."""
        costs = self.quantities[index]
        return Entry(
            self.space.decode(self.rows[index])[0],
            float(self.values[index]),
            self.scores[index],
            int(costs["params"]),
            int(costs["macs"]),
            self.generations[index],
            index,
            costs,
            float(self.estimates[index]),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.entry(i) for i in range(len(self))[index]]
        return self.entry(range(len(self))[index])

    def __iter__(self) -> Iterator[Entry]:
        return (self.entry(i) for i in range(len(self)))

    def state_dict(self) -> dict[str, Any]:
        """As primitives."""
        return {
            "codes": [row.tolist() for row in self.rows],
            "scores": [{name: pack(score) for name, score in scores.items()} for scores in self.scores],
            "quantities": [dict(q) for q in self.quantities],
            "generations": list(self.generations),
        }

    @classmethod
    def from_state(cls, space: SearchSpace, objective: Objective, state: Mapping[str, Any]) -> History:
        """Read `state_dict`'s form."""
        history = cls(space, objective)
        rows = np.asarray(state["codes"], dtype=np.int16)
        columns = (state["scores"], state["quantities"], state["generations"])
        for row, scores, quantities, generation in zip(rows, *columns, strict=True):
            history.add(row, {name: unpack(score) for name, score in scores.items()}, quantities, generation)
        return history


def pack(score: Score) -> dict[str, Any]:
    """A score as primitives, without what is empty; numbers that JSON lacks become words."""
    packed: dict[str, Any] = {"value": _word(score.value), "seconds": _word(score.seconds)}
    if not score.valid:
        packed |= {"valid": False, "reason": score.reason}
    if score.parts:
        packed["parts"] = [_word(part) for part in score.parts]
    if score.extras:
        packed["extras"] = {name: _word(number) for name, number in score.extras.items()}
    if score.blocks:
        packed["blocks"] = {name: [_word(number) for number in numbers] for name, numbers in score.blocks.items()}
    return packed


def unpack(packed: Mapping[str, Any]) -> Score:
    """Read `pack`'s form."""
    return Score(
        float(packed["value"]),
        tuple(float(part) for part in packed.get("parts", ())),
        packed.get("valid", True),
        packed.get("reason", ""),
        float(packed["seconds"]),
        {name: float(number) for name, number in packed.get("extras", {}).items()},
        {name: tuple(float(n) for n in numbers) for name, numbers in packed.get("blocks", {}).items()},
    )


def _word(number: float) -> float | str:
    number = float(number)
    return number if math.isfinite(number) else str(number)
