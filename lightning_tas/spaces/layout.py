"""The layout of encoded architectures and the tables of a space: derived once from its dimensions and predicates.

Columns: the network's choices, then per stage the stage's own choices and, for every block slot up to the greatest
depth, the block's. The columns outside blocks are the *skeleton*. A code is the index of a choice; -1 fills the slots
beyond a stage's depth. Which rows of choices are allowed: `Layout.tables` for the skeleton, and
`Layout.block_tables` for one block of a stage, given the skeleton values that block predicates look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.spaces.dimension import SCOPES, Column, Dimension
from lightning_tas.spaces.factors import Constraint, Table, solve
from lightning_tas.spaces.predicates import Predicate


class Layout:
    """Columns, offsets and tables. `stages` is the number of stages; see the module's text for the terms."""

    def __init__(self, dimensions: Sequence[Dimension], predicates: Sequence[Predicate], stages: int) -> None:
        self.network, self.stage, self.block = (tuple(d for d in dimensions if d.scope == scope) for scope in SCOPES)
        self.stages = stages
        self.predicates = predicates
        self._scope = {d.name: d.scope for d in dimensions}
        columns = [Column(d.name, None, None, d.at(None)) for d in self.network]
        depth = next(d for d in self.stage if d.name == "depth")
        self.depth_column: list[int] = []
        self.block_start: list[int] = []
        self.max_depth = [depth.at(s)[-1] for s in range(stages)]
        self.depth_choices = [np.array(depth.at(s)) for s in range(stages)]
        for s in range(stages):
            self.depth_column.append(len(columns) + self.stage.index(depth))
            columns += [Column(d.name, s, None, d.at(s)) for d in self.stage]
            self.block_start.append(len(columns))
            columns += [Column(d.name, s, b, d.at(s)) for b in range(self.max_depth[s]) for d in self.block]
        self.columns = tuple(columns)
        self.skeleton = [c for c, column in enumerate(columns) if column.block is None]
        self._index = {(column.name, column.stage): c for c, column in enumerate(columns) if column.block is None}
        self._block_cache: dict[tuple[int, tuple[int, ...]], list[Table]] = {}
        #: Filled by `moves.block_choices`.
        self.block_choices: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def slots(self, stage: int) -> slice:
        """The columns of all block slots of a stage; reshape (slots, block dimensions)."""
        start = self.block_start[stage]
        return slice(start, start + self.max_depth[stage] * len(self.block))

    def column(self, name: str, stage: int) -> int:
        """The skeleton column that holds `name` as `stage` sees it."""
        return self._index[name, None if self._scope[name] == "network" else stage]

    def _at_blocks(self, predicate: Predicate) -> bool:
        return any(self._scope[name] == "block" for name in predicate.names)

    @cached_property
    def context(self) -> list[list[int]]:
        """Per stage, the skeleton columns that decide which blocks are allowed there."""
        names = {n for p in self.predicates if self._at_blocks(p) for n in p.names if self._scope[n] != "block"}
        return [sorted(self.column(n, s) for n in names) for s in range(self.stages)]

    @cached_property
    def tables(self) -> list[Table]:
        """The skeleton's tables. A stage's depth shares one with its context, and rows without any block are out."""
        constraints = []
        for p in self.predicates:
            if self._at_blocks(p):
                continue
            if p.rule.path:
                path = tuple(self.column(n, s) for n in p.names for s in range(self.stages))
                constraints.append(Constraint(path, _path_test(p, self.stages)))
                continue
            once = all(self._scope[n] == "network" for n in p.names)
            for s in range(1 if once else self.stages):
                constraints.append(Constraint(tuple(self.column(n, s) for n in p.names), _point_test(p, p.names, {})))
        ties = [[*context, self.depth_column[s]] for s, context in enumerate(self.context) if context]
        solved = solve({c: self.columns[c].choices for c in self.skeleton}, constraints, ties)
        return [Table(t.variables, t.rows[[self._livable(t, row) for row in t.rows]], t.sizes) for t in solved]

    def stages_of(self, table: Table) -> list[int]:
        """The stages whose depth this table decides, and with it their number of block combinations."""
        return [s for s, c in enumerate(self.depth_column) if c in table.variables]

    def _livable(self, table: Table, row: np.ndarray) -> bool:
        return all(self.block_count(s, self.context_of(s, table, row)) for s in self.stages_of(table))

    def context_of(self, stage: int, table: Table, row: np.ndarray) -> tuple[int, ...]:
        """The codes of a stage's context in a row of the table that holds its depth."""
        return tuple(int(row[table.variables.index(c)]) for c in self.context[stage])

    def block_tables(self, stage: int, context: tuple[int, ...]) -> list[Table]:
        """The tables of one block's choices in `stage` when the context columns hold the codes `context`."""
        key = (stage, context)
        if key not in self._block_cache:
            columns = self.context[stage]
            known = {self.columns[c].name: self.columns[c].choices[i] for c, i in zip(columns, context, strict=True)}
            position = {d.name: j for j, d in enumerate(self.block)}
            constraints = []
            for p in filter(self._at_blocks, self.predicates):
                names = tuple(n for n in p.names if n in position)
                constraints.append(Constraint(tuple(position[n] for n in names), _point_test(p, names, known)))
            domains = {j: d.at(stage) for j, d in enumerate(self.block)}
            self._block_cache[key] = solve(domains, constraints)
        return self._block_cache[key]

    def block_count(self, stage: int, context: tuple[int, ...]) -> int:
        """How many different blocks are allowed in `stage` under `context`."""
        return math.prod(len(t.rows) for t in self.block_tables(stage, context))

    def weight(self, table: Table, row: np.ndarray) -> int:
        """How many ways of filling the blocks of the stages whose depth this row decides."""
        total = 1
        for s in self.stages_of(table):
            depth = int(self.depth_choices[s][row[table.variables.index(self.depth_column[s])]])
            total *= self.block_count(s, self.context_of(s, table, row)) ** depth
        return total

    def size(self) -> int:
        """The exact number of architectures: a product over tables of sums over rows."""
        return math.prod(sum(self.weight(t, row) for row in t.rows) for t in self.tables)

    def check(self, name: str) -> None:
        """`UserError` unless every choice of every dimension occurs in some architecture."""
        for table in self.tables:
            for j, c in enumerate(table.variables):
                self._check_used(name, self.columns[c], table.rows[:, j])
        for s in range(self.stages):
            table = next(t for t in self.tables if self.depth_column[s] in t.variables)
            contexts = {self.context_of(s, table, row) for row in table.rows}
            for j, d in enumerate(self.block):
                used = [
                    t.rows[:, t.variables.index(j)]
                    for context in contexts
                    for t in self.block_tables(s, context)
                    if j in t.variables
                ]
                self._check_used(name, Column(d.name, s, 0, d.at(s)), np.concatenate(used))

    def _check_used(self, name: str, column: Column, used: np.ndarray) -> None:
        unused = sorted(set(range(len(column.choices))) - set(used.tolist()))
        if not unused:
            return
        value = column.choices[unused[0]]
        where = f" in stage {column.stage}" if self.stages > 1 and column.stage is not None else ""
        involved = [p for p in self.predicates if column.name in p.names] or list(self.predicates)
        ranges = {n: [value] if n == column.name else self._choices(n, column.stage) for p in involved for n in p.names}
        raise UserError(
            f"space {name!r}: {column.name}={value}{where} fits no architecture: "
            + "; ".join(p.says(ranges) for p in involved)
        )

    def _choices(self, name: str, stage: int | None) -> list[Any]:
        dimension = next(d for d in (*self.network, *self.stage, *self.block) if d.name == name)
        return list(dimension.at(stage or 0))


def _point_test(predicate: Predicate, names: tuple[str, ...], known: dict[str, Any]) -> Callable[..., bool]:
    return lambda *values: predicate.holds({**known, **dict(zip(names, values, strict=True))})


def _path_test(predicate: Predicate, stages: int) -> Callable[..., bool]:
    """Values come name by name, each over all stages (a network dimension repeated)."""
    names = predicate.names
    return lambda *values: predicate.holds(
        {n: tuple(values[i * stages : (i + 1) * stages]) for i, n in enumerate(names)}
    )
