"""A space under limits: which members are within, what the space reaches, how many there are, and draws from them.

Quantities that are sums of tables over codes (parameters, multiply-accumulates, activations, a latency table) have
exact ranges, and where the tables hold whole numbers, exact counts: then limits that nothing meets are refused at once
with proof, and a band that holds one network in a billion is drawn from as easily as the whole space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightning_tas.additive import Members, Paths, Problem, Term, TooMany, Total, best, ranges
from lightning_tas.costs import CostOptions, cost_options, formula
from lightning_tas.costs.terms import cost_terms
from lightning_tas.errors import UserError
from lightning_tas.limits.bounds import Bounds, Limits, meant, number, say
from lightning_tas.randomness import derive, numpy_generator
from lightning_tas.spaces import SearchSpace

Codes = NDArray[np.int16]
Quantity = Callable[[Codes], NDArray[Any]]
COSTS = ("params", "macs")

# Rejection draws rows in rounds that double from the first of these sizes to the last, and gives up after a round of
# the last size that brought fewer than one new network in `DRY` rows.
FIRST_ROUND, LAST_ROUND, DRY = 256, 1 << 15, 1 << 7
# Networks that are looked at one by one where nothing faster is exact, and that are put into a random order.
SMALL, ORDERED = 1 << 16, 1 << 24
# Partial networks told apart in counting: it is done only where needed, and may take several seconds and 1 GB.
LABELS = 12_000_000


@runtime_checkable
class Additive(Protocol):
    """A quantity that is ``total(codes) / per``."""

    @property
    def total(self) -> Total:
        """The sum of tables."""

    @property
    def per(self) -> int:
        """How many of its units are one of the quantity's (nanoseconds per millisecond)."""


@dataclass(frozen=True)
class Scaled:
    """The `Additive` quantity of a sum and its unit."""

    total: Total
    per: int = 1

    def __call__(self, codes: Codes) -> NDArray[Any]:
        """The quantity of codes (N, columns): (N,)."""
        return self.total(codes) / self.per


