"""Draws of members within bounds by any product of weights: the sum-product over the graph of what is within.

`Members` merges partial networks of equal costs into labels; the labels and the ways between them are a graph whose
paths are the members, one each. A *law* gives every choice a weight (a row of a step, see `Plan`), and a member's
weight is the product of its choices'. The weight of all completions of a label is a sum over its ways, so one pass back
makes draws exact by one walk forward, with no rejection however narrow the bounds are. Single members may be left out:
a path that is none of them leaves them at some step, and the ways to leave are few and known. All sums are of
non-negative numbers, so a set is empty if and only if its weight is zero.

Where costs have too many values to be told apart they are rounded, and the bounds are widened by the most that rounding
can err: then every member is in the graph, and some of its paths are none, to be checked (`exact` is false).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import Bounds
from lightning_tas.additive.members import Members, TooMany, ranges
from lightning_tas.additive.plan import Indices
from lightning_tas.additive.terms import FloatArray, Term, Total
from lightning_tas.spaces import SearchSpace

Codes = npt.NDArray[np.int16]
MAX_WAYS = 250_000
"""Ways between labels: a pass takes about 5 ns for each."""
FINEST = 1 << 14
"""Values to which costs are rounded where they are too many; fewer, by halves, until there are few enough ways."""


class Paths:
    """The members of a space within bounds, as paths. `exact`: no path is anything else.

    members: their graph. Rows of all steps are numbered through; row -1 of a step is the last of its rows.
    """

    def __init__(self, members: Members, exact: bool = True) -> None:
        self.space, self.plan, self.exact = members.space, members.plan, exact
        self.first: list[Indices] = []
        self.target: list[Indices] = []
        self.row: list[Indices] = []
        self._link(members)
        sizes = [len(step.codes) + 1 for step in self.plan.steps]
        self.offset = np.concatenate([[0], np.cumsum(sizes)])
        rows = [np.where(r < 0, size - 1, r) + at for r, size, at in zip(self.row, sizes, self.offset, strict=False)]
        self.ends = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        self.flat = np.concatenate(rows)
        self.degree = [int(np.diff(first).max(initial=0)) for first in self.first]
        self._genes()

    @classmethod
    def within(
        cls,
        space: SearchSpace,
        costs: Mapping[str, Total],
        bounds: Bounds | None = None,
        ways: int = MAX_WAYS,
        finest: int = FINEST,
    ) -> Paths:
        """The paths of all members within `bounds`, with costs rounded where they need more than `ways`."""
        whole = all(np.array_equal(term.table, np.rint(term.table)) for total in costs.values() for term in total.terms)
        if whole:
            try:
                return cls(Members(space, costs, bounds, ways))
            except TooMany:
                pass
        values = finest
        while True:
            try:
                rounded = {name: _rounded(space, total, bounds, name, values) for name, total in costs.items()}
                coarse = {name: total for name, (total, _) in rounded.items()}
                return cls(Members(space, coarse, {name: b for name, (_, b) in rounded.items()}, ways), exact=False)
            except TooMany:
                if values == 1:
                    raise
                values //= 2

    def _link(self, members: Members) -> None:
        """The ways of each step by their source, without those that lead nowhere."""
        alive = np.ones(1, dtype=bool) if members.total else np.zeros(1, dtype=bool)
        for layer in reversed(members.layers):
            target = np.repeat(np.arange(len(layer.start) - 1), np.diff(layer.start))
            number = np.cumsum(alive) - 1
            keep = np.flatnonzero(alive[target]) if len(target) else np.zeros(0, dtype=np.intp)
            keep = keep[np.argsort(layer.parent[keep], kind="stable")]
            parent = layer.parent[keep].astype(np.intp)
            alive = np.zeros(layer.sources, dtype=bool)
            alive[parent] = True
            starts = np.flatnonzero(np.diff(parent, prepend=-1))
            self.first.insert(0, np.append(starts, len(parent)))
            self.target.insert(0, number[target[keep]])
            self.row.insert(0, layer.row[keep].astype(np.intp))

    def _genes(self) -> None:
        """For every numbered row the columns and codes that it writes, padded with a column that weighs 1."""
        width, steps = self.plan.width, self.plan.steps
        most = max((len(step.columns) for step in steps), default=1)
        self.column = np.full((int(self.offset[-1]), most), width, dtype=np.intp)
        self._code = np.zeros((int(self.offset[-1]), most), dtype=np.intp)
        for at, step in zip(self.offset, steps, strict=False):
            rows = slice(at, at + len(step.codes))
            self.column[rows, : len(step.columns)] = step.columns
            self._code[rows, : len(step.columns)] = step.codes
        self.choices = [len(column.choices) for column in self.space.columns]
        # A row's number is that of its codes, all combinations being in order; a step that ends a stage has one row.
        self._stride = np.zeros((width, len(steps)), dtype=np.intp)
        self._head = np.array([step.columns[0] for step in steps], dtype=np.intp)
        self._stop = np.full(len(steps), -1)
        for t, step in enumerate(steps):
            if len(step.codes) < self.choices[step.columns[0]]:
                self._stop[t] = step.codes[0, 0]
            else:
                sizes = [self.choices[c] for c in step.columns]
                self._stride[list(step.columns), t] = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]

    @cached_property
    def uniform(self) -> FloatArray:
        """Weights of choices (columns, most choices): one over their number, zeros beyond."""
        sizes = np.asarray(self.choices)[:, None]
        return np.where(np.arange(max(self.choices)) < sizes, 1.0 / sizes, 0.0)

    def law(self, genes: FloatArray) -> FloatArray:
        """Weights of all rows: products of the weights of choices, `genes` (columns, most choices)."""
        padded = np.concatenate([genes, np.ones((1, genes.shape[1]))])
        return np.asarray(padded[self.column, self._code].prod(axis=1))

    def rows_of(self, codes: Codes) -> Indices:
        """The row in every step (N, steps) of members' codes (N, columns)."""
        rows = codes.astype(np.intp) @ self._stride
        head = codes[:, self._head]
        return np.where(self._stop < 0, np.where(head < 0, -1, rows), np.where(head == self._stop, 0, -1))

    def codes(self, rows: Indices) -> Codes:
        """The codes (N, columns) of paths by their rows (N, steps)."""
        return self.plan.codes(list(rows.T))


