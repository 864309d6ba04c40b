"""The plain Transformer block of stand-alone networks and the patch embedding before it. No elastic code.

Weights are component-major (all queries, then keys, then values), and every layer has exactly the architecture's size.

Shapes: B batch, C channels, N tokens, d width, h heads, q width of the queries, f = int(mlp_ratio * d) hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from lightning_tas.families import Rules
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.relative_position import RelativePosition, attention


class PatchEmbed(nn.Module):
    """Convolution of patches: (B, C, H, W) to (B, N - 1, d)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # (B, d, gh, gw) -> (B, N - 1, d)


class Attention(nn.Module):
    """Self-attention with the family's channels per head; optional relative position."""

    def __init__(
        self, dim: int, num_heads: int, options: NetOptions, rules: Rules, dropout: tuple[float, float], gain: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = rules.channels(dim, num_heads)
        self.grid_size = options.grid_size
        self.attn_drop, self.proj_drop = dropout
        self.gain = gain
        width = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * width, bias=options.qkv_bias)
        self.proj = nn.Linear(width, dim)
        self.rel_pos_k = RelativePosition(self.grid_size) if options.relative_position else None
        self.rel_pos_v = RelativePosition(self.grid_size) if options.relative_position else None

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))  # (B, N, 3q) -> (B, N, 3, h, q/h)
        dropout = self.attn_drop if self.training else 0.0
        x = attention(qkv, self.rel_pos_k, self.rel_pos_v, self.grid_size, dropout)  # (B, N, q)
        x = x * self.gain if self.gain != 1.0 else x
        return F.dropout(self.proj(x), self.proj_drop, self.training)


class Mlp(nn.Module):
    """Linear, exact GELU, linear."""

    def __init__(self, dim: int, hidden: int, dropout: float, gain: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.dropout = dropout
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.fc1(x)), self.dropout, self.training)
        x = F.dropout(self.fc2(x), self.dropout, self.training)
        return x * self.gain if self.gain != 1.0 else x


class Block(nn.Module):
    """Pre-norm ``x + f(LN(x))``, or post-norm ``LN(x + f(x))``, for attention and then the MLP."""

    def __init__(self, dim: int, attn: Attention, mlp: Mlp, drop_path: float, pre_norm: bool, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.drop_path(self.attn(self.norm1(x)))
            return x + self.drop_path(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop_path(self.attn(x)))
        return self.norm2(x + self.drop_path(self.mlp(x)))


def make_block(
    dim: int,
    num_heads: int,
    mlp_ratio: float,
    drop_path: float,
    options: NetOptions,
    rules: Rules,
    allocated: Mapping[str, Any],
) -> Block:
    """A block of width `dim`; `allocated` (embed_dim, mlp_ratio) is what dropout and `scale` refer to."""
    o, shrink = options, dim / allocated["embed_dim"]
    gains = (1.0, 1.0)
    if o.scale:
        gains = (allocated["embed_dim"] / rules.query_width(dim, num_heads), allocated["mlp_ratio"] / mlp_ratio)
    dropout = (o.attn_drop_rate * shrink, o.drop_rate * shrink)
    attn = Attention(dim, num_heads, o, rules, dropout, gains[0])
    mlp = Mlp(dim, int(mlp_ratio * dim), dropout[1], gains[1])
    return Block(dim, attn, mlp, drop_path, o.pre_norm, rules.norm_eps)
