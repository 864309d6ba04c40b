"""A space factorised into independent tables of allowed combinations: why counting and sampling are exact and fast.

Variables (choices) tied by constraints form components; components are independent of each other. Each is solved once,
by backtracking, into the table of its allowed rows. Spaces of 1e22 architectures then need a few small tables:
their size is a product of sums, and a draw picks a row per table, so nothing is ever rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lightning_tas.errors import UserError

# A component of more combinations is refused: it would take minutes and gigabytes where users expect an instant.
MAX_ROWS = 2_000_000

V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Constraint:
    """`test` must hold for the values of `variables`, in their order."""

    variables: tuple[Any, ...]
    test: Callable[..., bool]


@dataclass(frozen=True, eq=False)
class Table:
    """Allowed combinations of some variables: `rows` (R, k) holds choice indices, in lexicographic order."""

    variables: tuple[Any, ...]
    rows: np.ndarray
    sizes: tuple[int, ...]

    @property
    def free(self) -> bool:
        """Whether every combination is allowed."""
        return len(self.rows) == math.prod(self.sizes)

    def contains(self, codes: np.ndarray) -> np.ndarray:
        """Which rows of `codes` (N, k), already within range, are allowed: (N,) bool."""
        if self.free:
            return np.ones(len(codes), dtype=bool)
        return np.isin(self._keys(codes), self._keys(self.rows))

    def _keys(self, codes: np.ndarray) -> np.ndarray:
        return np.ravel_multi_index(tuple(codes.astype(np.int64).T), self.sizes)


def solve(
    domains: Mapping[V, Sequence[Any]], constraints: Iterable[Constraint], ties: Iterable[Sequence[V]] = ()
) -> list[Table]:
    """The tables of all components, in order of their first variable; a table without rows means no solution.

    `ties` are variables to be kept in one table though no constraint binds them. `UserError` beyond `MAX_ROWS`.
    """
    constraints = list(constraints)
    parent: dict[V, V] = {v: v for v in domains}

    def root(v: V) -> V:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for group in [*(c.variables for c in constraints), *ties]:
        for v in group[1:]:
            parent[root(v)] = root(group[0])
    components: dict[V, list[V]] = {}
    for v in domains:
        components.setdefault(root(v), []).append(v)
    return [_table(vs, domains, [c for c in constraints if set(c.variables) <= set(vs)]) for vs in components.values()]


def _table(variables: list[V], domains: Mapping[V, Sequence[Any]], constraints: list[Constraint]) -> Table:
    sizes = tuple(len(domains[v]) for v in variables)
    position = {v: i for i, v in enumerate(variables)}
    # A constraint is tested as soon as its last variable is set.
    due: list[list[tuple[Callable[..., bool], list[int]]]] = [[] for _ in variables]
    for constraint in constraints:
        places = [position[v] for v in constraint.variables]
        due[max(places)].append((constraint.test, places))
    rows: list[tuple[int, ...]] = [()]
    values = [domains[v] for v in variables]
    for i in range(len(variables)):
        if len(rows) * sizes[i] > MAX_ROWS:
            raise UserError(
                f"space: the predicates tie {', '.join(map(str, variables))} into more than {MAX_ROWS:,} combinations"
            )
        rows = [
            row
            for prefix in rows
            for row in ((*prefix, j) for j in range(sizes[i]))
            if all(test(*(values[p][row[p]] for p in places)) for test, places in due[i])
        ]
    return Table(tuple(variables), np.array(rows, dtype=np.int16).reshape(len(rows), len(variables)), sizes)
