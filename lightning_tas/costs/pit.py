"""Costs of PiTs: per stage those of plain blocks on its tokens, and the poolings between stages (spec A3).

P = (3 p^2 + 1) C1 + C1 + gh gw C1 + sum_s D_s (4C + 3C^2 + 3C + C^2 + C + 2Cf + f + C)
    + sum_pool (9C' + C' + CC' + C') + 2 C_last + classes (C_last + 1)

F = gh gw 3 p^2 C1 + sum_s [ N_s D_s (4 C^2 + 2 C f) + 2 N_s^2 D_s C ] + sum_pool (gh' gw' 9 C' + C C') + classes C
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.costs.isotropic import block_macs, block_params
from lightning_tas.costs.options import Cost, CostOptions, Costs, IntArray
from lightning_tas.errors import UserError
from lightning_tas.families import PIT, halved, widths

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


def pit_costs(
    dims: Sequence[IntArray], depths: Sequence[IntArray], hidden: Sequence[IntArray], options: CostOptions
) -> Costs:
    """Costs from three columns (N,) per stage: width, number of blocks, sum over blocks of the hidden widths."""
    o = options.resolve(PIT)
    patch, (gh, gw) = o.in_chans * o.patch_size**2, o.grid
    first, last = dims[0], dims[-1]
    params = (patch + 1) * first + first + (gh * gw * first if o.abs_pos else 0)
    macs = gh * gw * patch * first
    for s, (dim, depth, f) in enumerate(zip(dims, depths, hidden, strict=True)):
        if s:
            gh, gw = halved((gh, gw))
            params = params + 10 * dim + dim * (dims[s - 1] + 1)
            macs = macs + gh * gw * 9 * dim + dims[s - 1] * dim
        params = params + block_params(dim, depth, depth * dim, f, o.qkv_bias)
        macs = macs + block_macs(1 + gh * gw, dim, depth * dim, f)
    params = params + (2 * last if o.pre_norm else 0) + o.num_classes * (last + 1)
    return Costs(params, macs + o.num_classes * last)


def pit_one(arch: Architecture, options: CostOptions) -> Cost:
    """Cost of one PiT."""
    dims, ratios = widths(arch), iter(arch.mlp_ratio)
    hidden = [sum(int(next(ratios) * dim) for _ in range(depth)) for dim, depth in zip(dims, arch.depths, strict=True)]
    by_width, by_depth, by_hidden = (
        [np.asarray(v, dtype=np.int64) for v in values] for values in (dims, arch.depths, hidden)
    )
    params, macs = pit_costs(by_width, by_depth, by_hidden, options)
    return Cost(int(params), int(macs))


def pit_many(space: SearchSpace, codes: npt.NDArray[np.integer[Any]], options: CostOptions) -> Costs:
    """Costs of encoded PiTs; `UserError` for a space without base_dim, num_heads or mlp_ratio where PiT has it."""
    columns = {(c.name, c.stage, c.block): (i, c.choices) for i, c in enumerate(space.columns)}

    def chosen(name: str, stage: int, block: int | None = None) -> npt.NDArray[np.float64] | None:
        """The values (N,) in a block's, a stage's or the network's column; 0 in slots beyond the depth."""
        for key in ((name, stage, block), (name, stage, None), (name, None, None)):
            if key in columns:
                at, choices = columns[key]
                return np.asarray([*choices, 0], dtype=np.float64)[codes[:, at]]
        return None

    dims: list[IntArray] = []
    depths: list[IntArray] = []
    hidden: list[IntArray] = []
    for s in range(space.stages):
        base, heads, depth = chosen("base_dim", s), chosen("num_heads", s), chosen("depth", s)
        lacking = [n for n, v in (("base_dim", base), ("num_heads", heads)) if v is None]
        ratios = [chosen("mlp_ratio", s, b) for b in range(max(space.choices("depth", s)))]
        lacking += ["mlp_ratio"] * any(ratio is None for ratio in ratios)
        if base is None or heads is None or depth is None or lacking:
            raise UserError(
                f"cost: codes of space {space.name!r} cannot be counted: it has no {', '.join(lacking)} where a PiT "
                "has it"
            )
        dims.append((base * heads).astype(np.int64))
        depths.append(depth.astype(np.int64))
        widths_of_blocks = [np.floor(r * dims[s]) * (b < depth) for b, r in enumerate(ratios) if r is not None]
        hidden.append(np.sum(widths_of_blocks, axis=0).astype(np.int64))
    return pit_costs(dims, depths, hidden, options)
