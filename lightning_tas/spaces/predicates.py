"""Predicates: named rules that combinations of choices must satisfy.

A predicate is a value (a registered name and arguments), never a function, so spaces hash, compare and serialise. An
argument is a number or the name of a dimension; the rule sees the number chosen there. *Point* rules hold at every
place where their finest dimension is chosen (a block sees its stage's and the network's choices); *path* rules see,
for a stage dimension, the tuple of its values over the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from lightning_tas.architecture import Value, canonical
from lightning_tas.errors import UserError, unknown

Check = Callable[..., bool]
_C = TypeVar("_C", bound=Check)


@dataclass(frozen=True)
class Rule:
    """What a predicate's name stands for: the check, its statement with ``{0}``, ``{1}`` for arguments, its kind."""

    check: Check
    says: str
    path: bool


_RULES: dict[str, Rule] = {}


def register_predicate(name: str, says: str, path: bool = False) -> Callable[[_C], _C]:
    """Decorator: make ``Predicate(name, args)`` mean the decorated function of the arguments' values.

    `says` states the rule for messages, e.g. ``"{0} must be a multiple of {1}"``. Spaces that use the rule can be read
    back only where it is registered.
    """

    def add(check: _C) -> _C:
        if name in _RULES:
            raise UserError(f"predicate: {name!r} is registered already")
        _RULES[name] = Rule(check, says, path)
        return check

    return add


@dataclass(frozen=True)
class Predicate:
    """A registered rule applied to dimensions and numbers: ``Predicate("divisible", ("d_model", "n_head"))``."""

    name: str
    args: tuple[Value, ...]

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise unknown("predicate", self.name, _RULES)
        object.__setattr__(self, "args", tuple(canonical(a, f"predicate {self.name}") for a in self.args))

    @property
    def rule(self) -> Rule:
        """The registered rule."""
        return _RULES[self.name]

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions that the rule looks at."""
        return tuple(dict.fromkeys(a for a in self.args if isinstance(a, str)))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the rule holds when the dimensions have these values (tuples over stages for a path rule)."""
        return bool(self.rule.check(*(values[a] if isinstance(a, str) else a for a in self.args)))

    def says(self, values: Mapping[str, Any] | None = None) -> str:
        """The rule in words, with the numbers chosen where they are given."""
        shown = [f"{a}={values[a]}" if isinstance(a, str) and values and a in values else str(a) for a in self.args]
        return self.rule.says.format(*shown)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"name": self.name, "args": list(self.args)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Predicate:
        """Read `to_dict`'s form."""
        if not isinstance(data, Mapping) or set(data) != {"name", "args"}:
            raise UserError(f"predicates: expected mappings with name and args, got {data!r}")
        return cls(data["name"], tuple(data["args"]))


@register_predicate("divisible", "{0} must be a multiple of {1}")
def _divisible(whole: int, part: int) -> bool:
    return whole % part == 0


@register_predicate("at_least", "{0} must be at least {1} times {2}")
def _at_least(value: float, factor: float, other: float) -> bool:
    return value >= factor * other


@register_predicate("greater", "{0} must be greater than {1} times {2}")
def _greater(value: float, factor: float, other: float) -> bool:
    return value > factor * other


@register_predicate("divides_next", "{0} of every stage must divide that of the next", path=True)
def _divides_next(values: tuple[int, ...]) -> bool:
    return all(b % a == 0 for a, b in pairwise(values))


@register_predicate("total_between", "the sum of {0} over the stages must be from {1} to {2}", path=True)
def _total_between(values: tuple[float, ...], low: float, high: float) -> bool:
    return low <= sum(values) <= high
