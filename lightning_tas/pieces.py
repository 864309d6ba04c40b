"""The pieces that networks of a space are made of, and sums over them.

What is before the first block, each block, what joins two stages and what follows the last block: how large a piece is
depends on a few choices only. So whatever is measured piece by piece, on a few networks that together show every piece
there is, gives the sum for any network of the space as a sum of table entries (a `Total` over codes).

A piece's *key* says which choices made it: ``("stem", codes)``, ``("block", stage, codes, codes of its own choices)``,
``("join", stage before, codes)``, ``("head", codes)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from lightning_tas.additive import Term, Total
from lightning_tas.errors import UserError
from lightning_tas.proxies.roles import block_names
from lightning_tas.spaces import SearchSpace
from lightning_tas.spaces.moves import combinations

Codes = npt.NDArray[np.int16]
Key = tuple[Any, ...]
INSIDE = ("depth", "mlp_ratio")
"""Choices that shape blocks and nothing outside of them."""


class Pieces:
    """The pieces of the networks of `space`."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._layout = layout = space.layout
        columns = space.columns
        self._own = len(layout.block)
        # The columns that decide a stage's blocks besides their own, and those that its surroundings look at.
        self._blocks, self._around = (
            [
                tuple(c for c in layout.skeleton if columns[c].stage in (None, s) and columns[c].name not in without)
                for s in range(space.stages)
            ]
            for without in (INSIDE[:1], INSIDE)
        )
        self._joins = [tuple(dict.fromkeys((*a, *b))) for a, b in itertools.pairwise(self._around)]

    def keys(self, row: Codes) -> list[Key]:
        """The pieces of the member of codes `row` (columns,), in order of execution."""
        codes = row.tolist()

        def at(columns: Sequence[int]) -> tuple[int, ...]:
            return tuple(codes[c] for c in columns)

        found: list[Key] = [("stem", at(self._around[0]))]
        for s, start in enumerate(self._layout.block_start):
            for slot in range(self.depths(row)[s]):
                begin = start + slot * self._own
                found.append(("block", s, at(self._blocks[s]), tuple(codes[begin : begin + self._own])))
            found.append(
                ("join", s, at(self._joins[s])) if s + 1 < self.space.stages else ("head", at(self._around[s]))
            )
        return found

    def depths(self, row: Codes) -> list[int]:
        """The number of blocks per stage."""
        choices, places = self._layout.depth_choices, self._layout.depth_column
        return [int(depths[row[c]]) for depths, c in zip(choices, places, strict=True)]

    def examples(self, deep: bool) -> list[Codes]:
        """Members that together show every piece, few of them, among equals those of most or of fewest blocks."""
        sign = -1 if deep else 1
        rows = {row.tobytes(): row for row in self._candidates(sign)}.values()
        ordered = sorted(rows, key=lambda row: (sign * sum(self.depths(row)), row.tolist()))
        shown = [set(self.keys(row)) for row in ordered]
        missing: set[Key] = set().union(*shown)
        chosen = []
        while missing:
            best = max(range(len(ordered)), key=lambda i: len(shown[i] & missing))
            chosen.append(ordered[best])
            missing -= shown[best]
        return chosen

    def _candidates(self, sign: int) -> Iterator[Codes]:
        """For every combination of choices that shapes a piece some member that has it."""
        layout = self._layout
        for s in range(self.space.stages):
            context = {*self._blocks[s], *layout.context[s], layout.depth_column[s]}
            for row in self._members(context, sign):
                blocks = len(combinations(layout.block_tables(s, tuple(row[layout.context[s]].tolist()))))
                for first in range(0, blocks, self.depths(row)[s]):
                    yield self._filled(row, first)
        for columns in self._joins:
            for row in self._members(set(columns), sign):
                yield self._filled(row, 0)

    def _members(self, columns: set[int], sign: int) -> Iterator[Codes]:
        """A row for every allowed combination of choices in skeleton `columns`, its blocks not yet chosen.

        The depths are, as far as they are free, the least (`sign` 1) or the greatest (-1).
        """
        layout, options = self._layout, []
        for table in layout.tables:
            depth = np.zeros(len(table.rows), dtype=np.int64)
            for s in layout.stages_of(table):
                depth += layout.depth_choices[s][table.rows[:, table.variables.index(layout.depth_column[s])]]
            rows = table.rows[np.argsort(sign * depth, kind="stable")]
            among = [j for j, c in enumerate(table.variables) if c in columns]
            _, first = np.unique(rows[:, among], axis=0, return_index=True)
            options.append([(table.variables, rows[i]) for i in first])
        for picked in itertools.product(*options):
            row = np.full(len(self.space.columns), -1, dtype=np.int16)
            for variables, codes in picked:
                row[list(variables)] = codes
            yield row

    def _filled(self, row: Codes, first: int) -> Codes:
        """`row` with blocks that run through all allowed ones, from the `first` on."""
        layout, row = self._layout, row.copy()
        for s, depth in enumerate(self.depths(row)):
            blocks = combinations(layout.block_tables(s, tuple(row[layout.context[s]].tolist())))
            turn = [blocks[(first + slot) % len(blocks)] for slot in range(depth)]
            row[layout.slots(s)][: depth * self._own] = np.array(turn, dtype=np.int16).reshape(-1)
        return row

    def repeated(self, row: Codes) -> Codes:
        """The member whose blocks of the first stage are all like the first one of `row`."""
        row = row.copy()
        slots = row[self._layout.slots(0)][: self.depths(row)[0] * self._own].reshape(-1, max(1, self._own))
        slots[:] = slots[:1]
        return row

    def total(self, values: Mapping[Key, float]) -> Total:
        """The sum of `values` over the pieces of a network; pieces that no member has count nothing."""
        tables: dict[tuple[int, ...], npt.NDArray[np.float64]] = {}

        def add(columns: tuple[int, ...], entries: Iterable[tuple[tuple[int, ...], float]], pad: int = 0) -> None:
            shape = [len(self.space.columns[c].choices) for c in columns]
            shape[len(shape) - pad :] = [size + 1 for size in shape[len(shape) - pad :]]
            table = tables.setdefault(columns, np.zeros(shape))
            for codes, value in entries:
                table[codes] += value

        add(self._around[0], [(key[1], v) for key, v in values.items() if key[0] == "stem"])
        for s, start in enumerate(self._layout.block_start):
            blocks = [(key[2], key[3], v) for key, v in values.items() if key[:2] == ("block", s)]
            if self._own:  # one term a slot, whose unused code -1 meets the zeros at the end
                for slot in range(self._layout.max_depth[s]):
                    begin = start + slot * self._own
                    columns = (*self._blocks[s], *range(begin, begin + self._own))
                    add(columns, [((*codes, *own), v) for codes, own, v in blocks], self._own)
            else:
                depths = list(enumerate(self._layout.depth_choices[s].tolist()))
                columns = (*self._blocks[s], self._layout.depth_column[s])
                add(columns, [((*codes, d), v * depth) for codes, _, v in blocks for d, depth in depths])
            if s + 1 < self.space.stages:
                add(self._joins[s], [(key[2], v) for key, v in values.items() if key[:2] == ("join", s)])
        add(self._around[-1], [(key[1], v) for key, v in values.items() if key[0] == "head"])
        return Total(tuple(Term(columns, table) for columns, table in tables.items()))