class Region:
    """The members of `space` that are within `limits`.

    Args:
        space: the whole space.
        limits: `Limits` or what `Limits.read` takes.
        net_or_options: what costs depend on besides the architecture: a network, `CostOptions`, or a mapping of its
            fields; None for the defaults.
        quantities: further quantities by name ("latency", "activations" or any other), in the unit of the limits: a
            `Total` over codes, an `Additive` such as a `LatencyTable`, or any function of codes (N, columns) to
            numbers (N,). Sums of whole numbers take part in exact counts; of other functions only samples are known.

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
        if not isinstance(space, SearchSpace):
            raise UserError(f"space: expected a SearchSpace, got {space!r}; see lightning_tas.space")
        self.space = space
        self._given = dict(quantities or {})
        self.limits = Limits.read(limits, (*COSTS, *self._given))
        for name in self.limits.bounds:
            if name not in COSTS and name not in self._given:
                raise UserError(
                    f"limits.{name}: nothing here knows this quantity of a network; give it in quantities "
                    f"(there are {', '.join((*COSTS, *self._given))})"
                )
            other = getattr(self._given.get(name), "space", space)
            if other != space:
                raise UserError(f"limits.{name}: its table is of space {other.name!r}, not of {space.name!r}")
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

    # --- what is known exactly ----------------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> dict[str, Scaled]:
        """params, macs and the limited quantities, as far as they are sums of tables."""
        try:
            found = {name: Scaled(total) for name, total in cost_terms(self.space, self._options).items()}
        except UserError:  # a user's family, whose formula adds up in another way
            found = {}
        for name in self.limits.bounds:
            quantity = self._given.get(name)
            if isinstance(quantity, Total):
                found[name] = Scaled(quantity)
            elif isinstance(quantity, Additive):
                found[name] = Scaled(quantity.total, quantity.per)
            elif quantity is not None:
                found.pop(name, None)
        return found

    def whole_limits(self) -> tuple[dict[str, Total], dict[str, Bounds]]:
        """The limits as `lightning_tas.additive` takes them: sums of whole numbers, and their bounds in those units.

        Limited quantities that are no such sums are left out: all are in it where `exact` is true.
        """
        sums = {name: q for name, q in self.sums.items() if name in self.limits.bounds and _whole(q.total)}
        bounds = {name: _times(self.limits.bounds[name], q.per) for name, q in sums.items()}
        return {name: q.total for name, q in sums.items()}, bounds

    def given(self, name: str) -> Any:
        """The further quantity `name` as it was given; None where it was not."""
        return self._given.get(name)

    @cached_property
    def exact(self) -> bool:
        """Whether all limited quantities are sums of whole numbers, so that counts and refusals are exact."""
        return self.whole_limits()[0].keys() == self.limits.bounds.keys()

    def ranges(self) -> dict[str, Bounds]:
        """What the whole space reaches in params, macs and every limited quantity: (least, most).

        Exact for sums of tables, and for other functions in a small space; else over a sample.
        """
        return dict(self._ranges)

    @cached_property
    def _ranges(self) -> dict[str, Bounds]:
        names = dict.fromkeys([*COSTS, *self.limits.bounds])
        ends = {name: ranges(self.space, q.total) for name, q in self.sums.items()}
        found = {name: (low / self.sums[name].per, high / self.sums[name].per) for name, (low, high) in ends.items()}
        if found.keys() < names.keys():
            values = self.quantities(self._tried)
            found = {name: (float(v.min()), float(v.max())) for name, v in values.items()} | found
        return {name: found[name] for name in names}

    @cached_property
    def _tried(self) -> Codes:
        """All members of a small space; of a large one the smallest, the largest and a fixed sample."""
        if self.space.size() <= SMALL:
            return _all(Members(self.space, {}))
        ends = self.space.encode([self.space.smallest(), self.space.largest()])
        return np.concatenate([ends, self.space.sample_codes(0, LAST_ROUND)])

    @cached_property
    def members(self) -> Members | None:
        """The networks within those limits that can be counted, by number; None where they are too many to tell apart.

        They are exactly the region where `exact` is true.
        """
        try:
            return Members(self.space, *self.whole_limits(), max_labels=LABELS)
        except TooMany:
            return None

    @cached_property
    def paths(self) -> Paths:
        """The networks within those limits that are sums of tables, as the graph that moves are drawn from.

        They are exactly the region where `exact` and `paths.exact` are true; else draws are to be checked by `allowed`.
        """
        sums = {name: q for name, q in self.sums.items() if name in self.limits.bounds}
        bounds = {
            name: _times(self.limits.bounds[name], q.per)
            if _whole(q.total)
            else (self.limits.bounds[name][0] * q.per, self.limits.bounds[name][1] * q.per)
            for name, q in sums.items()
        }
        return Paths.within(self.space, {name: q.total for name, q in sums.items()}, bounds)

    def size(self) -> int | None:
        """The exact number of networks within the limits; None where it cannot be counted."""
        members = self.members
        if members is None or self.exact:
            return None if members is None else members.total
        return int(self.allowed(_all(members)).sum()) if members.total <= SMALL else None

    # --- whether there is anything ------------------------------------------------------------------------------------

    def check(self) -> None:
        """`UserError` when no network is within the limits, with their values and what the space reaches.

        Ends in seconds, with proof where `size` is known. Else limits that no network of a large sample meets are
        refused, and the message says so.
        """
        bounds = self.limits.bounds
        missed = [n for n, (low, high) in bounds.items() if low > self._ranges[n][1] or high < self._ranges[n][0]]
        if bounds and (missed or not len(self.sample(0, 1))):
            raise UserError(self._nothing(missed))

    def _nothing(self, missed: Sequence[str]) -> str:
        """What to tell a user whose limits nothing meets; `missed` are those that are out of reach one by one."""
        bounds, reached = self.limits.bounds, self._ranges
        names = missed or list(bounds)
        wanted = " and ".join(say(name, bounds[name]) for name in names)
        reaches = " and ".join(say(name, reached[name]) for name in bounds)
        text = f"{', '.join(f'limits.{name}' for name in names)}: no network of {self.space.name!r} has {wanted}"
        text += f"{'' if missed or len(bounds) == 1 else ' at once'}. The space reaches {reaches}."
        text += "".join(meant(name, bounds[name], reached[name]) for name in missed)
        if missed:
            sampled = [name for name in missed if name not in self.sums and self.space.size() > SMALL]
            return text + (f" Of {' and '.join(sampled)} only a sample is known." if sampled else "")
        if self.size() is None:
            tried = 2 * LAST_ROUND - FIRST_ROUND
            return text + f" That is not proven: none of {tried:,} or more networks tried was within."
        return text + self._nearest()

    def _nearest(self) -> str:
        """Which values of each quantity, just beyond its bounds, networks within the other limits have."""
        totals, bounds = self.whole_limits()
        said = []
        for name, (low, high) in bounds.items():
            values = [
                self._extreme(name, {**bounds, name: beyond}, sign)
                for sign, beyond in ((1, (-math.inf, low)), (-1, (high, math.inf)))
                if not math.isinf(low if sign > 0 else high)
            ]
            found = [number(value / self.sums[name].per) for value in values if value is not None]
            said += [f"{name} {' and '.join(found)}"] if found else []
        others = " within the other limits" if len(bounds) > 1 else ""
        return f" The nearest{others}: {'; '.join(said)}." if said and len(totals) == len(self.limits.bounds) else ""

    def _extreme(self, name: str, bounds: Mapping[str, Bounds], sign: int) -> int | None:
        """The greatest (sign 1) or least (-1) value of a sum within bounds; None where there is none or no proof."""
        totals = self.whole_limits()[0]
        score = Total(tuple(Term(term.columns, sign * term.table) for term in totals[name].terms))
        found = best(Problem(self.space, score, totals, bounds))
        return int(found.costs[name][0]) if len(found) and found.optimal else None

    # --- drawing ------------------------------------------------------------------------------------------------------

    def sample(self, seed: int, n: int, seen: Collection[bytes] = ()) -> Codes:
        """`n` different networks within the limits (n, columns), in none of the `seen` keys (`codes_row.tobytes()`).

        A function of the seed and `seen`; the first rows are the same for every `n`. Networks are drawn from the
        space's own distribution and kept when they are within the limits. Where that runs dry, the rest are drawn
        uniformly among all within. Fewer come back when there are no more, and where limits that cannot be counted
        admit hardly any.
        """
        if n < 0:
            raise UserError(f"sample: n must not be negative, got {n}")
        taken = _Taken(n, seen)
        self._fill(taken, lambda turn, rows: self.space.sample_codes(derive(seed, "region.sample", turn), rows))
        members = self.members if taken.missing else None
        if members is None or not members.total:
            return taken.codes(len(self.space.columns))
        if members.total > LAST_ROUND:
            self._fill(taken, lambda turn, rows: members.sample(derive(seed, "region.rest", turn), rows))
        if taken.missing and members.total <= ORDERED:
            order = numpy_generator(seed, "region.order").permutation(members.total)
            for start in range(0, len(order), LAST_ROUND):
                if taken.missing:
                    taken.add(self._within(members.codes(order[start : start + LAST_ROUND])))
        return taken.codes(len(self.space.columns))

    def _fill(self, taken: _Taken, draw: Callable[[int, int], Codes]) -> None:
        """Add what is within the limits of ``draw(round, rows)``, until there is enough or it runs dry."""
        turn, rows = 0, FIRST_ROUND
        while taken.missing:
            before = taken.missing
            taken.add(self._within(draw(turn, rows)))
            if rows == LAST_ROUND and before - taken.missing < rows // DRY:
                return
            turn, rows = turn + 1, min(2 * rows, LAST_ROUND)

    def _within(self, codes: Codes) -> Codes:
        return codes[self.allowed(codes)]


class _Taken:
    """Distinct rows in the order in which they came, at most `n`, none of them among the `seen` keys."""

    def __init__(self, n: int, seen: Collection[bytes]) -> None:
        self.missing = n
        self._seen = seen if isinstance(seen, (Set, Mapping)) else frozenset(seen)
        self._rows: dict[bytes, Codes] = {}

    def add(self, codes: Codes) -> None:
        """Take as many of `codes` as are new and missing."""
        for row in codes:
            if not self.missing:
                return
            key = row.tobytes()
            if key not in self._rows and key not in self._seen:
                self._rows[key] = row
                self.missing -= 1

    def codes(self, columns: int) -> Codes:
        """All taken, (rows, columns)."""
        return np.array(list(self._rows.values()), dtype=np.int16).reshape(-1, columns)


def _all(members: Members) -> Codes:
    return members.codes(np.arange(members.total))


def _cost_options(given: Any) -> CostOptions:
    if isinstance(given, CostOptions):
        return given
    return cost_options(**given) if isinstance(given, Mapping) else cost_options(given)


def _whole(total: Total) -> bool:
    return all(np.array_equal(term.table, np.rint(term.table)) for term in total.terms)


def _times(bounds: Bounds, per: int) -> Bounds:
    """Bounds of a quantity as whole numbers of its units, in the decimals that the user wrote."""
    low = bounds[0] if math.isinf(bounds[0]) else float(math.ceil(Fraction(repr(bounds[0])) * per))
    high = bounds[1] if math.isinf(bounds[1]) else float(math.floor(Fraction(repr(bounds[1])) * per))
    return (low, high) if low <= high else (0.25, 0.75)  # no whole number is between them
