"""The stand-alone ViT of one architecture: what a search hands over. No elastic code; timm's model contract.

Its weights are component-major (all queries, then keys, then values), and every layer has exactly the architecture's
size, so `numel` over its parameters is the network's parameter count.

Shapes: B batch, C channels, (gh, gw) patch grid, N = 1 + gh * gw tokens (class token first), d width, h heads of 64,
f = int(mlp_ratio * d) hidden width.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.elastic import init_transformer
from lightning_tas.supernets.relative_position import HEAD_DIM, RelativePosition, attention

FAMILY = "autoformer"


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Stochastic depth of each block: linear from 0 in the first to `rate` in the last of `depth` blocks."""
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def quantities(arch: Architecture) -> list[tuple[str, str, float]]:
    """(name in words, key of the supernet's limit, value) of every size of a one-stage architecture."""
    sizes: list[tuple[str, str, float]] = [("embed_dim", "embed_dim", arch.embed_dim), ("depth", "depth", arch.depth)]
    for i, (heads, ratio) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
        sizes.append((f"num_heads of block {i}", "num_heads", heads))
        hidden = int(ratio * arch.embed_dim)
        sizes.append((f"hidden width of block {i} (mlp_ratio {ratio} x embed_dim)", "hidden", hidden))
    return sizes


def check_arch(arch: object, family: str = FAMILY) -> Architecture:
    """`arch` if it is an architecture of this family, of one stage and of possible sizes, else `UserError`."""
    if not isinstance(arch, Architecture):
        raise UserError(f"arch: expected an Architecture, got {type(arch).__name__}")
    if arch.family != family:
        raise UserError(f"arch: family {arch.family!r} does not fit a network of family {family!r}")
    if len(arch.stages) != 1:
        raise UserError(f"arch: {len(arch.stages)} stages, but a network of family {family!r} has one")
    for name, _, value in quantities(arch):
        if value < 1 or not float(value).is_integer():
            raise UserError(f"{name}: {value} is not valid; it must be a whole number of at least 1")
    return arch


def check_images(x: Tensor, options: NetOptions) -> None:
    """`UserError` unless `x` is (B, in_chans, height, width) as the network was built for."""
    wanted = (options.in_chans, *options.img_size)
    if x.dim() != 4 or tuple(x.shape[1:]) != wanted:
        raise UserError(
            f"images: shape {tuple(x.shape)} does not fit; this network takes (batch, {wanted[0]}, {wanted[1]}, "
            f"{wanted[2]}), that is in_chans={wanted[0]}, img_size=({wanted[1]}, {wanted[2]})"
        )


