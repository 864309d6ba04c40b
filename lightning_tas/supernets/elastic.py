"""Layers that hold the weights of the widest network and compute with the leading part that a call asks for.

Weight entanglement (AutoFormer, section 3.2): every choice of a layer shares the weights of the smaller ones. Slices
are cut inside `forward` and nothing about a call is kept, so weights may be moved, copied, averaged or replaced at any
time. Slices are made contiguous so that a sub-network computes with operands laid out as in its extracted copy: the
same kernels, and where these repeat themselves (docs/training.md) the same bits.

Shapes: B batch, N tokens, d width of the sub-network.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ElasticLinear(nn.Linear):
    """``W[:out, :in]``, ``b[:out]``; `in` is the width of the input."""

    def slice(self, in_features: int, out_features: int) -> tuple[Tensor, Tensor | None]:
        """Weight (out, in) and bias (out,) of the narrower layer."""
        bias = None if self.bias is None else self.bias[:out_features]
        return self.weight[:out_features, :in_features].contiguous(), bias

    def forward(self, x: Tensor, out_features: int | None = None) -> Tensor:
        weight, bias = self.slice(x.shape[-1], self.out_features if out_features is None else out_features)
        return F.linear(x, weight, bias)


class ElasticQKV(nn.Linear):
    """Queries, keys and values of `width` each. Row 3 i + c of the weight is row i of component c.

    Interleaving lets a narrower network take leading rows: the first heads of each component. They are regrouped to
    component-major order, the layout of stand-alone networks. Bias rule "autoformer" repeats the released AutoFormer
    code, which cuts ``b[:3 width]`` without regrouping; its checkpoints were trained that way.
    """

    def slice(self, in_features: int, width: int, bias_rule: str = "regroup") -> tuple[Tensor, Tensor | None]:
        """Weight (3 width, in) and bias (3 width,), component-major."""
        weight = self.weight[: 3 * width, :in_features].unflatten(0, (width, 3)).transpose(0, 1).flatten(0, 1)
        if self.bias is None:
            return weight.contiguous(), None
        bias = self.bias[: 3 * width]
        if bias_rule == "regroup":
            bias = bias.unflatten(0, (width, 3)).t().flatten()
        return weight.contiguous(), bias.contiguous()

    def forward(self, x: Tensor, width: int | None = None, bias_rule: str = "regroup") -> Tensor:
        weight, bias = self.slice(x.shape[-1], self.out_features // 3 if width is None else width, bias_rule)
        return F.linear(x, weight, bias)


class ElasticLayerNorm(nn.LayerNorm):
    """LayerNorm over the width of its input, with leading weights and biases."""

    def forward(self, x: Tensor) -> Tensor:
        d = x.shape[-1]
        return F.layer_norm(x, (d,), self.weight[:d], self.bias[:d], self.eps)


class ElasticPatchEmbed(nn.Module):
    """Convolution of patches, ``W[:d]``, ``b[:d]``: (B, C, H, W) to (B, N - 1, d)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=stride)

    def forward(self, x: Tensor, embed_dim: int) -> Tensor:
        assert self.proj.bias is not None
        x = F.conv2d(x, self.proj.weight[:embed_dim], self.proj.bias[:embed_dim], self.proj.stride)
        return x.flatten(2).transpose(1, 2)  # (B, d, gh, gw) -> (B, N - 1, d)
