"""Dimensions: one free factor of a space, with its scope and its choices; and the columns of the encoded form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

from lightning_tas.architecture import RESERVED, WHOLE, Value, canonical
from lightning_tas.errors import UserError, unknown

Scope = Literal["network", "stage", "block"]
SCOPES: tuple[Scope, ...] = ("network", "stage", "block")


@dataclass(frozen=True)
class Dimension:
    """A free factor: its name, where it is chosen, and the ascending choices.

    `choices` is one list for all stages or, for stage and block scope, one list per stage. `step` is the unit by which
    a search over spaces moves the choices. The stage dimension called ``depth`` counts the stage's blocks.
    `zero` admits 0 as a choice (a count of optional layers).
    """

    name: str
    scope: Scope
    choices: tuple[Any, ...]
    step: Value | None = None
    zero: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise UserError(f"dimension: {self.name!r} is not a name")
        if self.name in RESERVED:
            raise UserError(f"dimension: {self.name!r} means something else on architectures; choose another name")
        if self.scope not in SCOPES:
            raise unknown(f"{self.name}.scope", self.scope, SCOPES)
        entries = _entries(self.choices, self.name)
        if entries and all(_is_list(entry) for entry in entries):
            if self.scope == "network":
                raise UserError(f"{self.name}: a network dimension has one list of choices, got {list(self.choices)}")
            lists = tuple(self._check(_entries(e, self.name), f"{self.name}[{i}]") for i, e in enumerate(entries))
            object.__setattr__(self, "choices", lists)
        else:
            object.__setattr__(self, "choices", self._check(entries, self.name))
        if self.step is not None:
            object.__setattr__(self, "step", canonical(self.step, f"{self.name}.step"))

    def _check(self, entries: list[object], field: str) -> tuple[Value, ...]:
        if not entries:
            raise UserError(f"{field}: no choices")
        values = tuple(canonical(entry, field) for entry in entries)
        for value in values:
            if isinstance(value, str):
                raise UserError(f"{field}: {value!r} is not a number")
            if value < 0 or (value == 0 and not self.zero):
                raise UserError(f"{field}: choices must be positive, got {value} in {list(values)}")
            if self.name in WHOLE and not isinstance(value, int):
                raise UserError(f"{field}: choices must be whole numbers, got {value} in {list(values)}")
        numeric = cast(tuple[float, ...], values)
        for low, high in pairwise(numeric):
            if low == high:
                raise UserError(f"{field}: {low} is listed twice in {list(values)}")
            if low > high:
                raise UserError(f"{field}: choices must ascend, but {high} follows {low} in {list(values)}")
        return values

    @property
    def per_stage(self) -> bool:
        """Whether every stage has a list of its own."""
        return isinstance(self.choices[0], tuple)

    def at(self, stage: int | None) -> tuple[Any, ...]:
        """The choices in `stage` (None for a network dimension)."""
        return self.choices[stage] if self.per_stage and stage is not None else self.choices

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        choices = [list(c) for c in self.choices] if self.per_stage else list(self.choices)
        data: dict[str, Any] = {"name": self.name, "scope": self.scope, "choices": choices}
        if self.step is not None:
            data["step"] = self.step
        if self.zero:
            data["zero"] = True
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Dimension:
        """Read `to_dict`'s form."""
        if not isinstance(data, Mapping):
            raise UserError(f"dimensions: expected mappings with name, scope and choices, got {data!r}")
        fields = ("name", "scope", "choices", "step", "zero")
        for key in data:
            if key not in fields:
                raise unknown("dimension", key, fields)
        for key in fields[:3]:
            if key not in data:
                raise UserError(f"dimension {data.get('name', '?')!r}: {key} is missing")
        return cls(**{str(key): value for key, value in data.items()})


@dataclass(frozen=True)
class Column:
    """One column of the encoded form: dimension `name` in `stage` and block slot `block`, None where it has none."""

    name: str
    stage: int | None
    block: int | None
    choices: tuple[Any, ...]


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _entries(value: object, field: str) -> list[object]:
    if not _is_list(value):
        raise UserError(f"{field}: expected a list of choices, got {value!r}")
    return sorted(cast(Any, value)) if isinstance(value, (set, frozenset)) else list(cast(Iterable[object], value))
