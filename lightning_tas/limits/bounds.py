"""Limits as a value: what users write, read and refused, and put into words again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tas.errors import UserError, unknown

Bounds = tuple[float, float]

UNITS = {"params": "parameters", "macs": "multiply-accumulates", "latency": "ms", "activations": "bytes"}
"""The quantities that may be limited, each in this unit: latency of a batch, activations of an image."""
SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
SUFFIXED = ("params", "macs", "activations")
"""Quantities of thousands and more, which are written with a suffix."""
FAR = 10
"""A bound so many times above all networks was hardly meant."""


@dataclass(frozen=True)
class Limits:
    """Two-sided inclusive bounds by quantity, -inf or inf where a side is open. See `read`."""

    items: tuple[tuple[str, Bounds], ...] = ()

    @property
    def bounds(self) -> dict[str, Bounds]:
        """(low, high) by quantity, of those that are limited."""
        return dict(self.items)

    @classmethod
    def read(cls, given: Limits | Mapping[str, Any] | None, more: Iterable[str] = ()) -> Limits:
        """Read what a user wrote: ``{"params": [5e6, "7M"], "macs": [None, "1.4G"], "latency": [None, 30]}``.

        Each value is a pair [low, high] of numbers or texts with a suffix k, M or G (powers of 1000); None leaves a
        side open, and two equal numbers ask for exactly that. Units: `UNITS`. `more` are further names to admit.

        Raises:
            UserError: an unknown quantity; a value that is no such pair; a bound that is no finite number of at least
                0; a lower bound that exceeds the upper one.
        """
        if given is None or isinstance(given, Limits):
            return given or cls()
        if not isinstance(given, Mapping):
            raise UserError(f"limits: expected quantities with pairs [low, high], got {given!r}")
        known = dict.fromkeys([*UNITS, *more])
        for name in given:
            if name not in known:
                raise unknown("limits", name, known)
        pairs = {str(name): _pair(f"limits.{name}", value) for name, value in given.items() if value is not None}
        return cls(tuple((name, pair) for name, pair in pairs.items() if pair != (-math.inf, math.inf)))

    def within(self, quantities: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Which of N networks are within all bounds, (N,), from arrays (N,) of at least the limited quantities."""
        ok = np.ones(len(next(iter(quantities.values()))), dtype=np.bool_)
        for name, (low, high) in self.items:
            ok &= (quantities[name] >= low) & (quantities[name] <= high)
        return ok

    def to_dict(self) -> dict[str, list[float | int | None]]:
        """JSON-able form, which `read` reads back: None for an open side."""
        return {name: [_plain(low), _plain(high)] for name, (low, high) in self.items}

    def __bool__(self) -> bool:
        return bool(self.items)


def _pair(key: str, value: Any) -> Bounds:
    if isinstance(value, (Real, str)) and not isinstance(value, bool):
        _bound(key, value)
        raise UserError(
            f"{key}: {value} is one number, but a limit has two sides: write [null, {value}] for at most that, "
            f"[{value}, null] for at least, [{value}, {value}] for exactly"
        )
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) != 2:
        raise UserError(f"{key}: expected a pair [low, high], null for an open side, got {value!r}")
    low = -math.inf if value[0] is None else _bound(key, value[0])
    high = math.inf if value[1] is None else _bound(key, value[1])
    if low > high:
        raise UserError(f"{key}: the lower bound, {value[0]}, exceeds the upper one, {value[1]}")
    return low, high


def _bound(key: str, value: Any) -> float:
    """One number as a float; decimal texts are taken exactly, so that "1.4G" is 1,400,000,000."""
    number: float | None = None
    try:
        if isinstance(value, str):
            found = re.fullmatch(r"\s*(.*?\d\.?)\s*([kMG]?)\s*", value)
            number = float(Decimal(found[1]) * SUFFIXES[found[2]]) if found else None
        elif isinstance(value, Real) and not isinstance(value, (bool, np.bool_)):
            number = float(value)
    except InvalidOperation:
        pass
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if number is None:
        raise UserError(f"{key}: {value!r} is not a number; valid: 5000000, 5e6, '5M', with suffixes k, M, G, or null")
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"{key}: {value} is not valid; a bound is a finite number of at least 0, or null for none")
    return number


def _plain(bound: float) -> float | int | None:
    if math.isinf(bound):
        return None
    return int(bound) if float(bound).is_integer() else bound


def span(bounds: Bounds) -> str:
    """A range in words: "5,000,000 to 7,000,000", "at most 30", "at least 2.5", "exactly 4"; "any" for an open one."""
    low, high = (None if math.isinf(bound) else number(bound) for bound in bounds)
    if low is None or high is None:
        return f"at most {high}" if high is not None else f"at least {low}" if low is not None else "any"
    return f"exactly {low}" if bounds[0] == bounds[1] else f"{low} to {high}"


def say(name: str, bounds: Bounds) -> str:
    """A quantity and a range of it in words: "latency from 3 to 5 ms"."""
    unit = "" if name in ("params", "macs") else f" {UNITS[name]}" if name in UNITS else ""
    between = bounds[0] < bounds[1] and not any(map(math.isinf, bounds))
    return f"{name} {'from' if between else 'of'} {span(bounds)}{unit}"


def number(value: float) -> str:
    """All digits of a whole number, at least six of any other."""
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.6g}" if value < 1e5 else f"{value:,.1f}"


def meant(name: str, bounds: Bounds, reached: Bounds) -> str:
    """A question, when bounds that are out of reach would be near it with a suffix that the user left out; or ""."""
    finite = [bound for bound in bounds if math.isfinite(bound)]
    if name not in SUFFIXED or max(finite) >= 10_000:
        return ""
    for suffix, factor in SUFFIXES.items():
        low, high = (bound * factor for bound in bounds)
        if suffix and low <= reached[1] and high >= reached[0] and max(finite) * factor <= FAR * reached[1]:
            # As they can be typed: with commas between digits a list would have more than two entries.
            written = ", ".join("null" if math.isinf(bound) else f"{_plain(bound)}{suffix}" for bound in bounds)
            return f" Did you mean limits.{name}=[{written}]?"
    return ""
