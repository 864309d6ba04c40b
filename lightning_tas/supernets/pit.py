"""The stand-alone PiT of one architecture (Heo et al. 2021): stages of plain blocks with pooling between them.

Patches overlap (16 pixels every 8) and carry learned positions as a map; the class token has none. Stage s has
C_s = base_dim x heads_s channels in heads of base_dim. Between stages a convolution, depthwise with a multiplier
(3 x 3, stride 2, groups = C_s), halves the map and widens it, and a linear layer widens the class token. All tokens of
the last stage pass the final norm; the head looks at the class token (or, with ``pool="avg"``, at the patch tokens).

Shapes: B batch, (gh, gw) grid of a stage, N = 1 + gh * gw its tokens (class token first), C its width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.families import PIT, halved, widths
from lightning_tas.supernets.blocks import PatchEmbed, make_block
from lightning_tas.supernets.image_network import StandaloneNetwork, check_family, check_sizes

FAMILY = PIT.family


def stage_grids(grid: tuple[int, int], stages: int) -> list[tuple[int, int]]:
    """Patch grids of the stages: each pooling halves the sides, rounding up (27, 14, 7)."""
    grids = [grid]
    while len(grids) < stages:
        grids.append(halved(grids[-1]))
    return grids


def stage_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Stochastic depth of each block, per stage: ``rate * i / total`` for block i of `total` in the network."""
    begins = [sum(depths[:s]) for s in range(len(depths))]
    return [[rate * (begin + i) / sum(depths) for i in range(n)] for begin, n in zip(begins, depths, strict=True)]


def stage_values(value: Any, stages: int) -> list[Any]:
    """An allocated size for every stage, given per stage or once."""
    return list(value) if isinstance(value, Sequence) else [value] * stages


def stage_sizes(allocated: Mapping[str, Any], stages: int) -> list[dict[str, Any]]:
    """What a supernet's blocks of each stage are allocated for: embed_dim, num_heads, mlp_ratio and their depth."""
    heads, ratios, depths = (stage_values(allocated[key], stages) for key in ("num_heads", "mlp_ratio", "depth"))
    return [
        {"embed_dim": int(allocated["base_dim"] * h), "num_heads": int(h), "mlp_ratio": r, "depth": int(d)}
        for h, r, d in zip(heads, ratios, depths, strict=True)
    ]


def quantities(arch: Architecture) -> list[tuple[str, tuple[str, int], float]]:
    """(name in words, key and stage of the supernet's limit, value) of every size of an architecture."""
    sizes: list[tuple[str, tuple[str, int], float]] = []
    for s, (stage, width) in enumerate(zip(arch.stages, widths(arch), strict=True)):
        sizes.append((f"num_heads of stage {s}", ("num_heads", s), stage.get("num_heads", arch.get("num_heads"))))
        sizes.append((f"width of stage {s} (base_dim {arch.base_dim} x num_heads)", ("embed_dim", s), width))
        sizes.append((f"depth of stage {s}", ("depth", s), stage.depth))
    for s, i, ratio in stage_ratios(arch):
        hidden = int(ratio * widths(arch)[s])
        sizes.append((f"hidden width of block {i} of stage {s} (mlp_ratio {ratio} x width)", ("hidden", s), hidden))
    return sizes


def stage_ratios(arch: Architecture) -> list[tuple[int, int, float]]:
    """(stage, index inside it, MLP ratio) of every block; ratios may be chosen per network, stage or block."""
    places = [(s, i) for s, depth in enumerate(arch.depths) for i in range(depth)]
    return [(s, i, ratio) for (s, i), ratio in zip(places, arch.mlp_ratio, strict=True)]


def check_arch(arch: object) -> Architecture:
    """`arch` if it is a PiT of possible sizes, else `UserError` with the numbers."""
    arch = check_family(arch, FAMILY)
    dims = widths(arch)
    check_sizes(quantities(arch))
    for s, (before, after) in enumerate(pairwise(dims)):
        if after % before:
            raise UserError(
                f"width of stage {s + 1}: {after} is no multiple of {before}, that of stage {s}, which the depthwise "
                "convolution between them needs"
            )
    return arch