class PatchEmbed(nn.Module):
    """Convolution of non-overlapping patches: (B, C, H, W) to (B, N - 1, d)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # (B, d, gh, gw) -> (B, N - 1, d)


class Attention(nn.Module):
    """Self-attention with 64 channels per head, whatever the width; optional relative position."""

    def __init__(
        self, dim: int, num_heads: int, options: NetOptions, dropout: tuple[float, float], gain: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.grid_size = options.grid_size
        self.attn_drop, self.proj_drop = dropout
        self.gain = gain
        width = num_heads * HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * width, bias=options.qkv_bias)
        self.proj = nn.Linear(width, dim)
        self.rel_pos_k = RelativePosition(self.grid_size) if options.relative_position else None
        self.rel_pos_v = RelativePosition(self.grid_size) if options.relative_position else None

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, HEAD_DIM))  # (B, N, 3q) -> (B, N, 3, h, 64)
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

    def __init__(self, dim: int, attn: Attention, mlp: Mlp, drop_path: float, pre_norm: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.drop_path(self.attn(self.norm1(x)))
            return x + self.drop_path(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop_path(self.attn(x)))
        return self.norm2(x + self.drop_path(self.mlp(x)))


class ImageNetwork(nn.Module):
    """What the supernet and its stand-alone networks share: the geometry of their images, initialisation and head."""

    _linear: type[nn.Linear] = nn.Linear  # kind of the head
    _options: NetOptions
    num_classes: int
    embed_dim: int
    head: nn.Module
    cls_token: nn.Parameter
    pos_embed: nn.Parameter | None

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self._options.img_size[0], self._options.img_size[1]

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches per column and per row."""
        return self._options.grid_size

    def init_weights(self) -> None:
        """As the references initialise; also fills a network that was built on the meta device."""
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            init_transformer(module)
            if isinstance(module, RelativePosition):
                module.reset_parameters()

    def get_classifier(self) -> nn.Module:
        """The head (of the widest network)."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head (none for 0 classes); `global_pool` "avg" or "token" also changes the pooling."""
        changed = {"num_classes": num_classes, "pool": global_pool or self._options.pool}
        self._options = NetOptions.read({**self._options.to_dict(), **changed})
        self.num_classes = num_classes
        fresh = self._linear(self.embed_dim, num_classes) if num_classes else nn.Identity()
        init_transformer(fresh)
        self.head = fresh.to(self.cls_token.device, self.cls_token.dtype)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters to spare from weight decay besides vectors; relative tables are decayed, as in the references."""
        return {"cls_token", "pos_embed"} if self.pos_embed is not None else {"cls_token"}


class VisionTransformer(ImageNetwork):
    """One architecture of family "autoformer" with fresh weights.

    `options` are those of `NetOptions`. ``forward`` takes (B, C, H, W) of the size built for and gives
    (B, num_classes). `UserError` for impossible options, other families and other image sizes.
    """

    default_cfg: dict[str, Any]  # timm's metadata, set by `tas_vit`; plain description otherwise
    pretrained_cfg: dict[str, Any]

    def __init__(self, arch: Architecture | Mapping[str, Any], **options: Any) -> None:
        super().__init__()
        self.arch = check_arch(Architecture.from_dict(arch) if isinstance(arch, Mapping) else arch)
        self._options = o = NetOptions.read(options)
        if o.bias_rule != "regroup":
            warnings.warn(f"bias_rule={o.bias_rule!r} has no effect on a stand-alone network", stacklevel=2)
        self.num_classes = o.num_classes
        self.embed_dim = self.num_features = self.head_hidden_size = d = int(self.arch.embed_dim)
        self.grad_checkpointing = False
        allocated = o.allocated or {"embed_dim": d, "mlp_ratio": max(self.arch.mlp_ratio), "depth": self.arch.depth}
        shrink = d / allocated["embed_dim"]
        self.drop_rate = o.drop_rate * shrink
        dropout = (o.attn_drop_rate * shrink, self.drop_rate)

        self.cls_token = nn.Parameter(torch.empty(1, 1, d))
        tokens = 1 + self.grid_size[0] * self.grid_size[1]
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, d)) if o.abs_pos else None
        self.patch_embed = PatchEmbed(o.in_chans, d, o.patch_size)
        rates = drop_path_rates(o.drop_path_rate, int(allocated["depth"]))
        blocks = []
        for heads, ratio, rate in zip(self.arch.num_heads, self.arch.mlp_ratio, rates, strict=False):
            gains = (allocated["embed_dim"] / (heads * HEAD_DIM), allocated["mlp_ratio"] / ratio) if o.scale else (1, 1)
            attn = Attention(d, heads, o, dropout, gains[0])
            mlp = Mlp(d, int(ratio * d), self.drop_rate, gains[1])
            blocks.append(Block(d, attn, mlp, rate, o.pre_norm))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(d) if o.pre_norm else nn.Identity()
        self.head = nn.Linear(d, o.num_classes) if o.num_classes else nn.Identity()
        self.init_weights()
        self.default_cfg = self.pretrained_cfg = describe(o)

    @property
    def options(self) -> dict[str, Any]:
        """The JSON-able build options: ``VisionTransformer(net.arch, **net.options)`` is the same network, fresh."""
        return {**self._options.to_dict(), "num_classes": self.num_classes}

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the tokens after the final norm, (B, N, d)."""
        check_images(x, self._options)
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)  # (B, N, d)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        x = F.dropout(x, self.drop_rate, self.training)
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, d) to pooled features (B, d) or to logits (B, num_classes)."""
        x = x[:, 1:].mean(dim=1) if self._options.pool == "avg" else x[:, 0]
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for timm's layer-wise learning rates."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable


def describe(options: NetOptions) -> dict[str, Any]:
    """timm's description of a network's input and head, as far as the build options decide it."""
    return {
        "architecture": "tas_vit",
        "num_classes": options.num_classes,
        "input_size": [options.in_chans, *options.img_size],
        "fixed_input_size": True,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
