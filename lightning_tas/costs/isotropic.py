"""Costs of plain ViTs, families "autoformer" and "autoprox_vit".

They depend on four numbers only: embedding width, depth, the sum of the query widths and the sum of the hidden widths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.costs.options import Cost, CostOptions, Costs, IntArray
from lightning_tas.errors import UserError
from lightning_tas.families import AUTOFORMER, RULES, Rules

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace

HEAD_DIM = 64  # of AutoFormer, whose relative position tables have as many columns


def block_params(embed: IntArray, depth: IntArray, q: IntArray, hidden: IntArray, qkv_bias: bool) -> IntArray:
    """Parameters of `depth` plain blocks: two norms and two output biases each, qkv, projection, MLP."""
    return 6 * depth * embed + q * (4 * embed + (3 if qkv_bias else 0)) + hidden * (2 * embed + 1)


def block_macs(tokens: int, embed: IntArray, q: IntArray, hidden: IntArray) -> IntArray:
    """Multiply-accumulates of plain blocks on `tokens` tokens: linear layers, then q.k and the weighted values."""
    return tokens * embed * (4 * q + 2 * hidden) + 2 * tokens**2 * q


def isotropic_costs(
    embed: IntArray,
    depth: IntArray,
    q: IntArray,
    hidden: IntArray,
    options: CostOptions,
    rules: Rules = AUTOFORMER,
) -> Costs:
    """Costs of plain ViTs of the family of `rules` from four columns of shape (N,).

    embed, depth: width and number of blocks; q: sum over blocks of the query width (64 x heads in AutoFormer); hidden:
    sum over blocks of the MLP's hidden width, int(ratio x embed). Spec A1, extended to every build option.
    """
    o = options.resolve(rules)
    n, (gh, gw) = o.tokens, o.grid
    patch = o.in_chans * o.patch_size**2
    relative_rows = 2 * gh + 2 + 2 * gw + 2 if o.relative_position else 0

    params = (patch + 1) * embed + embed + (n * embed if o.abs_pos else 0)
    params = params + block_params(embed, depth, q, hidden, o.qkv_bias) + 2 * depth * relative_rows * HEAD_DIM
    params = params + (2 * embed if o.pre_norm else 0) + o.num_classes * (embed + 1)

    macs = (n - 1) * patch * embed + block_macs(n, embed, q, hidden) + o.num_classes * embed
    if o.relative_position:
        macs = macs + _relative_macs(q, o)
    return Costs(params, macs)


def _relative_macs(q: IntArray, options: CostOptions) -> IntArray:
    """Multiply-accumulates of the relative position of all blocks, under the wanted convention."""
    if options.count_rpe is False:
        return np.zeros_like(q)
    if options.count_rpe == "explicit":
        return 2 * options.tokens**2 * q
    # Factorised: q times both tables and back, and attention longer by one slot per grid row, grid column and two for
    # the class token, rounded up to a multiple of 16 (see supernets.relative_position).
    gh, gw = options.grid
    rows, slots = 2 * (gh + gw) + 4, (gh + gw + 2 + 15) // 16 * 16
    return 2 * options.tokens * q * rows + 2 * options.tokens**2 * (q // HEAD_DIM) * slots


def isotropic_one(arch: Architecture, options: CostOptions) -> Cost:
    """Cost of one plain ViT."""
    rules, embed = RULES[arch.family], int(arch.embed_dim)
    q = sum(rules.query_width(embed, heads) for heads in arch.num_heads)
    hidden = sum(int(r * embed) for r in arch.mlp_ratio)
    width, depth, queries, mlp = (np.asarray(v, dtype=np.int64) for v in (embed, arch.depth, q, hidden))
    params, macs = isotropic_costs(width, depth, queries, mlp, options, rules)
    return Cost(int(params), int(macs))


def isotropic_columns(
    space: SearchSpace, codes: npt.NDArray[np.integer[Any]]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(embed, depth, sum of query widths, sum of hidden widths), each (N,), of encoded one-stage architectures.

    Heads and ratios may be chosen per block, or once for all blocks. UserError for a space without one of the four.
    """
    columns = {(c.name, c.block): (i, c.choices) for i, c in enumerate(space.columns)}
    lacking = [name for name in ("embed_dim", "depth") if (name, None) not in columns]
    lacking += [name for name in ("num_heads", "mlp_ratio") if not {(name, None), (name, 0)} & columns.keys()]
    if space.stages > 1 or lacking:
        reason = f"no {', '.join(lacking)} where a plain ViT has it" if lacking else f"{space.stages} stages"
        raise UserError(f"cost: codes of space {space.name!r} cannot be counted: it has {reason}")
    embed_at, embed_choices = columns["embed_dim", None]
    depth_at, depth_choices = columns["depth", None]
    embed_code = codes[:, embed_at].astype(np.intp)
    embeds = np.asarray(embed_choices, dtype=np.int64)
    depth = np.asarray(depth_choices, dtype=np.int64)[codes[:, depth_at]]
    rules = RULES[space.family]
    q = np.zeros(len(codes), dtype=np.int64) if rules.head_dim is not None else depth * embeds[embed_code]
    hidden = np.zeros(len(codes), dtype=np.int64)
    for (name, block), (at, choices) in columns.items():
        times = depth if block is None else 1
        # The code -1 of an unused slot picks the appended last entry, a width of zero.
        if name == "num_heads":
            if rules.head_dim is not None:
                q += times * np.asarray([*(rules.head_dim * int(h) for h in choices), 0], dtype=np.int64)[codes[:, at]]
        elif name == "mlp_ratio":
            width = len(choices) + 1
            table = np.asarray([[*(int(r * d) for r in choices), 0] for d in embed_choices], dtype=np.int64).ravel()
            code = codes[:, at]
            hidden += times * table[embed_code * width + np.where(code < 0, width - 1, code)]
    return embeds[embed_code], depth, q, hidden


def isotropic_many(space: SearchSpace, codes: npt.NDArray[np.integer[Any]], options: CostOptions) -> Costs:
    """Costs of encoded plain ViTs."""
    return isotropic_costs(*isotropic_columns(space, codes), options=options, rules=RULES[space.family])
