"""A space and sums over its columns as a layered graph: every path is one network, every edge adds its share.

Columns are assigned in their order: the network's, then per stage the stage's own and its block slots one by one. A
*state* is what later steps still need to know of the columns assigned so far: those that a later term, or a rule about
which blocks are allowed, looks at, and for each table of allowed skeletons the class of its prefix (prefixes with the
same completions are one class). The depths of a stage share their work: blocks are assigned while the depth is open,
and after every allowed number of blocks a step offers to stop there. Only where a block's table or rule looks at the
depth itself is the depth assigned first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.terms import FloatArray, Term, Total
from lightning_tas.errors import UserError
from lightning_tas.spaces import SearchSpace
from lightning_tas.spaces.factors import Table
from lightning_tas.spaces.layout import Layout
from lightning_tas.spaces.moves import combinations

IntArray = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
MAX_EDGES = 4_000_000
"""Edges of one step; more means that the terms tie too many columns together."""
UNDECIDED = -1
"""The value of a depth that is not decided yet."""


@dataclass(frozen=True)
class Step:
    """One layer of edges, ascending by `source`. Edge e writes ``codes[row[e]]`` to `columns`; row -1 writes nothing.

    `score` (E,) and `costs` (C, E) are the edges' shares; `first` (states before + 1,) delimits the edges of a source.
    """

    columns: tuple[int, ...]
    codes: npt.NDArray[np.int16]
    source: Indices
    target: Indices
    row: Indices
    score: FloatArray
    costs: IntArray
    first: Indices
    states: int


@dataclass(frozen=True)
class Plan:
    """The steps of a space; there is one state before the first and one after the last."""

    width: int
    steps: tuple[Step, ...]

    def codes(self, rows: Sequence[Indices]) -> npt.NDArray[np.int16]:
        """The codes (N, K) of N paths from the `row` of the edge that each takes in every step."""
        out = np.full((len(rows[0]) if rows else 1, self.width), -1, dtype=np.int16)
        for step, row in zip(self.steps, rows, strict=True):
            writes = np.flatnonzero(row >= 0)
            if len(writes):
                out[writes[:, None], np.asarray(step.columns)] = step.codes[row[writes]]
        return out


def make_plan(space: SearchSpace, score: Total | None, costs: Sequence[Total] = ()) -> Plan:
    """The graph of `space` whose edges carry the shares of `score` (None: zeros) and of the integer `costs`.

    `UserError` for costs that are no whole numbers, for a term over blocks of two slots or beyond the space's columns,
    and for terms that tie so many columns that a step had more than `MAX_EDGES` edges.
    """
    return _Builder(space, score or Total(()), costs).build()


@dataclass(frozen=True)
class _Event:
    """What one step assigns: a skeleton column, the blocks of a slot, or a stage's depth if its blocks end here."""

    kind: str
    stage: int = 0
    at: int = 0  # the column, the slot, or the depth


@dataclass(frozen=True)
class _Share:
    """A term, and which sum it belongs to (0: the score)."""

    sum: int
    term: Term


_Edges = tuple[tuple[int, ...], npt.NDArray[np.int16], Indices, Indices, npt.NDArray[np.bool_]]
"""Columns assigned, codes by row, source and row of every edge, and whether it decides the columns."""


class _Automaton:
    """The classes of prefixes of a table's rows: ``next[k][class, code]`` is the class of the longer prefix, or -1."""

    def __init__(self, table: Table, order: Sequence[int]) -> None:
        places = sorted(range(len(table.variables)), key=lambda j: order.index(table.variables[j]))
        self.variables = [table.variables[j] for j in places]
        sizes = [table.sizes[j] for j in places]
        rows = np.unique(table.rows[:, places].astype(np.int64), axis=0)
        kinds = np.zeros(len(rows), dtype=np.int64)
        self.next: list[IntArray] = []
        for k in reversed(range(len(places))):
            prefixes, number = np.unique(rows[:, :k], axis=0, return_inverse=True)
            after = np.full((len(prefixes), sizes[k]), -1, dtype=np.int64)
            after[number.reshape(-1), rows[:, k]] = kinds
            different, kinds = np.unique(after, axis=0, return_inverse=True)
            kinds = kinds.reshape(-1)
            self.next.insert(0, different)
            rows = prefixes


