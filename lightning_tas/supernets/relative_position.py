"""Attention with 2-D relative position on keys and values, factorised.

AutoFormer (Chen et al. 2021, section 3; after Shaw et al. 2018) adds a vector R_ij = T_v[dv(i,j)] + T_h[dh(i,j)] to
key j and value j as query i sees them, dv and dh being the row and column offset key minus query:

    logits_ij = (q_i . k_j + q_i . R^K_ij) * scale        out_i = sum_j a_ij (v_j + R^V_ij)

Written out that is an (N x N x 64) tensor. But the offset of a pair depends on the row and the column of the key alone
once the query is fixed, so each query needs only one number per key row and per key column ("slots"). Queries are
therefore lengthened by their slot numbers, and keys and values by the indicator of their own slots:

    [q_i, b_i] . [k_j, e_j] = q_i . k_j + b_i[row of j] + b_i[column of j]          b_i[s] = q_i . T^K[index(i, s)]
    sum_j a_ij [v_j, e_j]   = [sum_j a_ij v_j, attention mass per slot of i]        which then meets T^V

An ordinary fused attention kernel does the rest, in any precision, with dropout, without an (N x N) tensor in memory.
Where torch is told to be deterministic (`trainer.deterministic`) the slots are picked and summed by products with
indicators: on a GPU, gather and scatter_add sum what meets in one row of a table in any order.

Shapes: B batch, N = 1 + gh * gw tokens (class token first), H heads, D = 64 head dim, S slots, R rows of both tables.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 64


def table_rows(side: int) -> int:
    """Rows of the table of one axis: row 0 for every pair with the class token, then the offsets -side .. side."""
    return 2 * side + 2


class RelativePosition(nn.Module):
    """The tables of one kind (keys or values): ``vertical`` (2 gh + 2, 64) and ``horizontal`` (2 gw + 2, 64)."""

    def __init__(self, grid_size: tuple[int, int]) -> None:
        super().__init__()
        self.vertical = nn.Parameter(torch.empty(table_rows(grid_size[0]), HEAD_DIM))
        self.horizontal = nn.Parameter(torch.empty(table_rows(grid_size[1]), HEAD_DIM))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, standard deviation 0.02."""
        nn.init.trunc_normal_(self.vertical, std=0.02)
        nn.init.trunc_normal_(self.horizontal, std=0.02)

    def forward(self) -> Tensor:
        """Both tables, one below the other: (R, 64)."""
        return torch.cat([self.vertical, self.horizontal], dim=-2)


