"""Isotropic spaces: plain ViTs of one stage, with heads and MLP ratios per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_tas.errors import UserError
from lightning_tas.families import RULES
from lightning_tas.spaces.dimension import Dimension
from lightning_tas.spaces.predicates import Predicate
from lightning_tas.spaces.searchspace import SearchSpace


def isotropic(
    name: str,
    family: str = "autoformer",
    *,
    embed_dim: Any,
    depth: Any,
    num_heads: Any,
    mlp_ratio: Any,
    allocated: Mapping[str, Any] | None = None,
) -> SearchSpace:
    """A plain-ViT space from ascending lists of choices: width and depth per network, heads and MLP ratio per block.

    In ``autoprox_vit`` the qkv width is the embed dim, so heads must divide it; in ``autoformer`` it is 64 x heads.
    """
    dimensions = [
        Dimension("embed_dim", "stage", embed_dim),
        Dimension("depth", "stage", depth, step=1),
        Dimension("num_heads", "block", num_heads, step=1),
        Dimension("mlp_ratio", "block", mlp_ratio, step=0.5),
    ]
    width, ratio = dimensions[0].at(0)[0], dimensions[3].at(0)[0]
    if int(width * ratio) < 1:
        raise UserError(f"space {name!r}: embed_dim {width} with mlp_ratio {ratio} leaves no hidden unit")
    shared = family in RULES and RULES[family].head_dim is None
    predicates = [Predicate("divisible", ("embed_dim", "num_heads"))] if shared else []
    return SearchSpace(name, family, dimensions, predicates, allocated=allocated)
