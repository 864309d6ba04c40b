"""Elect the best architecture of every isomer class of an isotropic space, with its score and cost, as arrays.

Heads and MLP ratios are allocated independently (paper, appendix B), and score and cost are sums over both, so the
classes of one (width, depth) are an outer product: a hundred thousand architectures are scored by a few additions of
small tables, and none is built before it is preferred.

Shapes: E embedding widths, A head allocations, B MLP allocations of one depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.costs import HEAD_DIM, CostOptions, Costs, isotropic_costs
from lightning_tas.proxies.slices import Tables
from lightning_tas.search.allocation import Allocator, ChoiceArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _OfDepth:
    """The elected of one depth: allocations (E, A, depth) and (E, B, depth); member (e, a, b) is at `offset` + flat."""

    depth: int
    offset: int
    heads: ChoiceArray
    mlp: ChoiceArray

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads.shape[0], self.heads.shape[1], self.mlp.shape[1]


@dataclass(frozen=True)
class Elected:
    """One architecture per isomer class: `score` (plain SNIP) and `costs`, each (N,), and `arch(i)` to build one."""

    tables: Tables
    family: str
    score: FloatArray
    costs: Costs
    parts: tuple[_OfDepth, ...]

    def __len__(self) -> int:
        return len(self.score)

    def arch(self, index: int) -> Architecture:
        """The architecture of class `index`."""
        axes = self.tables.axes
        part = next(p for p in reversed(self.parts) if p.offset <= index)
        e, a, b = np.unravel_index(index - part.offset, part.shape)
        return Architecture.vit(
            axes.embed_dim[e],
            [axes.num_heads[c] for c in part.heads[e, a]],
            [axes.mlp_ratio[c] for c in part.mlp[e, b]],
            family=self.family,
        )


def elect(
    tables: Tables,
    options: CostOptions,
    family: str = "autoformer",
    norm: str = "paper",
    allocation: str = "dp",
    classes: str = "sums",
    skip_unused_middle: bool = False,
) -> Elected:
    """The best member, under the normalised score `norm`, of every isomer class of every width and depth.

    See `allocation` for the rules and the two kinds of classes, `Tables.gains` for the normalisers.
    """
    axes = tables.axes
    head_gains, mlp_gains = tables.gains(norm)
    heads_of = Allocator(head_gains, axes.num_heads, allocation, classes, skip_unused_middle)
    mlp_of = Allocator(mlp_gains, axes.mlp_ratio, allocation, classes, skip_unused_middle)
    q_table = HEAD_DIM * np.asarray(axes.num_heads, dtype=np.int64)
    embed = np.asarray(axes.embed_dim, dtype=np.int64)
    parts, scores, columns = [], [], []
    offset = 0
    for depth in axes.depth:
        heads, mlp = heads_of.allocate(depth), mlp_of.allocate(depth)
        part = _OfDepth(depth, offset, heads, mlp)
        fixed = tables.fixed + tables.block[:depth].sum(axis=0)
        head_score, mlp_score = _look_up(tables.heads, heads), _look_up(tables.mlp, mlp)
        score = fixed[:, None, None] + head_score[:, :, None] + mlp_score[:, None, :]
        q = q_table[heads].sum(axis=2)
        hidden = np.take_along_axis(axes.hidden[:, None, :], mlp.astype(np.intp), axis=2).sum(axis=2)
        columns.append(
            [
                np.broadcast_to(column, part.shape).ravel()
                for column in (embed[:, None, None], np.int64(depth), q[:, :, None], hidden[:, None, :])
            ]
        )
        scores.append(score.ravel())
        parts.append(part)
        offset += score.size
    embeds, depths, q_sums, hidden_sums = (np.concatenate(column) for column in zip(*columns, strict=True))
    costs = isotropic_costs(embeds, depths, q_sums, hidden_sums, options)
    return Elected(tables, family, np.concatenate(scores), costs, tuple(parts))


def _look_up(table: FloatArray, choices: ChoiceArray) -> FloatArray:
    """(E, K): sum over layers of table (L, E, C) at the choices (E, K, depth)."""
    depth = choices.shape[2]
    by_embed = table[:depth].transpose(1, 2, 0)  # (E, C, depth)
    return np.take_along_axis(by_embed, choices.astype(np.intp), axis=1).sum(axis=2)
