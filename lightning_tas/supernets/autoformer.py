"""The elastic ViT: one set of weights for every architecture of an AutoFormer space (weight entanglement).

``net(x, arch)`` is stateless: the sub-network is an argument, its weights are cut from the shared ones inside
`forward` (AutoFormer, section 3; PreNAS uses the same network). `subnet(arch)` copies them into a stand-alone network
whose logits are the same bits.

Shapes: B batch, C channels, (gh, gw) patch grid, N = 1 + gh * gw tokens (class token first), D allocated width,
d width of the sub-network, h heads of 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.layers import drop_path
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.supernets.checkpoints import load_reference
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.elastic import (
    ElasticLayerNorm,
    ElasticLinear,
    ElasticPatchEmbed,
    ElasticQKV,
)
from lightning_tas.supernets.registry import register_family
from lightning_tas.supernets.relative_position import HEAD_DIM, RelativePosition, attention
from lightning_tas.supernets.vision_transformer import (
    FAMILY,
    ImageNetwork,
    VisionTransformer,
    check_arch,
    check_images,
    drop_path_rates,
    quantities,
)

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


class ElasticAttention(nn.Module):
    """Attention of up to `num_heads` heads on up to `dim` channels."""

    def __init__(self, dim: int, num_heads: int, options: NetOptions) -> None:
        super().__init__()
        self.grid_size = options.grid_size
        width = num_heads * HEAD_DIM
        self.qkv = ElasticQKV(dim, 3 * width, bias=options.qkv_bias)
        self.proj = ElasticLinear(width, dim)
        self.rel_pos_k = RelativePosition(self.grid_size) if options.relative_position else None
        self.rel_pos_v = RelativePosition(self.grid_size) if options.relative_position else None

    def forward(self, x: Tensor, num_heads: int, bias_rule: str, dropout: tuple[float, float], gain: float) -> Tensor:
        d = x.shape[-1]
        qkv = self.qkv(x, num_heads * HEAD_DIM, bias_rule)
        qkv = qkv.unflatten(-1, (3, num_heads, HEAD_DIM))  # (B, N, 3q) -> (B, N, 3, h, 64)
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

    def __init__(self, allocated: Mapping[str, Any], options: NetOptions, drop_path_rate: float) -> None:
        super().__init__()
        dim = int(allocated["embed_dim"])
        self.allocated = dict(allocated)
        self.options = options
        self.drop_path_rate = drop_path_rate
        self.norm1 = ElasticLayerNorm(dim)
        self.attn = ElasticAttention(dim, int(allocated["num_heads"]), options)
        self.norm2 = ElasticLayerNorm(dim)
        self.mlp = ElasticMlp(dim, int(allocated["mlp_ratio"] * dim))

    def forward(self, x: Tensor, num_heads: int, mlp_ratio: float, bias_rule: str) -> Tensor:
        """(B, N, d) to (B, N, d), by `num_heads` heads and ``int(mlp_ratio * d)`` hidden units."""
        o, d = self.options, x.shape[-1]
        shrink = d / self.allocated["embed_dim"]
        dropout = (o.attn_drop_rate * shrink, o.drop_rate * shrink)
        gains = (1.0, 1.0)
        if o.scale:
            gains = (self.allocated["embed_dim"] / (num_heads * HEAD_DIM), self.allocated["mlp_ratio"] / mlp_ratio)
        y = self.attn(self.norm1(x) if o.pre_norm else x, num_heads, bias_rule, dropout, gains[0])
        x = x + drop_path(y, self.drop_path_rate, self.training)
        x = x if o.pre_norm else self.norm1(x)
        y = self.mlp(self.norm2(x) if o.pre_norm else x, int(mlp_ratio * d), dropout[1], gains[1])
        x = x + drop_path(y, self.drop_path_rate, self.training)
        return x if o.pre_norm else self.norm2(x)


@register_family(FAMILY, network=VisionTransformer)
class ElasticViT(ImageNetwork):
    """The supernet of family "autoformer" over `space`, of the sizes in ``space.allocated``.

    `options` are those of `NetOptions`. `UserError` for impossible options, images of another size and architectures
    that the allocated weights cannot hold; plain `ValueError` when no architecture is given.
    """

    _linear = ElasticLinear

    def __init__(self, space: SearchSpace, **options: Any) -> None:
        super().__init__()
        if space.family != FAMILY:
            raise UserError(f"space: family {space.family!r} does not fit a supernet of family {FAMILY!r}")
        if options.get("allocated") is not None:
            raise UserError("allocated: a supernet's sizes come from its space; set space.allocated")
        self.space = space
        self.allocated: dict[str, Any] = dict(space.allocated)
        self._options = o = NetOptions.read(options)
        self.num_classes = o.num_classes
        self.bias_rule = o.bias_rule
        self.embed_dim = self.num_features = self.head_hidden_size = dim = int(self.allocated["embed_dim"])
        self.grad_checkpointing = False

        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        tokens = 1 + self.grid_size[0] * self.grid_size[1]
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, dim)) if o.abs_pos else None
        self.patch_embed = ElasticPatchEmbed(o.in_chans, dim, o.patch_size)
        rates = drop_path_rates(o.drop_path_rate, int(self.allocated["depth"]))
        self.blocks = nn.ModuleList(ElasticBlock(self.allocated, o, rate) for rate in rates)
        self.norm = ElasticLayerNorm(dim) if o.pre_norm else nn.Identity()
        self.head: nn.Module = ElasticLinear(dim, o.num_classes) if o.num_classes else nn.Identity()
        self.init_weights()

    @property
    def options(self) -> dict[str, Any]:
        """The JSON-able build options: ``ElasticViT(net.space, **net.options)`` is the same supernet, fresh."""
        return {**self._options.to_dict(), "num_classes": self.num_classes, "bias_rule": self.bias_rule}

    def check(self, arch: Architecture) -> None:
        """`UserError` naming quantity, value and maximum when the allocated weights cannot hold `arch`."""
        check_arch(arch)
        limits = {**self.allocated, "hidden": int(self.allocated["mlp_ratio"] * self.allocated["embed_dim"])}
        for name, key, value in quantities(arch):
            if value > limits[key]:
                raise UserError(f"{name}: {value} exceeds what supernet {self.space.name!r} allocates, {limits[key]}")

    def embed(self, x: Tensor, embed_dim: int) -> Tensor:
        """Images (B, C, H, W) to the first block's tokens (B, N, embed_dim)."""
        check_images(x, self._options)
        x = self.patch_embed(x, embed_dim)
        x = torch.cat([self.cls_token[..., :embed_dim].expand(len(x), -1, -1), x], dim=1)  # (B, N, d)
        if self.pos_embed is not None:
            x = x + self.pos_embed[..., :embed_dim]
        return F.dropout(x, self._options.drop_rate * embed_dim / self.embed_dim, self.training)

    def forward_features(self, x: Tensor, arch: Architecture) -> Tensor:
        """Images to the sub-network's tokens after the final norm, (B, N, d)."""
        self.check(arch)
        x = self.embed(x, arch.embed_dim)
        for block, heads, ratio in zip(self.blocks, arch.num_heads, arch.mlp_ratio, strict=False):
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, heads, ratio, self.bias_rule, use_reentrant=False)
            else:
                x = block(x, heads, ratio, self.bias_rule)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, d) to pooled features (B, d) or to logits (B, num_classes)."""
        x = x[:, 1:].mean(dim=1) if self._options.pool == "avg" else x[:, 0]
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, arch: Architecture | None = None) -> Tensor:
        """Logits (B, num_classes) of the sub-network `arch` on images (B, C, H, W)."""
        if arch is None:
            raise ValueError("a supernet holds no current sub-network: call net(x, arch) with an architecture")
        return self.forward_head(self.forward_features(x, arch))

    def touch(self, archs: Sequence[Architecture]) -> Tensor:
        """Zero, as a scalar, with a graph through every parameter that no network of `archs` uses.

        Added to a loss it changes no value and gives those parameters gradients of exactly zero: what ZeRO-3 needs,
        which otherwise applies an earlier step's gradients again. Blocks are the only parts that networks leave out;
        each one costs a pass of a single image of zeros, at its full size.
        """
        total = self.cls_token.new_zeros(())
        tokens = 1 + self.grid_size[0] * self.grid_size[1]
        x = torch.zeros(1, tokens, self.embed_dim, device=total.device, dtype=total.dtype)
        size = (int(self.allocated["num_heads"]), float(self.allocated["mlp_ratio"]))
        for block in self.blocks[max((arch.depth for arch in archs), default=0) :]:
            total = total + 0.0 * block(x, *size, self.bias_rule).sum(dtype=torch.float32)
        return total

    @torch.no_grad()
    def subnet_state(self, arch: Architecture) -> dict[str, Tensor]:
        """Copies of the weights that `arch` uses, as the state dict of its stand-alone network."""
        self.check(arch)
        d = arch.embed_dim
        state = {"cls_token": self.cls_token[..., :d]}
        if self.pos_embed is not None:
            state["pos_embed"] = self.pos_embed[..., :d]
        state |= {f"patch_embed.proj.{k}": v[:d] for k, v in self.patch_embed.proj.named_parameters()}
        for i, (heads, ratio) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
            block = self.blocks[i]
            assert isinstance(block, ElasticBlock)
            q, f, name = heads * HEAD_DIM, int(ratio * d), f"blocks.{i}"
            layers = {
                "attn.qkv": block.attn.qkv.slice(d, q, self.bias_rule),
                "attn.proj": block.attn.proj.slice(q, d),
                "mlp.fc1": block.mlp.fc1.slice(d, f),
                "mlp.fc2": block.mlp.fc2.slice(f, d),
            }
            for layer, (weight, bias) in layers.items():
                state[f"{name}.{layer}.weight"] = weight
                if bias is not None:
                    state[f"{name}.{layer}.bias"] = bias
            for norm in ("norm1", "norm2"):
                state |= {f"{name}.{norm}.{k}": v[:d] for k, v in getattr(block, norm).named_parameters()}
            for tables in ("rel_pos_k", "rel_pos_v"):
                if self._options.relative_position:
                    state |= {f"{name}.attn.{tables}.{k}": v for k, v in getattr(block.attn, tables).named_parameters()}
        state |= {f"norm.{k}": v[:d] for k, v in self.norm.named_parameters()}
        state |= {f"head.{k}": v[:, :d] if k == "weight" else v for k, v in self.head.named_parameters()}
        return {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in state.items()}

    def subnet(self, arch: Architecture) -> VisionTransformer:
        """The stand-alone network of `arch` with copied weights, in this network's mode; draws no random numbers."""
        self.check(arch)
        options = {**self.options, "allocated": self.allocated, "bias_rule": "regroup"}
        with torch.device("meta"):
            net = VisionTransformer(arch, **options)
        net.load_state_dict(self.subnet_state(arch), assign=True)
        return net.train(self.training)

    def load_reference(self, state_dict: Mapping[str, Any], source: str) -> None:
        """Load an official checkpoint (`source` "autoformer" or "prenas", which also selects the bias rule).

        Tables and positions are resampled when sizes differ, the head starts afresh when classes differ (one warning).
        `UserError` lists keys that are missing or unexpected.
        """
        load_reference(self, state_dict, source)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable
