"""The elastic ViT: one set of weights for every architecture of a space of plain ViTs (weight entanglement).

``net(x, arch)`` is stateless: the sub-network is an argument, its weights are cut from the shared ones inside
`forward` (AutoFormer, section 3; PreNAS uses the same network). `subnet(arch)` copies them into a stand-alone network
whose logits are the same bits on a CPU. Families: "autoformer", and "autoprox_vit" without relative position, whose
heads share the width instead of having 64 channels each.

Shapes: B batch, C channels, (gh, gw) patch grid, N = 1 + gh * gw tokens (class token first), D allocated width,
d width of the sub-network.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.families import AUTOFORMER, AUTOPROX_VIT
from lightning_tas.supernets.elastic import ElasticLayerNorm, ElasticLinear, ElasticPatchEmbed
from lightning_tas.supernets.elastic_blocks import ElasticBlock
from lightning_tas.supernets.elastic_network import ElasticNetwork, Step
from lightning_tas.supernets.registry import register_family
from lightning_tas.supernets.vision_transformer import (
    FAMILIES,
    VisionTransformer,
    check_arch,
    drop_path_rates,
    quantities,
)

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


@register_family(AUTOFORMER.family, network=VisionTransformer)
@register_family(AUTOPROX_VIT.family, network=VisionTransformer)
class ElasticViT(ElasticNetwork):
    """The supernet of a space of plain ViTs."""

    families = FAMILIES
    _alone = VisionTransformer

    def __init__(self, space: SearchSpace, **options: Any) -> None:
        super().__init__(space, **options)
        o = self._options
        assert o.patch_stride is not None
        self.embed_dim = self.num_features = self.head_hidden_size = dim = int(self.allocated["embed_dim"])
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        tokens = 1 + self.grid_size[0] * self.grid_size[1]
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, dim)) if o.abs_pos else None
        self.patch_embed = ElasticPatchEmbed(o.in_chans, dim, o.patch_size, o.patch_stride)
        rates = drop_path_rates(o.drop_path_rate, int(self.allocated["depth"]))
        self.blocks = nn.ModuleList(ElasticBlock(self.allocated, o, self.rules, rate) for rate in rates)
        self.norm = ElasticLayerNorm(dim, self.rules.norm_eps) if o.pre_norm else nn.Identity()
        self.head: nn.Module = ElasticLinear(dim, o.num_classes) if o.num_classes else nn.Identity()
        self.init_weights()

    @property
    def stage_blocks(self) -> list[nn.ModuleList]:
        """The blocks of the one stage."""
        return [self.blocks]

    @property
    def stage_grids(self) -> list[tuple[int, int]]:
        """The patch grid."""
        return [self.grid_size]

    def check(self, arch: Architecture) -> None:
        """`UserError` naming quantity, value and maximum when the allocated weights cannot hold `arch`."""
        check_arch(arch, self.space.family)
        limits = {**self.allocated, "hidden": int(self.allocated["mlp_ratio"] * self.allocated["embed_dim"])}
        if self.rules.head_dim is None:  # the width bounds the queries, however many heads share them
            del limits["num_heads"]
        for name, key, value in quantities(arch):
            self._refuse(name, value, limits.get(key, value))

    def embed(self, x: Tensor, embed_dim: int) -> Tensor:
        """Images (B, C, H, W) to the first block's tokens (B, N, embed_dim)."""
        self.check_images(x)
        x = self.patch_embed(x, embed_dim)
        x = torch.cat([self.cls_token[..., :embed_dim].expand(x.shape[0], -1, -1), x], dim=1)  # (B, N, d)
        if self.pos_embed is not None:
            x = x + self.pos_embed[..., :embed_dim]
        return F.dropout(x, self._options.drop_rate * embed_dim / self.embed_dim, self.training)

    def steps(self, arch: Architecture) -> list[Step]:
        """The forward pass of `arch` from images up to the last block's tokens, step by step."""
        self.check(arch)
        found = [Step(("embed", arch.embed_dim), partial(self.embed, embed_dim=arch.embed_dim))]
        for i, (heads, ratio) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
            found.append(Step((i, heads, ratio), partial(self._block, self.blocks[i], heads, ratio)))
        return found

    def finish(self, x: Tensor) -> Tensor:
        """The last block's tokens after the final norm."""
        return self.norm(x)

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
            state |= {f"blocks.{i}.{k}": v for k, v in block.cut(d, heads, ratio, self.bias_rule).items()}
        state |= {f"norm.{k}": v[:d] for k, v in self.norm.named_parameters()}
        state |= {f"head.{k}": v[:, :d] if k == "weight" else v for k, v in self.head.named_parameters()}
        return self.copied(state)