class _Builder:
    """Works through the events; the states so far are rows over what is kept: columns, and classes of tables."""

    def __init__(self, space: SearchSpace, score: Total, costs: Sequence[Total]) -> None:
        self.layout: Layout = space.layout
        self.name = space.name
        self.number = len(costs)
        self.shares = [_Share(i, term) for i, total in enumerate([score, *costs]) for term in total.terms]
        self.sizes = [len(c.choices) for c in space.columns]
        self.slot_of = {
            start + slot * len(self.layout.block) + j: (s, slot)
            for s, start in enumerate(self.layout.block_start)
            for slot in range(self.layout.max_depth[s])
            for j in range(len(self.layout.block))
        }
        for share in self.shares:
            self._check(share)
        self.late = [bool(self.layout.block) and not self._depth_matters(s) for s in range(self.layout.stages)]
        self.order: list[int] = []
        self.events = list(self._events())
        self._place()
        tables = [t for t in self.layout.tables if len(t.variables) > 1 and not t.free]
        self.automata = [_Automaton(t, self.order) for t in tables]
        self.level = {c: (i, k) for i, a in enumerate(self.automata) for k, c in enumerate(a.variables)}
        self.kept: dict[int, IntArray] = {}
        self.classes = [np.zeros(1, dtype=np.int64) for _ in self.automata]
        self.states = 1

    # --- the order of events and terms --------------------------------------------------------------------------------

    def _check(self, share: _Share) -> None:
        columns, table = share.term.columns, share.term.table
        if any(not 0 <= c < len(self.sizes) for c in columns):
            raise UserError(f"terms: columns {list(columns)} are not all of space {self.name!r}")
        for c, size in zip(columns, table.shape, strict=True):
            padded = self.sizes[c] + 1 if c in self.slot_of else self.sizes[c]
            if size not in (self.sizes[c], padded):
                raise UserError(f"terms: {size} entries for the {self.sizes[c]} choices of column {c}")
        if len({self.slot_of[c] for c in columns if c in self.slot_of}) > 1:
            raise UserError("terms: a term over the blocks of two slots is not additive over blocks")
        if not np.isfinite(table).all():
            raise UserError("terms: a table has entries that are not finite")
        if share.sum and ((np.abs(table) >= 2.0**53) | (table != np.rint(table))).any():
            raise UserError("terms: costs must be whole numbers below 2**53")

    def _depth_matters(self, stage: int) -> bool:
        """Whether a block's table or rule looks at the depth of its stage, or slots beyond it add something."""
        depth = self.layout.depth_column[stage]
        if depth in self.layout.context[stage]:
            return True
        for share in self.shares:
            slot = next((self.slot_of[c] for c in share.term.columns if c in self.slot_of), None)
            if slot is None or slot[0] != stage:
                continue
            if depth in share.term.columns:
                return True
            absent = tuple(-1 if c in self.slot_of else slice(None) for c in share.term.columns)
            if slot[1] >= self.layout.depth_choices[stage][0] and np.any(share.term.table[absent]):
                return True
        return False

    def _events(self) -> Iterable[_Event]:
        layout = self.layout

        def assign(columns: Iterable[int]) -> Iterable[_Event]:
            for c in columns:
                if c not in self.order:
                    self.order.append(c)
                    yield _Event("column", at=c)

        yield from assign(range(len(layout.network)))
        for s in range(layout.stages):
            depth = layout.depth_column[s]
            first = layout.block_start[s] - len(layout.stage)
            seen = set(layout.context[s])
            for share in self.shares:
                if any(self.slot_of.get(c, (-1,))[0] == s for c in share.term.columns):
                    seen.update(c for c in share.term.columns if c not in self.slot_of)
            own = [c for c in range(first, layout.block_start[s]) if c != depth]
            yield from assign([*own, *sorted(seen - {depth})])
            if not self.late[s]:
                yield from assign([depth])
            for slot in range(layout.max_depth[s] if layout.block else 0):
                yield _Event("slot", s, slot)
                if self.late[s] and slot + 1 in layout.depth_choices[s]:
                    yield _Event("stop", s, slot + 1)
            if self.late[s]:
                self.order.append(depth)

    def _place(self) -> None:
        """When every column is assigned (a late depth: at the stage's last stop), and so which terms are due when."""
        self.when = {e.at: i for i, e in enumerate(self.events) if e.kind == "column"}
        slots = {(e.stage, e.at): i for i, e in enumerate(self.events) if e.kind == "slot"}
        for s, depth in enumerate(self.layout.depth_column):
            if self.late[s]:
                self.when[depth] = max(i for i, e in enumerate(self.events) if (e.kind, e.stage) == ("stop", s))
        self.when |= {c: slots[place] for c, place in self.slot_of.items()}
        self.due: list[list[_Share]] = [[] for _ in self.events]
        self.until = dict.fromkeys(self.when, -1)  # the last event that looks at a column
        for share in self.shares:
            place = max((self.when[c] for c in share.term.columns), default=0)
            self.due[place].append(share)
            for c in share.term.columns:
                self.until[c] = max(self.until[c], place)
        for i, event in enumerate(self.events):
            if event.kind == "slot":
                for c in [*self.layout.context[event.stage], self.layout.depth_column[event.stage]]:
                    self.until[c] = max(self.until[c], i)

    # --- building -----------------------------------------------------------------------------------------------------

    def build(self) -> Plan:
        steps = [self._step(i, event) for i, event in enumerate(self.events)]
        alive = np.ones(self.states, dtype=bool)
        for i in reversed(range(len(steps))):
            steps[i], alive = _living(steps[i], alive)
        return Plan(len(self.sizes), tuple(steps))

    def _step(self, i: int, event: _Event) -> Step:
        make = {"column": self._column, "slot": self._slot, "stop": self._stop}[event.kind]
        columns, codes, source, row, decided = make(event)
        if len(source) > MAX_EDGES:
            raise UserError(f"terms: they tie too many columns of space {self.name!r} together: {len(source):,} edges")
        order = np.argsort(source, kind="stable")
        source, row, decided = source[order], row[order], decided[order]
        before = self.states
        values = {c: array[source] for c, array in self.kept.items()}
        picked = np.concatenate([codes, np.full((1, len(columns)), -1, dtype=np.int16)])[row]  # row -1: nothing
        values |= {c: picked[:, j].astype(np.int64) for j, c in enumerate(columns) if event.kind != "stop"}
        if event.kind == "stop":
            depth = columns[0]
            held = values.get(depth, np.full(len(source), UNDECIDED))
            values[depth] = np.where(decided, picked[:, 0], held)
        score, costs = np.zeros(len(source)), np.zeros((self.number, len(source)), dtype=np.int64)
        for share in self._due(i, event):
            amount = _look_up(share.term, values, len(source))
            amount = np.where(decided, amount, 0.0) if event.kind == "stop" else amount
            if share.sum:
                costs[share.sum - 1] += amount.astype(np.int64)
            else:
                score += amount
        target = self._advance(i, event, source, columns, values, decided)
        # Edges into rows that no table allows have no target.
        keep = target >= 0
        source, target, row = source[keep], target[keep], row[keep]
        first = np.searchsorted(source, np.arange(before + 1))
        return Step(columns, codes, source, target, row, score[keep], costs[:, keep], first, self.states)

    def _due(self, i: int, event: _Event) -> list[_Share]:
        """The terms whose last column is assigned here; those of a late depth at each of its stops."""
        if event.kind != "stop":
            return self.due[i]
        return self.due[self.when[self.layout.depth_column[event.stage]]]

    def _column(self, event: _Event) -> _Edges:
        size = self.sizes[event.at]
        codes = np.arange(size, dtype=np.int16)[:, None]
        source = np.repeat(np.arange(self.states), size)
        return (event.at,), codes, source, np.tile(np.arange(size), self.states), np.ones(len(source), dtype=bool)

    def _running(self, stage: int, slot: int) -> npt.NDArray[np.bool_]:
        """The states (S,) in which the network has a block in this slot."""
        depth = self.layout.depth_column[stage]
        if self.late[stage]:
            return self.kept[depth] == UNDECIDED if depth in self.kept else np.ones(self.states, dtype=bool)
        return np.asarray(self.layout.depth_choices[stage][self.kept[depth]] > slot)

    def _slot(self, event: _Event) -> _Edges:
        layout, s = self.layout, event.stage
        start = layout.block_start[s] + event.at * len(layout.block)
        codes = np.array(list(itertools.product(*(range(self.sizes[start + j]) for j in range(len(layout.block))))))
        running = self._running(s, event.at)
        context = np.stack([self.kept[c] for c in layout.context[s]], axis=1) if layout.context[s] else None
        if context is None:
            allowed = np.broadcast_to(self._allowed(s, (), codes), (self.states, len(codes)))
        else:
            different, number = np.unique(context, axis=0, return_inverse=True)
            allowed = np.stack([self._allowed(s, tuple(c), codes) for c in different.tolist()])[number.reshape(-1)]
        source, row = np.nonzero(allowed & running[:, None])
        idle = np.flatnonzero(~running)
        source, row = np.concatenate([source, idle]), np.concatenate([row, np.full(len(idle), -1)])
        columns = tuple(range(start, start + len(layout.block)))
        return columns, codes.astype(np.int16), source, row, np.ones(len(source), dtype=bool)

    def _allowed(self, stage: int, context: tuple[int, ...], codes: IntArray) -> npt.NDArray[np.bool_]:
        """Which combinations of a block's choices (R, J) are allowed under a context that occurs: (R,)."""
        if not self.layout.block_count(stage, context):
            return np.zeros(len(codes), dtype=bool)
        rows = np.asarray(combinations(self.layout.block_tables(stage, context))).reshape(-1, codes.shape[1])
        shape = tuple(codes.max(axis=0) + 1)
        return np.isin(np.ravel_multi_index(tuple(codes.T), shape), np.ravel_multi_index(tuple(rows.T), shape))

    def _stop(self, event: _Event) -> _Edges:
        depth = self.layout.depth_column[event.stage]
        choice = int(np.flatnonzero(self.layout.depth_choices[event.stage] == event.at)[0])
        running = self._running(event.stage, event.at)
        stops = np.flatnonzero(running)
        last = event.at == self.layout.max_depth[event.stage]
        stays = np.flatnonzero(~running) if last else np.arange(self.states)
        source = np.concatenate([stops, stays])
        row = np.concatenate([np.zeros(len(stops), dtype=np.intp), np.full(len(stays), -1)])
        return (depth,), np.array([[choice]], dtype=np.int16), source, row, row == 0

    def _advance(
        self,
        i: int,
        event: _Event,
        source: Indices,
        columns: tuple[int, ...],
        values: dict[int, IntArray],
        decided: npt.NDArray[np.bool_],
    ) -> Indices:
        """The states that the edges lead to (-1: to none), which become the builder's."""
        classes = [array[source] for array in self.classes]
        possible = np.ones(len(source), dtype=bool)
        for c in columns:
            if c in self.level:
                automaton, k = self.level[c]
                # Edges that decide nothing may be in a class of longer prefixes already: they look nothing up.
                before, chosen = (np.where(decided, array, 0) for array in (classes[automaton], values[c]))
                found = self.automata[automaton].next[k][before, chosen]
                classes[automaton] = np.where(decided, found, classes[automaton])
                possible &= classes[automaton] >= 0
        kept = {c: array for c, array in values.items() if self.until.get(c, -1) > i or self._open(event, c, i)}
        for c in kept:
            if self._open(event, c, i) and self._forgotten(c):
                kept[c] = np.minimum(kept[c], 0)  # only whether it is decided matters
        keys = np.zeros(len(source), dtype=np.int64)
        for array in [*kept.values(), *classes]:
            array = array[possible]
            size = int(array.max(initial=0)) + 2
            _, keys_now = np.unique(keys[possible] * size + array + 1, return_inverse=True)
            keys[possible] = keys_now.reshape(-1)
        _, at, number = np.unique(keys[possible], return_index=True, return_inverse=True)
        self.kept = {c: array[possible][at] for c, array in kept.items()}
        self.classes = [array[possible][at] for array in classes]
        self.states = len(at)
        target = np.full(len(source), -1, dtype=np.intp)
        target[possible] = number.reshape(-1)
        return target

    def _open(self, event: _Event, column: int, i: int) -> bool:
        """Whether `column` is a late depth whose stage is not over after event `i`."""
        if event.kind == "column" or column != self.layout.depth_column[event.stage] or not self.late[event.stage]:
            return False
        return i < self.when[column]

    def _forgotten(self, depth: int) -> bool:
        """Whether nothing looks at a late depth once its stage is over."""
        return self.until[depth] <= self.when[depth]


def _look_up(term: Term, values: dict[int, IntArray], number: int) -> FloatArray:
    """The term's entry for every edge; codes of -1 meet the end of their axes."""
    flat = np.zeros(number, dtype=np.intp)
    for column, size in zip(term.columns, term.table.shape, strict=True):
        flat = flat * size + values[column] % size
    return np.asarray(term.table.ravel()[flat], dtype=np.float64)


def _living(step: Step, alive: npt.NDArray[np.bool_]) -> tuple[Step, npt.NDArray[np.bool_]]:
    """The step without edges to states of no completion, and which states before it have one."""
    keep = alive[step.target]
    before = np.zeros(len(step.first) - 1, dtype=bool)
    before[step.source[keep]] = True
    if keep.all():
        return step, before
    source = step.source[keep]
    first = np.searchsorted(source, np.arange(len(before) + 1))
    target, row, score, costs = step.target[keep], step.row[keep], step.score[keep], step.costs[:, keep]
    return Step(step.columns, step.codes, source, target, row, score, costs, first, step.states), before
