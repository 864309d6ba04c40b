"""Where the slices of a supernet end, layer by layer and choice by choice, and sums over the layers of a network.

All weights are shared by leading slices: a sub-network takes the first rows and columns of every matrix (of queries,
keys and values each its first rows), and how many is a function of a few columns of its code: widths of the network
and of the layer's stage, and the block's own choices. So whatever is computed per slice is a small table per layer, and
the sum over the layers of a network is a sum of table entries, for any number of codes at once.

Shapes: N codes, K columns of the space; a layer's table has one axis for each column that it depends on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_tas.additive.terms import FloatArray, Term, Total
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.families import RULES
from lightning_tas.proxies.roles import NORM, Layer
from lightning_tas.proxies.slices import prefix
from lightning_tas.spaces import SearchSpace

IntArray = npt.NDArray[np.int64]
_POOL = re.compile(r"(?:^|\.)pools\.(\d+)\.")


@dataclass(frozen=True)
class Cut:
    """Where a layer's slices end: at `rows` and `ends` (columns of the matrix), flat over the choices of `columns`."""

    columns: tuple[int, ...]
    shape: tuple[int, ...]
    rows: IntArray
    ends: IntArray


class Cuts:
    """The slices of a space's networks in a network that holds all of them, `widest`."""

    def __init__(self, space: SearchSpace) -> None:
        if space.family not in RULES:
            raise UserError(
                f"mode: 'inherited' needs a family whose slices are known ({', '.join(RULES)}), but {space.name!r} is "
                f"of family {space.family!r}; valid: 'exact'"
            )
        self.space, self._rules = space, RULES[space.family]
        self._choices = [column.choices for column in space.columns]
        self._names = [column.name for column in space.columns]
        self._stage = [self._of_stage(s) for s in range(space.stages)]
        self._depth = [self._column("depth", s) for s in range(space.stages)]
        # The place of every block of the widest network: (stage, slot).
        self._places = [(s, b) for s, c in enumerate(self._depth) for b in range(self._choices[c][-1])]

    def _of_stage(self, stage: int) -> tuple[int, ...]:
        return tuple(
            i
            for i, c in enumerate(self.space.columns)
            if c.block is None and c.name != "depth" and c.stage in (None, stage)
        )

    def _column(self, name: str, stage: int) -> int:
        return next(i for i in range(len(self._names)) if self._names[i] == name and self._at(i) == (stage, None))

    def _at(self, column: int) -> tuple[int | None, int | None]:
        return self.space.columns[column].stage, self.space.columns[column].block

    def _of_block(self, stage: int, slot: int) -> tuple[int, ...]:
        return tuple(i for i in range(len(self._names)) if self._at(i) == (stage, slot))

    def cut(self, layer: Layer) -> Cut:
        """The slices of a layer of the widest network."""
        pool = _POOL.search(layer.name)
        if layer.block is not None and layer.block >= 0:
            stage, slot = self._places[layer.block]
            columns = (*self._stage[stage], *self._of_block(stage, slot))
        elif pool is not None:
            stage = int(pool.group(1))
            columns = tuple(dict.fromkeys((*self._stage[stage], *self._stage[stage + 1])))
        else:
            stage = 0 if layer.role == "patch_embed" else self.space.stages - 1
            columns = self._stage[stage]
        shape = tuple(len(self._choices[c]) for c in columns)
        weight = layer.module.weight
        assert isinstance(weight, Tensor)
        found = [
            self._ends(layer.role, self._seen(columns, picked, stage), self._seen(columns, picked, stage + 1), weight)
            for picked in itertools.product(*(self._choices[c] for c in columns))
        ]
        rows, ends = np.asarray(found, dtype=np.int64).reshape(-1, 2).T
        return Cut(columns, shape, rows, ends)

    def _seen(self, columns: Sequence[int], picked: Sequence[Any], stage: int) -> dict[str, Any]:
        """The choices by name, as a stage sees them."""
        pairs = zip(columns, picked, strict=True)
        return {self._names[c]: value for c, value in pairs if self._at(c)[0] in (None, stage)}

    def _ends(self, role: str, own: Mapping[str, Any], after: Mapping[str, Any], weight: Tensor) -> tuple[int, int]:
        """(rows, columns) of the slice, of the two-dimensional form that `matrix` gives."""
        rows, columns = weight.shape[0], weight[0].numel()
        width = _width(own)
        if role == NORM:
            return width, 1
        if role == "patch_embed":
            return width, columns
        if role == "head":
            return rows, width
        if role == "pool_conv":
            return _width(after), columns
        if role == "pool_fc":
            return _width(after), width
        if role in ("qkv", "proj"):
            queries = self._rules.query_width(width, int(own["num_heads"]))
            return (queries, width) if role == "qkv" else (width, queries)
        hidden = int(own["mlp_ratio"] * width)
        return (hidden, width) if role == "fc1" else (width, hidden)

    def sums(self, layer: Layer, values: Tensor) -> FloatArray:
        """The sum of `values` over every slice, by 2-D prefix sums in float64.

        values: shaped like the layer's weight, or like its bias, of which slices take as many entries as rows.
        """
        cut = self.cut(layer)
        matrix = folded(layer, values).double().sum(0)
        rows, row = np.unique(cut.rows, return_inverse=True)
        ends, end = np.unique(cut.ends if values.ndim > 1 else np.ones_like(cut.ends), return_inverse=True)
        return prefix(matrix, rows.tolist(), ends.tolist())[row, end].reshape(cut.shape)

    def each(self, layer: Layer, values: Sequence[Tensor], function: Callable[..., Tensor]) -> FloatArray:
        """``function`` of every different slice of `values`, which are shaped like the layer's weight.

        It is called once, with a list of slices, (rows, columns) each, for each of `values`, and gives (slices,).
        """
        cut = self.cut(layer)
        different, which = np.unique(np.stack([cut.rows, cut.ends], axis=1), axis=0, return_inverse=True)
        parts = []
        for value in values:
            matrix = folded(layer, value)
            parts.append([matrix[:, :r, :c].flatten(0, 1) for r, c in different.tolist()])
        found: FloatArray = function(*parts).cpu().numpy()
        return found[which.reshape(-1)].reshape(cut.shape)

    def total(self, tables: Mapping[Layer, FloatArray]) -> Total:
        """The sum over a network's layers of their entries in `tables`."""
        outside: dict[tuple[int, ...], FloatArray] = {}
        blocks = self.by_place(tables)
        for layer, table in tables.items():
            if layer.block is None or layer.block < 0:
                columns = self.cut(layer).columns
                outside[columns] = outside[columns] + table if columns in outside else table
        terms = [Term(columns, table) for columns, table in outside.items()]
        for stage in range(self.space.stages):
            terms += self._stage_terms(stage, {slot: table for (s, slot), table in blocks.items() if s == stage})
        return Total(tuple(terms))

    def by_place(self, tables: Mapping[Layer, FloatArray]) -> dict[tuple[int, int], FloatArray]:
        """Sums of the tables of every block's layers, by (stage, slot)."""
        blocks: dict[tuple[int, int], FloatArray] = {}
        for layer, table in tables.items():
            if layer.block is not None and layer.block >= 0:
                place = self._places[layer.block]
                blocks[place] = blocks[place] + table if place in blocks else table
        return dict(sorted(blocks.items()))

    def slot_term(self, stage: int, slot: int, table: FloatArray) -> Term:
        """What the block of a slot contributes; 0 in slots beyond the depth where blocks have choices of their own."""
        own, shared = self._of_block(stage, slot), self._stage[stage]
        return Term((*shared, *own), np.pad(table, [(0, 0)] * len(shared) + [(0, 1)] * len(own)))

    def depths(self, codes: npt.NDArray[np.integer[Any]], stage: int) -> IntArray:
        """How many blocks the networks of codes (N, K) have in a stage, (N,)."""
        column = self._depth[stage]
        return np.asarray(self._choices[column], dtype=np.int64)[codes[:, column]]

    def _stage_terms(self, stage: int, tables: Mapping[int, FloatArray]) -> list[Term]:
        """One term a block; or one a stage, where blocks have no choices of their own and only their number counts."""
        if not tables:
            return []
        if self._of_block(stage, 0):
            return [self.slot_term(stage, slot, table) for slot, table in tables.items()]
        depth = self._depth[stage]
        upto = np.cumsum([tables[slot] for slot in range(len(tables))], axis=0)
        by_depth = np.stack([upto[d - 1] for d in self._choices[depth]], axis=-1)
        return [Term((*self._stage[stage], depth), by_depth)]


def _width(seen: Mapping[str, Any]) -> int:
    """Channels of the tokens, as `families.widths` has it."""
    return int(seen["embed_dim"] if "embed_dim" in seen else seen["base_dim"] * seen["num_heads"])


def folded(layer: Layer, values: Tensor) -> Tensor:
    """A tensor shaped like the weight or bias as (parts, rows, columns); slices are ``[:, :rows, :columns]``."""
    values = values[:, None] if values.ndim == 1 else values
    if layer.role == "qkv":
        return values.unflatten(0, (3, -1))  # stand-alone weights have all queries, then keys, then values
    return values.flatten(1)[None]


def widest(space: SearchSpace) -> Architecture:
    """The architecture of all greatest choices, whether or not the space's predicates allow it."""
    return SearchSpace(space.name, space.family, space.dimensions, (), space.stages).largest()
