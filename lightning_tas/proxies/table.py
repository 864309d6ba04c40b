"""Scores of many networks by many proxies: compact columns, whatever computed them.

Rank-combined proxies have no columns of their own: their values depend on the whole set, so they are computed from
their components when asked for. Parts and other sums by block are kept in memory, and dropped in files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.errors import unknown
from lightning_tas.proxies.registry import FloatArray, Proxy
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.scorer import combined

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class Row(NamedTuple):
    """One scored network: its place in the sequence given, and what was found."""

    place: int
    arch: Architecture
    params: int
    macs: int
    scores: Mapping[str, Score]


@dataclass
class Column:
    """Scores of all networks by one proxy; extras are NaN where a network has none of that name."""

    value: FloatArray
    valid: BoolArray
    seconds: FloatArray
    reasons: dict[int, str] = field(default_factory=dict)
    extras: dict[str, FloatArray] = field(default_factory=dict)
    blocks: dict[int, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    parts: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def score(self, place: int) -> Score:
        """The score of one network, with parts and sums by block where they were kept."""
        raw = {key: float(found[place]) for key, found in self.extras.items() if not np.isnan(found[place])}
        valid = bool(self.valid[place])
        reason = self.reasons.get(place, "")
        parts, blocks = self.parts.get(place, ()), self.blocks.get(place, {})
        return Score(float(self.value[place]), parts, valid, reason, float(self.seconds[place]), raw, blocks)


class _Growing:
    """A `Column` that grows: 17 bytes a network and 8 for each extra; with `by_block` also for each block of some."""

    def __init__(self, by_block: bool = False) -> None:
        self._by_block = by_block
        self.blocks: dict[int, Mapping[str, tuple[float, ...]]] = {}
        self.parts: dict[int, tuple[float, ...]] = {}
        self.value, self.valid, self.seconds = array("d"), array("b"), array("d")
        self.reasons: dict[int, str] = {}
        self.extras: dict[str, array[float]] = {}

    def append(self, score: Score) -> None:
        number = len(self.value)
        self.value.append(score.value)
        self.valid.append(score.valid)
        self.seconds.append(score.seconds)
        if score.reason:
            self.reasons[number] = score.reason
        if self._by_block and score.blocks:
            self.blocks[number] = score.blocks
        if self._by_block and score.parts:
            self.parts[number] = score.parts
        for key in score.extras:
            if key not in self.extras:
                self.extras[key] = array("d", [np.nan]) * number
        for key, found in self.extras.items():
            found.append(score.extras.get(key, np.nan))

    def extend(self, other: _Growing) -> None:
        number = len(self.value)
        self.value.extend(other.value)
        self.valid.extend(other.valid)
        self.seconds.extend(other.seconds)
        self.reasons |= {number + place: reason for place, reason in other.reasons.items()}
        self.blocks |= {number + place: blocks for place, blocks in other.blocks.items()}
        self.parts |= {number + place: parts for place, parts in other.parts.items()}
        for key in {**self.extras, **other.extras}:
            mine = self.extras.setdefault(key, array("d", [np.nan]) * number)
            mine.extend(other.extras.get(key, array("d", [np.nan]) * len(other.value)))

    def column(self) -> Column:
        extras = {key: np.array(found) for key, found in self.extras.items()}
        valid = np.array(self.valid, dtype=np.bool_)
        seconds = np.array(self.seconds)
        return Column(np.array(self.value), valid, seconds, self.reasons, extras, self.blocks, self.parts)


class Gatherer:
    """Takes networks one by one, in any order, and makes a `Scores` of them; `by_block` keeps what is by block."""

    def __init__(self, components: Sequence[Proxy], by_block: bool = False) -> None:
        self._columns = {one.name: _Growing(by_block) for one in components}
        self._places, self._params, self._macs = array("q"), array("q"), array("q")

    def append(self, place: int, params: int, macs: int, scores: Mapping[str, Score]) -> None:
        """Add one network."""
        self._places.append(place)
        self._params.append(params)
        self._macs.append(macs)
        for name, column in self._columns.items():
            column.append(scores[name])

    def extend(self, other: Gatherer) -> None:
        """Add the networks of another one."""
        self._places.extend(other._places)
        self._params.extend(other._params)
        self._macs.extend(other._macs)
        for name, column in self._columns.items():
            column.extend(other._columns[name])

    def scores(self, names: Sequence[Proxy], archs: Callable[[], list[Architecture]]) -> Scores:
        """What was gathered, by place; `archs` gives the architectures in that order."""
        order = np.argsort(np.array(self._places, dtype=np.int64), kind="stable")
        columns = {name: _ordered(column.column(), order) for name, column in self._columns.items()}
        params, macs = (np.array(found, dtype=np.int64)[order] for found in (self._params, self._macs))
        return Scores(names, columns, params, macs, archs)


def _ordered(column: Column, order: IntArray) -> Column:
    if (order == np.arange(len(order))).all():
        return column
    place = {int(old): new for new, old in enumerate(order)}
    return Column(
        column.value[order],
        column.valid[order],
        column.seconds[order],
        {place[old]: reason for old, reason in column.reasons.items()},
        {key: found[order] for key, found in column.extras.items()},
        {place[old]: blocks for old, blocks in column.blocks.items()},
        {place[old]: parts for old, parts in column.parts.items()},
    )


class Scores:
    """Scores of N networks by proxy, in the order in which the networks were given.

    value: float64 (N,), higher is better, -inf where a score is invalid; valid: bool (N,); reason: why not, a list of
    N texts; seconds: (N,), what the proxy takes alone; extras: the raw quantities behind it, (N,). params, macs:
    int64 (N,). A rank-combined proxy is computed over these N networks.
    """

    def __init__(
        self,
        names: Sequence[Proxy],
        columns: Mapping[str, Column],
        params: IntArray,
        macs: IntArray,
        archs: Callable[[], list[Architecture]],
    ) -> None:
        self._proxies = {one.name: one for one in names}
        self._columns = dict(columns)
        self.params, self.macs = params, macs
        self._read_archs = archs

    @property
    def names(self) -> tuple[str, ...]:
        """The proxies asked for, in that order."""
        return tuple(self._proxies)

    @property
    def archs(self) -> list[Architecture]:
        """The networks; decoded or read from the file at every call."""
        return self._read_archs()

    @property
    def ids(self) -> list[str]:
        """`Architecture.id` of every network."""
        return [arch.id for arch in self.archs]

    def __len__(self) -> int:
        return len(self.params)

    def value(self, name: str) -> FloatArray:
        """Scores by the proxy `name`, float64 (N,)."""
        return self._column(name).value

    def valid(self, name: str) -> BoolArray:
        """Which scores mean something, bool (N,)."""
        return self._column(name).valid

    def reason(self, name: str) -> list[str]:
        """Why each score is invalid, empty where it is valid."""
        reasons = self._column(name).reasons
        return [reasons.get(place, "") for place in range(len(self))]

    def seconds(self, name: str) -> FloatArray:
        """What the proxy takes alone for each network [s], float64 (N,)."""
        return self._column(name).seconds

    def extras(self, name: str, key: str) -> FloatArray:
        """A raw quantity behind the scores of `name`, float64 (N,); NaN where a network has none."""
        found = self._column(name).extras
        if key not in found:
            raise unknown(f"extras of {name}", key, found)
        return found[key]

    def score(self, name: str, place: int) -> Score:
        """The score of one network, with parts and sums by block where they were kept in memory."""
        return self._column(name).score(place)

    def to_rows(self) -> list[dict[str, Any]]:
        """One dict a network: id, arch (a dict), params, macs, and per proxy value, `.valid`, `.reason`, `.seconds`."""
        columns = {name: self._column(name) for name in self._proxies}
        rows = []
        for place, arch in enumerate(self.archs):
            row: dict[str, Any] = {"id": arch.id, "arch": arch.to_dict()}
            row |= {"params": int(self.params[place]), "macs": int(self.macs[place])}
            for name, column in columns.items():
                row[f"{name}.value"] = float(column.value[place])
                row[f"{name}.valid"] = bool(column.valid[place])
                row[f"{name}.reason"] = column.reasons.get(place, "")
                row[f"{name}.seconds"] = float(column.seconds[place])
                row |= {f"{name}.{key}": float(found[place]) for key, found in column.extras.items()}
            rows.append(row)
        return rows

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            if name not in self._proxies:
                raise unknown("proxy", name, dict.fromkeys([*self._proxies, *self._columns]))
            self._columns[name] = self._combine(self._proxies[name])
        return self._columns[name]

    def _combine(self, one: Proxy) -> Column:
        parts = {name: self._column(name) for name in one.combines}
        rows = [{name: part.score(place) for name, part in parts.items()} for place in range(len(self))]
        grown = _Growing()
        for score in combined(one, rows):
            grown.append(score)
        return grown.column()
