"""Limits on what a network may cost, and the part of a space that lies within them.

`Limits` is the value: a lower and an upper bound, both inclusive and either open, for any of parameters,
multiply-accumulates, latency and activations. `Region` is a space under limits: it decides membership a million codes
at a time, knows exactly what the space reaches, says before any work when nothing is within, counts what is, and draws
from it without ever looping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tas.costs import CostOptions, cost_options, formula
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.cuts import Total
from lightning_tas.randomness import derive, numpy_generator
from lightning_tas.spaces import SearchSpace

Codes = NDArray[np.int16]
Quantity = Callable[[Codes], NDArray[Any]]
Bounds = tuple[float, float]

UNITS = {"params": "parameters", "macs": "multiply-accumulates", "latency": "ms", "activations": "bytes"}
"""The quantities that may be limited, each in this unit: latency of a batch, activations of an image."""
SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}

# Rejection draws rows in rounds that double from the first of these sizes to the last, and gives up after a round at
# full size that brought fewer than one new network in `DRY` rows.
FIRST_ROUND, LAST_ROUND, DRY = 256, 1 << 15, 1 << 10
# Spaces of so many networks are looked through whole where nothing faster is exact.
SMALL = 1 << 14
PROBE = 1 << 15


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


class Region:
    """The members of `space` that are within `limits`.

    Args:
        space: the whole space.
        limits: `Limits` or what `Limits.read` takes.
        net_or_options: what costs depend on besides the architecture: a network, `CostOptions`, or a mapping of its
            fields; None for the defaults.
        quantities: further quantities by name ("latency", "activations" or any other), each a `Total` over codes, or
            a function of codes (N, columns) to numbers (N,), in the unit of the limits. Only a `Total` has an exact
            range and takes part in exact counts.

    Raises:
        UserError: limits that cannot be read; a limited quantity that is not given; a family without cost formulas.
    """

    def __init__(
        self,
        space: SearchSpace,
        limits: Limits | Mapping[str, Any] | None = None,
        net_or_options: Any = None,
        quantities: Mapping[str, Quantity] | None = None,
    ) -> None:
        self.space = space
        self._given = dict(quantities or {})
        self.limits = Limits.read(limits, ("params", "macs", *self._given))
        for name in self.limits.bounds:
            if name not in ("params", "macs", *self._given):
                raise UserError(
                    f"limits.{name}: nothing here knows this quantity of a network; give it in quantities "
                    f"(there are params, macs{''.join(f', {own}' for own in self._given)})"
                )
        self._formula = formula(space.family)
        self._options = _cost_options(net_or_options)

    def quantities(self, codes: Codes) -> dict[str, NDArray[Any]]:
        """params and macs of codes (N, columns), int64 (N,), and every further quantity that is limited."""
        params, macs = self._formula.many(self.space, codes, self._options)
        further = {name: self._given[name](codes) for name in self.limits.bounds if name in self._given}
        return {"params": params, "macs": macs, **further}

    def allowed(self, codes: Codes) -> NDArray[np.bool_]:
        """Which members of the space (N, columns) are within the limits, (N,)."""
        return self.limits.within(self.quantities(codes))

    @cached_property
    def exact(self) -> bool:
        """Whether all limited quantities are sums of tables, so that ranges and counts are exact."""
        return all(isinstance(self._given.get(name), (Total, type(None))) for name in self.limits.bounds)

    def ranges(self) -> dict[str, Bounds]:
        """What the whole space reaches in params, macs and every limited quantity: (least, most).

        Exact; of a quantity that is a plain function, over the whole of a small space or a sample of a large one.
        """
        codes = self._everything if self._everything is not None else self._ends
        found = self.quantities(codes)
        return {name: (values.min().item(), values.max().item()) for name, values in found.items()}

    def check(self) -> None:
        """`UserError` when no network is within the limits, with their values and what the space reaches.

        Ends in seconds. It is exact where `exact` is true; otherwise a limit that no network of a large sample meets
        counts as one that nothing meets, and the message says so.
        """
        if not self.limits or len(self._probe):
            return
        ranges = self.ranges()
        missed = [name for name, (low, high) in self.limits.items if low > ranges[name][1] or high < ranges[name][0]]
        if missed or self.size() == 0:
            raise UserError(self._nothing(missed, ranges))

    def _nothing(self, missed: Sequence[str], ranges: Mapping[str, Bounds]) -> str:
        """What to tell a user whose limits nothing meets."""
        bounds = self.limits.bounds
        parts = [f"{_say(name, bounds[name])}, but it reaches {_say(name, ranges[name])}" for name in missed]
        if not missed:
            parts = [f"{_say(name, bounds[name])} (it reaches {_say(name, ranges[name])})" for name in bounds]
        keys = ", ".join(f"limits.{name}" for name in (missed or bounds))
        joint = " and ".join(parts) if missed else " and ".join(parts) + " at once"
        hints = [_meant(name, bounds[name], ranges[name]) for name in missed]
        return f"{keys}: no network of {self.space.name!r} has {joint}{''.join(hints)}"

    def size(self) -> int | None:
        """The exact number of networks within the limits; None where it cannot be counted."""
        if not self.limits:
            return self.space.size()
        if self._everything is not None:
            return int(self.allowed(self._everything).sum())
        return None

    def sample(self, seed: int, n: int, seen: Collection[bytes] = ()) -> Codes:
        """`n` different networks within the limits (n, columns), in none of the `seen` keys (`codes_row.tobytes()`).

        A function of the seed and `seen`; the first rows are the same for every `n`. Networks are drawn from the
        space's own distribution and kept when they are within the limits. Where that runs dry, the rest are drawn
        uniformly among all within. Fewer rows come back only when there are no more.
        """
        if n < 0:
            raise UserError(f"sample: n must not be negative, got {n}")
        taken = _Taken(n, seen)
        rounds, rows = 0, FIRST_ROUND
        while len(taken.rows) < n:
            codes = self.space.sample_codes(derive(seed, "region.sample", rounds), rows)
            before = len(taken.rows)
            taken.add(codes[self.allowed(codes)])
            if rows == LAST_ROUND and len(taken.rows) - before < rows // DRY:
                break
            rounds, rows = rounds + 1, min(2 * rows, LAST_ROUND)
        if len(taken.rows) < n and self._everything is not None:
            order = numpy_generator(seed, "region.rest").permutation(len(self._everything))
            codes = self._everything[order]
            taken.add(codes[self.allowed(codes)])
        return np.array(taken.rows, dtype=np.int16).reshape(-1, len(self.space.columns))

    @cached_property
    def _probe(self) -> Codes:
        """What is within the limits of a fixed sample: usually enough to know that they can be met."""
        codes = self.space.sample_codes(0, PROBE)
        return codes[self.allowed(codes)]

    @cached_property
    def _everything(self) -> Codes | None:
        """The codes of a small space, all of them; None for a large one."""
        return self.space.encode(self.space.enumerate()) if self.space.size() <= SMALL else None

    @cached_property
    def _ends(self) -> Codes:
        return self.space.encode([self.space.smallest(), self.space.largest()])


class _Taken:
    """Distinct rows in the order in which they came, at most `n`."""

    def __init__(self, n: int, seen: Collection[bytes]) -> None:
        self._n, self._seen = n, seen if isinstance(seen, (Set, Mapping)) else frozenset(seen)
        self.rows: list[Codes] = []
        self.keys: set[bytes] = set()

    def add(self, codes: Codes) -> None:
        for row in codes:
            if len(self.rows) == self._n:
                return
            key = row.tobytes()
            if key not in self.keys and key not in self._seen:
                self.keys.add(key)
                self.rows.append(row)


def _cost_options(given: Any) -> CostOptions:
    if isinstance(given, CostOptions):
        return given
    return cost_options(**given) if isinstance(given, Mapping) else cost_options(given)


def _say(name: str, bounds: Bounds) -> str:
    """A range in words: "latency from 3 to 5 ms"."""
    low, high = (None if math.isinf(bound) else _number(bound) for bound in bounds)
    unit = "" if name in ("params", "macs") else f" {UNITS[name]}" if name in UNITS else ""
    if low is None or high is None:
        said = f"of at most {high}" if low is None else f"of at least {low}"
    else:
        said = f"of exactly {low}" if low == high else f"from {low} to {high}"
    return f"{name} {said}{unit}"


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.6g}"


def _meant(name: str, bounds: Bounds, reached: Bounds) -> str:
    """A hint when the bounds would meet the range with a suffix that the user left out."""
    if max(bound for bound in bounds if math.isfinite(bound)) >= 10_000:
        return ""
    for suffix, factor in SUFFIXES.items():
        low, high = (bound * factor for bound in bounds)
        if suffix and low <= reached[1] and high >= reached[0]:
            written = ", ".join("null" if math.isinf(b) else f"{_number(b)}{suffix}" for b in bounds)
            return f". Did you mean limits.{name}=[{written}]?"
    return ""