def piece_blocks(net: nn.Module, depths: Sequence[int]) -> dict[int, nn.Module]:
    """The blocks of a stand-alone network with so many blocks per stage, by the number of the piece that they are.

    `UserError` for a network that does not name its blocks ``blocks.<number>``.
    """
    modules = [net.get_submodule(name) for name in block_names(net)]
    if len(modules) != sum(depths):
        raise UserError(
            f"arch: {len(modules)} modules of {type(net).__name__} are named blocks.<number>, but it has "
            f"{sum(depths)} blocks; what is measured block by block needs their names"
        )
    stage = [s for s, depth in enumerate(depths) for _ in range(depth)]
    return {1 + i + s: module for i, (s, module) in enumerate(zip(stage, modules, strict=True))}


@contextmanager
def watched(net: nn.Module, depths: Sequence[int], begin: Callable[[int], None]) -> Iterator[None]:
    """While it lasts, `begin(i)` is called when a forward pass of the stand-alone `net` reaches its piece i.

    The stem, piece 0, begins with the pass itself and is not announced. Errors as of `piece_blocks`.
    """
    blocks = piece_blocks(net, depths)
    handles = [block.register_forward_pre_hook(_announce(begin, piece)) for piece, block in blocks.items()]
    # What follows a stage begins where its last block ends.
    handles += [b.register_forward_hook(_announce(begin, i + 1)) for i, b in blocks.items() if i + 1 not in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _announce(begin: Callable[[int], None], piece: int) -> Callable[..., None]:
    return lambda *_: begin(piece)