@lru_cache(maxsize=64)
def slots(grid_size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index (N, S) of the table row that query i meets in slot s, and indicator (N, S) of the slots of key j.

    Slots: one per key row, one per key column, two for the class token, unused ones up to a multiple of 16 (alignment
    of the attention kernels). Kept per grid and device, outside of modules, which thereby stay free of derived state.
    """
    gh, gw = grid_size
    used = gh + gw + 2
    size = (used + 15) // 16 * 16
    # Never inference tensors: the same ones serve training later.
    with torch.inference_mode(False):
        row = torch.arange(gh, device=device).repeat_interleave(gw)  # (gh * gw,)
        column = torch.arange(gw, device=device).repeat(gh)  # (gh * gw,)
        to_row = torch.arange(gh, device=device) - row[:, None] + gh + 1  # (gh * gw, gh)
        to_column = torch.arange(gw, device=device) - column[:, None] + gw + 1 + table_rows(gh)  # (gh * gw, gw)
        index = torch.zeros(1 + gh * gw, size, dtype=torch.int64, device=device)
        index[1:, :gh] = to_row
        index[:, gh : gh + gw] = table_rows(gh)  # the class token's query: row 0 of the horizontal table
        index[1:, gh : gh + gw] = to_column
        index[:, gh + gw + 1] = table_rows(gh)  # slot gh + gw keeps row 0 of the vertical table
        member = torch.zeros(1 + gh * gw, size, device=device)
        member[1:, :gh] = F.one_hot(row, gh).float()
        member[1:, gh : gh + gw] = F.one_hot(column, gw).float()
        member[0, gh + gw : used] = 1.0
    return index, member


def attention(
    qkv: Tensor,
    keys: RelativePosition | None,
    values: RelativePosition | None,
    grid_size: tuple[int, int],
    dropout: float = 0.0,
) -> Tensor:
    """Multi-head attention of ``qkv`` (B, N, 3, H, D), with relative position when `keys` and `values` are given.

    Returns (B, N, H * D); relative position has D = 64, without it any D will do. `dropout` acts on the attention
    weights. float16 is computed in float32 (its range is too small for the logits of small supernets); other types
    keep their own, with the kernels' softmax in float32.
    """
    kind = qkv.dtype
    with _full_range(qkv):
        qkv = qkv.float() if kind == torch.float16 else qkv
        if keys is None or values is None:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=q.shape[-1] ** -0.5).transpose(1, 2)
        else:
            x = _relative(qkv, keys().to(qkv.dtype), values().to(qkv.dtype), grid_size, dropout)
    return x.flatten(2).to(kind)


def _relative(qkv: Tensor, keys: Tensor, values: Tensor, grid_size: tuple[int, int], dropout: float) -> Tensor:
    # Inside `torch.compile` and `torch.export` as a part of the graph: their tensors must not be kept for others.
    index, member = (slots.__wrapped__ if torch.compiler.is_compiling() else slots)(grid_size, qkv.device)
    q, k, v = qkv.unbind(2)  # (B, N, H, D)
    batch, tokens, heads, _ = q.shape
    met = None  # which row (R, of both tables) query i meets in slot s, as ones and zeros: (N, S, R)
    if torch.are_deterministic_algorithms_enabled():
        met = (index[..., None] == torch.arange(keys.shape[-2], device=q.device)).to(q.dtype)
    index = index[:, None].expand(batch, tokens, heads, -1)  # (B, N, H, S)
    indicator = member.to(q.dtype)[:, None].expand(batch, tokens, heads, -1)  # (B, N, H, S)
    bias = _meet(q, keys.transpose(-1, -2))  # (B, N, H, R)
    bias = bias.gather(-1, index) if met is None else torch.einsum("bnhr,nsr->bnhs", bias, met)  # (B, N, H, S)
    x = F.scaled_dot_product_attention(
        torch.cat([q, bias], -1).transpose(1, 2),  # (B, H, N, D + S)
        torch.cat([k, indicator], -1).transpose(1, 2),
        torch.cat([v, indicator], -1).transpose(1, 2),
        dropout_p=dropout,
        scale=HEAD_DIM**-0.5,
    ).transpose(1, 2)
    x, mass = x.split([HEAD_DIM, index.shape[-1]], -1)  # (B, N, H, D), (B, N, H, S)
    if met is not None:
        return _meet(torch.einsum("bnhs,nsr->bnhr", mass, met), values, x)
    zeros = mass.new_zeros(()).expand(batch, tokens, heads, values.shape[-2])
    return _meet(zeros.scatter_add(-1, index, mass), values, x)  # (B, N, H, S) -> (B, N, H, R)


def _meet(x: Tensor, table: Tensor, plus: Tensor | None = None) -> Tensor:
    """x (B, N, H, K) times a table (K, M), or one table per image (B, K, M), `plus` (B, N, H, M): (B, N, H, M).

    One table per image is for gradients by image. Products are of flat operands: `matmul` of (B, N, H, K) picks
    kernels, hence roundings, by who requires a gradient.
    """
    begin = table.dim() - 2
    rows = x.flatten(begin, 2)  # (B * N * H, K), or (B, N * H, K)
    if plus is None:
        found = rows @ table
    else:
        found = (torch.baddbmm if begin else torch.addmm)(plus.flatten(begin, 2), rows, table)
    return found.view(*x.shape[:-1], -1)


def _full_range(x: Tensor) -> AbstractContextManager[object]:
    """No autocast around float16 attention, which would turn the float32 operands back."""
    return torch.autocast(x.device.type, enabled=False) if x.dtype == torch.float16 else nullcontext()
