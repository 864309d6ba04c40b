"""The stand-alone ViT of one architecture: what a search hands over. No elastic code; timm's model contract.

It serves the families of plain ViTs: "autoformer" (queries of 64 x heads, relative position) and "autoprox_vit"
(queries as wide as the tokens, none), see `families.RULES`. Every layer has exactly the architecture's size, so `numel`
over its parameters is the network's parameter count.

Shapes: B batch, C channels, (gh, gw) patch grid, N = 1 + gh * gw tokens (class token first), d width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown
from lightning_tas.families import AUTOFORMER, AUTOPROX_VIT, RULES
from lightning_tas.supernets.blocks import PatchEmbed, make_block
from lightning_tas.supernets.image_network import StandaloneNetwork, check_family, check_sizes

FAMILIES = (AUTOFORMER.family, AUTOPROX_VIT.family)


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


def check_arch(arch: object, family: str) -> Architecture:
    """`arch` if it is an architecture of this family, of one stage and of possible sizes, else `UserError`."""
    arch = check_family(arch, family)
    if len(arch.stages) != 1:
        raise UserError(f"arch: {len(arch.stages)} stages, but a network of family {family!r} has one")
    check_sizes(quantities(arch))
    for i, heads in enumerate(arch.num_heads):
        RULES[family].check_heads(arch.embed_dim, heads, f"num_heads of block {i}")
    return arch


class VisionTransformer(StandaloneNetwork):
    """One architecture of a family of plain ViTs with fresh weights.

    `options` are those of `NetOptions`. ``forward`` takes (B, C, H, W) of the size built for and gives
    (B, num_classes). `UserError` for impossible options, other families and other image sizes.
    """

    def __init__(self, arch: Architecture | Mapping[str, Any], **options: Any) -> None:
        super().__init__()
        arch = Architecture.from_dict(arch) if isinstance(arch, Mapping) else arch
        if isinstance(arch, Architecture) and arch.family not in FAMILIES:
            raise unknown("family", arch.family, FAMILIES)
        self.arch = check_arch(arch, arch.family if isinstance(arch, Architecture) else FAMILIES[0])
        self.rules = RULES[self.arch.family]
        o = self._read(options)
        assert o.patch_stride is not None
        self.embed_dim = self.num_features = self.head_hidden_size = d = int(self.arch.embed_dim)
        allocated = o.allocated or {"embed_dim": d, "mlp_ratio": max(self.arch.mlp_ratio), "depth": self.arch.depth}
        self.drop_rate = o.drop_rate * d / allocated["embed_dim"]

        self.cls_token = nn.Parameter(torch.empty(1, 1, d))
        tokens = 1 + self.grid_size[0] * self.grid_size[1]
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, d)) if o.abs_pos else None
        self.patch_embed = PatchEmbed(o.in_chans, d, o.patch_size, o.patch_stride)
        rates = drop_path_rates(o.drop_path_rate, int(allocated["depth"]))
        choices = zip(self.arch.num_heads, self.arch.mlp_ratio, rates, strict=False)
        self.blocks = nn.Sequential(
            *(make_block(d, heads, ratio, rate, o, self.rules, allocated) for heads, ratio, rate in choices)
        )
        self.norm = nn.LayerNorm(d, self.rules.norm_eps) if o.pre_norm else nn.Identity()
        self.head = nn.Linear(d, o.num_classes) if o.num_classes else nn.Identity()
        self.init_weights()

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the tokens after the final norm, (B, N, d)."""
        self.check_images(x)
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)  # (B, N, d)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        x = F.dropout(x, self.drop_rate, self.training)
        for block in self.blocks:
            x = self._run(block, x)
        return self.norm(x)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for timm's layer-wise learning rates."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }
