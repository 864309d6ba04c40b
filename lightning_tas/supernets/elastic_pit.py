"""The elastic PiT: one set of weights for every architecture of a PiT space.

Every layer gives a sub-network its leading channels: stage s of width C_s = base_dim x heads_s takes the first C_s of
what is allocated there. The depthwise convolution between stages has C' filters of one channel; a sub-network takes
the first C' and groups them over its own C channels, so which input a filter meets depends on the ratio C' / C, as in
the stand-alone network. The blocks are those of the plain ViTs.

Shapes: B batch, (gh, gw) grid of a stage, N = 1 + gh * gw its tokens (class token first), C its width.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.families import widths
from lightning_tas.supernets.elastic import ElasticLayerNorm, ElasticLinear, ElasticPatchEmbed
from lightning_tas.supernets.elastic_blocks import ElasticBlock
from lightning_tas.supernets.elastic_network import ElasticNetwork, Step
from lightning_tas.supernets.pit import (
    FAMILY,
    PoolingTransformer,
    check_arch,
    quantities,
    stage_grids,
    stage_rates,
    stage_ratios,
    stage_sizes,
)
from lightning_tas.supernets.registry import register_family

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


class ElasticPool(nn.Module):
    """The pooling between stages of up to `dim` and `out` channels."""

    def __init__(self, dim: int, out: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid_size = grid
        # Holds one filter of one channel for each output; how outputs share inputs is decided in `forward`.
        self.conv = nn.Conv2d(out, out, 3, stride=2, padding=1, groups=out)
        self.fc = ElasticLinear(dim, out)

    def forward(self, x: Tensor, out: int) -> Tensor:
        """(B, 1 + gh * gw, C) to (B, 1 + ceil(gh / 2) * ceil(gw / 2), out)."""
        token, patches = x[:, :1], x[:, 1:].transpose(1, 2).unflatten(2, self.grid_size)  # (B, C, gh, gw)
        assert self.conv.bias is not None
        patches = F.conv2d(patches, self.conv.weight[:out], self.conv.bias[:out], 2, 1, groups=x.shape[-1])
        return torch.cat([self.fc(token, out), patches.flatten(2).transpose(1, 2)], dim=1)


class ElasticStage(nn.Module):
    """The blocks of one stage, up to the allocated depth."""

    def __init__(self, blocks: list[ElasticBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


@register_family(FAMILY, network=PoolingTransformer)
class ElasticPiT(ElasticNetwork):
    """The supernet of a PiT space: ``allocated`` base_dim x num_heads channels in each stage."""

    families = (FAMILY,)
    _alone = PoolingTransformer

    def __init__(self, space: SearchSpace, **options: Any) -> None:
        super().__init__(space, **options)
        o = self._options
        assert o.patch_stride is not None
        self.sizes = stage_sizes(self.allocated, space.stages)
        dims = [size["embed_dim"] for size in self.sizes]
        self.embed_dim = self.num_features = self.head_hidden_size = dims[-1]
        self.cls_token = nn.Parameter(torch.empty(1, 1, dims[0]))
        self.pos_embed = nn.Parameter(torch.empty(1, dims[0], *self.grid_size)) if o.abs_pos else None
        self.patch_embed = ElasticPatchEmbed(o.in_chans, dims[0], o.patch_size, o.patch_stride)
        rates = stage_rates(o.drop_path_rate, [size["depth"] for size in self.sizes])
        self.stages = nn.ModuleList(
            ElasticStage([ElasticBlock(size, o, self.rules, rate) for rate in each])
            for size, each in zip(self.sizes, rates, strict=True)
        )
        self.pools = nn.ModuleList(
            ElasticPool(a, b, grid) for (a, b), grid in zip(pairwise(dims), self.stage_grids, strict=False)
        )
        self.norm = ElasticLayerNorm(dims[-1], self.rules.norm_eps) if o.pre_norm else nn.Identity()
        self.head: nn.Module = ElasticLinear(dims[-1], o.num_classes) if o.num_classes else nn.Identity()
        self.init_weights()

    @property
    def stage_blocks(self) -> list[nn.ModuleList]:
        """The blocks of every stage."""
        return [stage.blocks for stage in self.stages]  # type: ignore[misc]

    @property
    def stage_grids(self) -> list[tuple[int, int]]:
        """The patch grid of every stage."""
        return stage_grids(self.grid_size, self.space.stages)

    def check(self, arch: Architecture) -> None:
        """`UserError` naming quantity, value and maximum when the allocated weights cannot hold `arch`."""
        check_arch(arch)
        if len(arch.stages) != len(self.sizes):
            raise UserError(f"stages: {len(arch.stages)}, but supernet {self.space.name!r} has {len(self.sizes)}")
        for name, (key, s), value in quantities(arch):
            size = self.sizes[s]
            limits = {**size, "hidden": int(size["mlp_ratio"] * size["embed_dim"]), "num_heads": value}
            self._refuse(name, value, limits[key])

    def embed(self, x: Tensor, dim: int) -> Tensor:
        """Images (B, in_chans, H, W) to the first block's tokens (B, N, dim)."""
        self.check_images(x)
        x = self.patch_embed(x, dim)
        if self.pos_embed is not None:
            x = x + self.pos_embed[:, :dim].flatten(2).transpose(1, 2)
        x = F.dropout(x, self._options.drop_rate * dim / self.sizes[0]["embed_dim"], self.training)
        return torch.cat([self.cls_token[..., :dim].expand(x.shape[0], -1, -1), x], dim=1)  # (B, N, C)

    def steps(self, arch: Architecture) -> list[Step]:
        """The forward pass of `arch` from images up to the last block's tokens, step by step."""
        self.check(arch)
        dims, blocks = widths(arch), self.stage_blocks
        found = [Step(("embed", dims[0]), partial(self.embed, dim=dims[0]))]
        for s, i, ratio in stage_ratios(arch):
            if s and not i:
                found.append(Step(("pool", s, dims[s]), partial(self._pool, s - 1, dims[s])))
            heads = dims[s] // arch.base_dim
            found.append(Step((s, i, heads, ratio), partial(self._block, blocks[s][i], heads, ratio)))
        return found

    def _pool(self, place: int, dim: int, x: Tensor) -> Tensor:
        pooled: Tensor = self.pools[place](x, dim)
        return pooled

    def finish(self, x: Tensor) -> Tensor:
        """The last block's tokens after the final norm, (B, N, C)."""
        return self.norm(x)

    @torch.no_grad()
    def subnet_state(self, arch: Architecture) -> dict[str, Tensor]:
        """Copies of the weights that `arch` uses, as the state dict of its stand-alone network."""
        self.check(arch)
        dims = widths(arch)
        state = {"cls_token": self.cls_token[..., : dims[0]]}
        if self.pos_embed is not None:
            state["pos_embed"] = self.pos_embed[:, : dims[0]]
        state |= {f"patch_embed.proj.{k}": v[: dims[0]] for k, v in self.patch_embed.proj.named_parameters()}
        blocks = self.stage_blocks
        for s, i, ratio in stage_ratios(arch):
            block = blocks[s][i]
            assert isinstance(block, ElasticBlock)
            cut = block.cut(dims[s], dims[s] // arch.base_dim, ratio, self.bias_rule)
            state |= {f"stages.{s}.blocks.{i}.{k}": v for k, v in cut.items()}
        for s, (dim, out) in enumerate(pairwise(dims)):
            pool = self.pools[s]
            assert isinstance(pool, ElasticPool)
            state |= {f"pools.{s}.conv.{k}": v[:out] for k, v in pool.conv.named_parameters()}
            state |= {
                f"pools.{s}.fc.{k}": v[:out, :dim] if k == "weight" else v[:out] for k, v in pool.fc.named_parameters()
            }
        state |= {f"norm.{k}": v[: dims[-1]] for k, v in self.norm.named_parameters()}
        state |= {f"head.{k}": v[:, : dims[-1]] if k == "weight" else v for k, v in self.head.named_parameters()}
        return self.copied(state)