class Conditional:
    """The members of `paths` by the weights of a law, given that they are none of `avoid` (codes).

    weight: of all of them together; zero if and only if there is none.
    """

    def __init__(self, paths: Paths, law: FloatArray, avoid: Sequence[Codes] = ()) -> None:
        self.paths, self._law = paths, law
        self._ways, self._after = self._pass(law)
        self._avoid = paths.rows_of(np.stack(avoid)) if len(avoid) else np.zeros((0, len(paths.row)), dtype=np.intp)
        self.weight = float(self._after[0][0]) if len(self._after[0]) else 0.0
        self._exits: list[tuple[FloatArray, Indices, int, int]] = []  # weights, ways, step, an avoided one before
        if self.weight and self._met().any():
            self._leave()
            self._sums = np.array([part[0].sum() for part in self._exits])
            self.weight = float(self._sums.sum())
        else:
            self._avoid = self._avoid[:0]

    def _pass(self, law: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """Every way's weight times that of what follows, and per step the weight of all completions of each label."""
        paths = self.paths
        ways = law[paths.flat]
        after: list[FloatArray] = [np.ones(1)]
        for t in reversed(range(len(paths.row))):
            part = ways[paths.ends[t] : paths.ends[t + 1]]
            part *= after[-1][paths.target[t]]
            after.append(np.add.reduceat(part, paths.first[t][:-1]) if len(part) else np.zeros(0))
        return ways, after[::-1]

    def _met(self) -> npt.NDArray[np.bool_]:
        """Which of the avoided ones this law gives any weight."""
        sizes = np.diff(self.paths.offset)
        at = np.where(self._avoid < 0, sizes - 1, self._avoid) + self.paths.offset[:-1]
        return np.asarray((self._law[at] > 0).all(axis=1))

    def _leave(self) -> None:
        """All ways from a beginning of an avoided member to what no avoided one begins with."""
        paths, nodes = self.paths, [(0, 1.0, list(range(len(self._avoid))))]
        for t in range(len(paths.row)):
            further = []
            for label, before, members in nodes:
                begin, end = paths.first[t][label], paths.first[t][label + 1]
                rows = paths.row[t][begin:end].tolist()
                weights = before * self._ways[paths.ends[t] + begin : paths.ends[t] + end]
                by_row: dict[int, list[int]] = {}
                for m in members:
                    by_row.setdefault(int(self._avoid[m, t]), []).append(m)
                for row, those in by_row.items():
                    if row not in rows:
                        continue
                    i = rows.index(row)
                    weights[i] = 0.0
                    chance = before * float(self._law[paths.flat[paths.ends[t] + begin + i]])
                    if chance:
                        further.append((int(paths.target[t][begin + i]), chance, those))
                if weights.any():
                    self._exits.append((weights, np.arange(begin, end), t, members[0]))
            nodes = further

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """Codes (n, columns) of independent draws; there must be any."""
        assert self.weight > 0, "nothing to draw from"
        paths, steps = self.paths, len(self.paths.row)
        uniform = rng.random((n, steps + 1))
        rows = np.empty((n, steps), dtype=np.intp)
        label, begun = np.zeros(n, dtype=np.intp), np.zeros(n, dtype=np.intp)
        if len(self._avoid):
            chosen = _pick(np.broadcast_to(self._sums, (n, len(self._sums))), uniform[:, -1])
            for i, e in enumerate(chosen.tolist()):
                weights, ways, step, member = self._exits[e]
                left = int(ways[_pick(weights[None], uniform[i : i + 1, step])[0]])
                rows[i, :step], rows[i, step] = self._avoid[member, :step], paths.row[step][left]
                label[i], begun[i] = paths.target[step][left], step + 1
        for t in range(int(begun.min(initial=steps)), steps):
            at = np.flatnonzero(begun <= t)
            first = paths.first[t]
            low, high = first[label[at]], first[label[at] + 1]
            ways = low[:, None] + np.arange(paths.degree[t])
            there = ways < high[:, None]
            ways = np.where(there, ways, low[:, None])
            weights = np.where(there, self._ways[paths.ends[t] + ways], 0.0)
            way = ways[np.arange(len(at)), _pick(weights, uniform[at, t])]
            rows[at, t], label[at] = paths.row[t][way], paths.target[t][way]
        return paths.codes(rows)

    def count(self) -> float:
        """How many members have any weight, avoided ones among them; exact below 2**53."""
        return float(self._pass((self._law > 0).astype(np.float64))[1][0].sum())

    def all(self) -> tuple[Codes, FloatArray]:
        """The codes (N, columns) and weights (N,) of all members of any weight but the avoided; for few of them."""
        paths = self.paths
        label, weight = np.zeros(1, dtype=np.intp), np.ones(1)
        rows = np.zeros((1, 0), dtype=np.intp)
        for t in range(len(paths.row)):
            low, high = paths.first[t][label], paths.first[t][label + 1]
            parent = np.repeat(np.arange(len(label)), high - low)
            way = np.arange(len(parent)) + np.repeat(low - (np.cumsum(high - low) - (high - low)), high - low)
            live = self._ways[paths.ends[t] + way] > 0
            parent, way = parent[live], way[live]
            weight = weight[parent] * self._law[paths.flat[paths.ends[t] + way]]
            rows = np.concatenate([rows[parent], paths.row[t][way][:, None]], axis=1)
            label = paths.target[t][way]
        new = ~(rows[:, None] == self._avoid).all(axis=2).any(axis=1)
        return paths.codes(rows[new]), weight[new]


def _pick(weights: FloatArray, uniform: FloatArray) -> Indices:
    """One column of each row of `weights` (n, k), with probability in proportion to it."""
    upto = np.cumsum(weights, axis=1)
    wanted = np.minimum(uniform * upto[:, -1], np.nextafter(upto[:, -1], 0.0))
    return np.asarray((upto <= wanted[:, None]).sum(axis=1))


def _rounded(
    space: SearchSpace, total: Total, bounds: Bounds | None, name: str, values: int
) -> tuple[Total, tuple[float, float]]:
    """The sum in whole units of the `values`-th part of its range, and bounds that every member within keeps."""
    low, high = (bounds or {}).get(name, (-np.inf, np.inf))
    least, most = ranges(space, total)
    unit = (most - least) / values or 1.0  # of a sum that all networks share, any unit
    whole = Total(tuple(Term(term.columns, np.rint(term.table / unit)) for term in total.terms))
    error = total + whole.scaled(-unit)
    under, over = ranges(space, error)
    slack = 1e-9 * max(abs(least), abs(most))  # of floating point, in what is checked anyhow
    return whole, (np.floor((low - over - slack) / unit), np.ceil((high - under + slack) / unit))
