"""Terms of a number that is known as a function of codes only: found by differences, and verified.

A number such as a parameter count adds, per block, what depends on the block's choices and on the network's and the
stage's; and what depends on widths and depths of neighbouring stages. Whether that is so is not assumed: the sum of the
tables found must equal the function on random networks, exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.terms import FloatArray, Term, Total
from lightning_tas.errors import UserError
from lightning_tas.spaces import SearchSpace

Function = Callable[[npt.NDArray[np.int16]], npt.NDArray[Any]]
CHECKED = 512
"""Random networks on which the terms must equal the function."""
MAX_ENTRIES = 2_000_000


def derive_terms(space: SearchSpace, function: Function, name: str) -> Total:
    """The sum of tables that equals `function`, which maps codes (N, K) to whole numbers (N,).

    function: also asked for combinations that the space's predicates forbid. name: of the number, for messages.
    `UserError` where no such sum is found: it is not additive over blocks and neighbouring stages.
    """
    probe = _Probe(space, function)
    terms = [*probe.blocks(), *probe.skeleton()]
    total = Total(tuple(_reduced(term) for term in terms if term.table.any()))
    codes = np.concatenate([space.sample_codes(0, CHECKED), space.encode([space.smallest(), space.largest()])])
    if not np.array_equal(total(codes), np.asarray(function(codes), dtype=np.float64)):
        raise UserError(
            f"{name}: not a sum over the blocks and neighbouring stages of space {space.name!r}, so no exact search "
            "or count knows it"
        )
    return total


class _Probe:
    """Evaluates the function at networks that differ from one reference (all first choices) in few columns."""

    def __init__(self, space: SearchSpace, function: Function) -> None:
        self.space, self.function, self.layout = space, function, space.layout
        self.sizes = [len(c.choices) for c in space.columns]
        self.network = list(range(len(self.layout.network)))

    def stage_columns(self, stage: int) -> list[int]:
        """The stage's own columns but its depth."""
        end = self.layout.block_start[stage]
        own = range(end - len(self.layout.stage), end)
        return [c for c in own if c != self.layout.depth_column[stage]]

    def values(self, columns: Sequence[int], deep: bool) -> FloatArray:
        """The function over all choices of `columns`, others being first choices; `deep`: depths the greatest."""
        shape = tuple(self.sizes[c] for c in columns)
        if np.prod(shape, dtype=np.float64) > MAX_ENTRIES:
            raise UserError(f"terms: {'x'.join(map(str, shape))} choices of space {self.space.name!r} are too many")
        rows = np.array(list(itertools.product(*(range(n) for n in shape))), dtype=np.int16)
        rows = rows.reshape(-1, len(shape)) if shape else np.zeros((1, 0), dtype=np.int16)
        codes = np.zeros((len(rows), len(self.sizes)), dtype=np.int16)
        if deep:
            codes[:, self.layout.depth_column] = [len(d) - 1 for d in self.layout.depth_choices]
        codes[:, list(columns)] = rows
        for s, column in enumerate(self.layout.depth_column):
            slots = np.arange(self.layout.max_depth[s]).repeat(len(self.layout.block))
            depth = self.layout.depth_choices[s][codes[:, column]]
            codes[:, self.layout.slots(s)][slots >= depth[:, None]] = -1
        return np.asarray(self.function(codes), dtype=np.float64).reshape(shape)

    def blocks(self) -> Iterator[Term]:
        """What a block of other than first choices adds, slot by slot; nothing beyond the depth."""
        width = len(self.layout.block)
        for s in range(self.layout.stages if width else 0):
            around = [*self.network, *self.stage_columns(s)]
            for slot in range(self.layout.max_depth[s]):
                start = self.layout.block_start[s] + slot * width
                own = list(range(start, start + width))
                table = self.values([*around, *own], deep=True)
                first = table.reshape(math.prod(table.shape[: len(around)]), -1)[:, 0]
                table = table - first.reshape(*table.shape[: len(around)], *[1] * width)
                yield Term((*around, *own), np.pad(table, [(0, 0)] * len(around) + [(0, 1)] * width))

    def skeleton(self) -> Iterator[Term]:
        """The function at first choices in all blocks: stage by stage, and what neighbours add together."""
        shared = len(self.network)
        stages = [[*self.stage_columns(s), self.layout.depth_column[s]] for s in range(self.layout.stages)]
        alone = [self.values([*self.network, *own], deep=False) for own in stages]
        none = self.values(self.network, deep=False)
        for s, own in enumerate(stages):
            base = none.reshape(none.shape + (1,) * len(own))
            # Every stage's table holds the reference network; it must be counted once.
            yield Term((*self.network, *own), alone[s] - (base if s else 0))
        for s, (own, after) in enumerate(itertools.pairwise(stages)):
            both = self.values([*self.network, *own, *after], deep=False)
            first = alone[s].reshape(alone[s].shape + (1,) * len(after))
            second = alone[s + 1].reshape(none.shape + (1,) * len(own) + alone[s + 1].shape[shared:])
            base = none.reshape(none.shape + (1,) * (len(own) + len(after)))
            yield Term((*self.network, *own, *after), both - first - second + base)


def _reduced(term: Term) -> Term:
    """The term without columns on which it does not depend: what a state must remember is less."""
    columns, table = list(term.columns), term.table
    for axis in reversed(range(table.ndim)):
        first = table.take([0], axis=axis)
        if (table == first).all():
            table = first.squeeze(axis)
            del columns[axis]
    return Term(tuple(columns), table)
