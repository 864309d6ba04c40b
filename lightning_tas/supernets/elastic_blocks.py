"""The plain Transformer block with shared weights: one block for every width, number of heads and MLP ratio.

Nothing about a call is kept; see `elastic`. `blocks` has the stand-alone counterpart, on a CPU with the same bits.

Shapes: B batch, N tokens, d width of the sub-network, h heads, q width of its queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import drop_path
from torch import Tensor, nn

from lightning_tas.families import Rules
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.elastic import ElasticLayerNorm, ElasticLinear, ElasticQKV
from lightning_tas.supernets.relative_position import RelativePosition, attention

PAIR = ("weight", "bias")


class ElasticAttention(nn.Module):
    """Attention of up to `num_heads` heads on up to `dim` channels."""

    def __init__(self, dim: int, num_heads: int, options: NetOptions, rules: Rules) -> None:
        super().__init__()
        self.grid_size = options.grid_size
        self.rules = rules
        width = rules.query_width(dim, num_heads)
        self.qkv = ElasticQKV(dim, 3 * width, bias=options.qkv_bias)
        self.proj = ElasticLinear(width, dim)
        self.rel_pos_k = RelativePosition(self.grid_size) if options.relative_position else None
        self.rel_pos_v = RelativePosition(self.grid_size) if options.relative_position else None

    def forward(self, x: Tensor, num_heads: int, bias_rule: str, dropout: tuple[float, float], gain: float) -> Tensor:
        d = x.shape[-1]
        qkv = self.qkv(x, self.rules.query_width(d, num_heads), bias_rule)
        qkv = qkv.unflatten(-1, (3, num_heads, self.rules.channels(d, num_heads)))  # (B, N, 3q) -> (B, N, 3, h, q/h)
        attn_drop = dropout[0] if self.training else 0.0
        x = attention(qkv, self.rel_pos_k, self.rel_pos_v, self.grid_size, attn_drop)  # (B, N, q)
        x = x * gain if gain != 1.0 else x
        return F.dropout(self.proj(x, d), dropout[1], self.training)


class ElasticMlp(nn.Module):
    """Linear, exact GELU, linear, of up to `hidden` units."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = ElasticLinear(dim, hidden)
        self.fc2 = ElasticLinear(hidden, dim)

    def forward(self, x: Tensor, hidden: int, dropout: float, gain: float) -> Tensor:
        d = x.shape[-1]
        x = F.dropout(F.gelu(self.fc1(x, hidden)), dropout, self.training)
        x = F.dropout(self.fc2(x, d), dropout, self.training)
        return x * gain if gain != 1.0 else x


class ElasticBlock(nn.Module):
    """Pre-norm ``x + f(LN(x))``, or post-norm ``LN(x + f(x))``, for attention and then the MLP."""

    def __init__(self, allocated: Mapping[str, Any], options: NetOptions, rules: Rules, drop_path_rate: float) -> None:
        super().__init__()
        dim = int(allocated["embed_dim"])
        self.allocated = dict(allocated)
        self.options = options
        self.rules = rules
        self.drop_path_rate = drop_path_rate
        self.norm1 = ElasticLayerNorm(dim, rules.norm_eps)
        self.attn = ElasticAttention(dim, int(allocated["num_heads"]), options, rules)
        self.norm2 = ElasticLayerNorm(dim, rules.norm_eps)
        self.mlp = ElasticMlp(dim, int(allocated["mlp_ratio"] * dim))

    def forward(self, x: Tensor, num_heads: int, mlp_ratio: float, bias_rule: str) -> Tensor:
        """(B, N, d) to (B, N, d), by `num_heads` heads and ``int(mlp_ratio * d)`` hidden units."""
        o, d = self.options, x.shape[-1]
        shrink = d / self.allocated["embed_dim"]
        dropout = (o.attn_drop_rate * shrink, o.drop_rate * shrink)
        gains = (1.0, 1.0)
        if o.scale:
            query = self.rules.query_width(d, num_heads)
            gains = (self.allocated["embed_dim"] / query, self.allocated["mlp_ratio"] / mlp_ratio)
        y = self.attn(self.norm1(x) if o.pre_norm else x, num_heads, bias_rule, dropout, gains[0])
        x = x + drop_path(y, self.drop_path_rate, self.training)
        x = x if o.pre_norm else self.norm1(x)
        y = self.mlp(self.norm2(x) if o.pre_norm else x, int(mlp_ratio * d), dropout[1], gains[1])
        x = x + drop_path(y, self.drop_path_rate, self.training)
        return x if o.pre_norm else self.norm2(x)

    def cut(self, d: int, num_heads: int, mlp_ratio: float, bias_rule: str) -> dict[str, Tensor]:
        """The weights of width `d` (views, or regrouped copies), as the state dict of a stand-alone block."""
        q, f = self.rules.query_width(d, num_heads), int(mlp_ratio * d)
        layers = {
            "attn.qkv": self.attn.qkv.slice(d, q, bias_rule),
            "attn.proj": self.attn.proj.slice(q, d),
            "mlp.fc1": self.mlp.fc1.slice(d, f),
            "mlp.fc2": self.mlp.fc2.slice(f, d),
        }
        state = {f"{name}.{k}": v for name, pair in layers.items() for k, v in zip(PAIR, pair, strict=True)}
        for norm in ("norm1", "norm2"):
            state |= {f"{norm}.{k}": v[:d] for k, v in getattr(self, norm).named_parameters()}
        for tables in ("rel_pos_k", "rel_pos_v"):
            if self.options.relative_position:
                state |= {f"attn.{tables}.{k}": v for k, v in getattr(self.attn, tables).named_parameters()}
        return {key: value for key, value in state.items() if value is not None}

    def touch(self, tokens: int) -> Tensor:
        """Zero, as a scalar, with a graph through every parameter: a pass of one image of zeros at full size."""
        x = self.norm1.weight.new_zeros(1, tokens, self.allocated["embed_dim"])
        # Where heads share the width, one of them has all of it; the most that are allowed need not divide it.
        heads = 1 if self.rules.head_dim is None else int(self.allocated["num_heads"])
        y = self(x, heads, float(self.allocated["mlp_ratio"]), "regroup")
        return 0.0 * y.sum(dtype=torch.float32)
