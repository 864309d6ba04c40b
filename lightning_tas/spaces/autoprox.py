"""The space of Auto-Prox's "AutoFormer" benchmark: AutoFormer-Tiny's choices, realised by another class of networks.

Its networks are plain ViTs (family "autoprox_vit"): queries as wide as the tokens, no relative position.
"""

from __future__ import annotations

from typing import Any

from lightning_tas.spaces.plain import isotropic
from lightning_tas.spaces.registry import register
from lightning_tas.spaces.searchspace import SearchSpace


@register("autoprox_autoformer")
def autoprox_autoformer(depths: Any = (12, 13, 14)) -> SearchSpace:
    """1,056,964,608 plain ViTs of 5.3 to 10.2 M parameters, of which ViT-Bench-101 knows a hundred."""
    return isotropic(
        "autoprox_autoformer",
        "autoprox_vit",
        embed_dim=(192, 216, 240),
        depth=depths,
        num_heads=(3, 4),
        mlp_ratio=(3.5, 4),
    )