class Pool(nn.Module):
    """Between stages: (B, 1 + gh * gw, C) to (B, 1 + ceil(gh / 2) * ceil(gw / 2), C')."""

    def __init__(self, dim: int, out: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid_size = grid
        self.conv = nn.Conv2d(dim, out, 3, stride=2, padding=1, groups=dim)
        self.fc = nn.Linear(dim, out)

    def forward(self, x: Tensor) -> Tensor:
        token, patches = x[:, :1], x[:, 1:].transpose(1, 2).unflatten(2, self.grid_size)  # (B, C, gh, gw)
        return torch.cat([self.fc(token), self.conv(patches).flatten(2).transpose(1, 2)], dim=1)


class Stage(nn.Module):
    """The blocks of one stage."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


class PoolingTransformer(StandaloneNetwork):
    """One architecture of family "pit" with fresh weights; usage and errors as of `VisionTransformer`."""

    def __init__(self, arch: Architecture | Mapping[str, Any], **options: Any) -> None:
        super().__init__()
        self.rules = PIT
        self.arch = check_arch(Architecture.from_dict(arch) if isinstance(arch, Mapping) else arch)
        o = self._read(options)
        assert o.patch_stride is not None
        dims = widths(self.arch)
        self.embed_dim = self.num_features = self.head_hidden_size = dims[-1]
        own = {"base_dim": self.arch.base_dim, "mlp_ratio": max(self.arch.mlp_ratio), "depth": self.arch.depths}
        own["num_heads"] = [dim // self.arch.base_dim for dim in dims]
        sizes = stage_sizes(o.allocated or own, len(dims))
        self.drop_rate = o.drop_rate * dims[0] / sizes[0]["embed_dim"]

        self.cls_token = nn.Parameter(torch.empty(1, 1, dims[0]))
        self.pos_embed = nn.Parameter(torch.empty(1, dims[0], *self.grid_size)) if o.abs_pos else None
        self.patch_embed = PatchEmbed(o.in_chans, dims[0], o.patch_size, o.patch_stride)
        rates = stage_rates(o.drop_path_rate, [size["depth"] for size in sizes])
        blocks: list[list[nn.Module]] = [[] for _ in dims]
        for s, i, ratio in stage_ratios(self.arch):
            heads = dims[s] // self.arch.base_dim
            blocks[s].append(make_block(dims[s], heads, ratio, rates[s][i], o, self.rules, sizes[s]))
        grids = stage_grids(self.grid_size, len(dims))
        self.stages = nn.ModuleList(Stage(each) for each in blocks)
        self.pools = nn.ModuleList(Pool(a, b, grid) for (a, b), grid in zip(pairwise(dims), grids, strict=False))
        self.norm = nn.LayerNorm(dims[-1], self.rules.norm_eps) if o.pre_norm else nn.Identity()
        self.head = nn.Linear(dims[-1], o.num_classes) if o.num_classes else nn.Identity()
        self.init_weights()

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the last stage's tokens after the final norm, (B, N, C)."""
        self.check_images(x)
        x = self.patch_embed(x)
        if self.pos_embed is not None:
            x = x + self.pos_embed.flatten(2).transpose(1, 2)
        x = F.dropout(x, self.drop_rate, self.training)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)  # (B, N, C)
        for s, stage in enumerate(self.stages):
            x = self.pools[s - 1](x) if s else x
            assert isinstance(stage, Stage)
            for block in stage.blocks:
                x = self._run(block, x)
        return self.norm(x)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for timm's layer-wise learning rates."""
        inside = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.blocks\.(\d+)"
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            # Groups are (stage, block); 99999 is timm's mark for joining the group before.
            "blocks": [(inside, None), (r"^pools\.(\d+)", (99999,)), (r"^norm", (99999,))],
        }
