"""The PiT spaces of T-Razor / TF-TAS (Heo et al. 2021 for the network), and the part that ViT-Bench-101 samples.

Per network: base_dim (channels of a head, hence of every stage per head) and the MLP ratio; per stage: depth and heads.
Stages are joined by depthwise convolutions, which need the width of each to be a multiple of the one before.
"""

from __future__ import annotations

from typing import Any

from lightning_tas.spaces.dimension import Dimension
from lightning_tas.spaces.predicates import Predicate
from lightning_tas.spaces.registry import register
from lightning_tas.spaces.searchspace import SearchSpace

STAGES = 3
DEPTHS = ((1, 2, 3), (4, 6, 8), (2, 4, 6))
RATIOS = (2, 4, 6, 8)


def pit_space(name: str, base_dim: Any, num_heads: Any, *rules: Predicate, divisible: bool = True) -> SearchSpace:
    """A PiT space of three stages; without `divisible` it is the papers' whole product, most of it no network."""
    dimensions = [
        Dimension("base_dim", "network", base_dim, step=8),
        Dimension("mlp_ratio", "network", RATIOS, step=2),
        Dimension("num_heads", "stage", num_heads),
        Dimension("depth", "stage", DEPTHS, step=1),
    ]
    needed = (Predicate("divides_next", ("num_heads",)),) if divisible else ()
    return SearchSpace(name, "pit", dimensions, (*needed, *rules), stages=STAGES)


@register("pit_ti")
def pit_ti(divisible: bool = True) -> SearchSpace:
    """PiT-Ti: 4,320 networks of 0.14 to 35.9 M parameters; 11,664 choices with those that cannot be built."""
    return pit_space("pit_ti", (16, 24, 32, 40), (2, 4, 8), divisible=divisible)


@register("pit_xs")
def pit_xs(divisible: bool = True) -> SearchSpace:
    """PiT-XS: wider heads than PiT-Ti; 4,320 networks of 0.58 to 91.1 M parameters."""
    return pit_space("pit_xs", (40, 48, 56, 64), (2, 4, 8), divisible=divisible)


@register("pit_s")
def pit_s(divisible: bool = True) -> SearchSpace:
    """PiT-S: 3, 6 or 12 heads; 4,320 networks of 0.96 to 257.7 M parameters."""
    return pit_space("pit_s", (36, 48, 60, 72), (3, 6, 12), divisible=divisible)


@register("autoprox_pit")
def autoprox_pit() -> SearchSpace:
    """The 1,600 networks of PiT-Ti that Auto-Prox samples: 12 to 14 blocks, for its distillation looks at twelve."""
    return pit_space("autoprox_pit", (16, 24, 32, 40), (2, 4, 8), Predicate("total_between", ("depth", 12, 14)))
