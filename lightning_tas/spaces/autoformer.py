"""The AutoFormer spaces (Chen et al. 2021, Table 1) that PreNAS, TF-TAS and ETAS search too."""

from __future__ import annotations

from typing import Any

from lightning_tas.spaces.plain import isotropic
from lightning_tas.spaces.registry import register
from lightning_tas.spaces.searchspace import SearchSpace

# What the released supernets allocate: the width is 64 x the most heads, more than any choice uses.
_TINY = {"embed_dim": 256, "num_heads": 4, "mlp_ratio": 4, "depth": 14}
_SMALL = {"embed_dim": 448, "num_heads": 7, "mlp_ratio": 4, "depth": 14}
_BASE = {"embed_dim": 640, "num_heads": 10, "mlp_ratio": 4, "depth": 16}


@register("autoformer_tiny")
def autoformer_tiny(depths: Any = (12, 13, 14)) -> SearchSpace:
    """AutoFormer tiny: 5.4 to 10.5 M parameters, 1,056,964,608 architectures."""
    return isotropic(
        "autoformer_tiny",
        embed_dim=(192, 216, 240),
        depth=depths,
        num_heads=(3, 4),
        mlp_ratio=(3.5, 4),
        allocated=_TINY,
    )


@register("autoformer_small")
def autoformer_small(depths: Any = (12, 13, 14)) -> SearchSpace:
    """AutoFormer small: 13.1 to 34.8 M parameters; PreNAS' second configuration has depths 13 and 14 only."""
    return isotropic(
        "autoformer_small",
        embed_dim=(320, 384, 448),
        depth=depths,
        num_heads=(5, 6, 7),
        mlp_ratio=(3, 3.5, 4),
        allocated=_SMALL,
    )


@register("autoformer_base")
def autoformer_base(depths: Any = (14, 15, 16), base_heads: Any = (9, 10)) -> SearchSpace:
    """AutoFormer base as released: 41.7 to 76.9 M parameters; the papers' tables print `base_heads` (8, 9, 10)."""
    return isotropic(
        "autoformer_base",
        embed_dim=(528, 576, 624),
        depth=depths,
        num_heads=base_heads,
        mlp_ratio=(3, 3.5, 4),
        allocated=_BASE,
    )


@register("autoformer_base_paper")
def autoformer_base_paper(depths: Any = (14, 15, 16)) -> SearchSpace:
    """AutoFormer base as the papers' tables print it, with 8 heads too: 39.8 to 76.9 M parameters."""
    return autoformer_base(depths, base_heads=(8, 9, 10)).with_choices(name="autoformer_base_paper")
