"""Networks that papers published, by name: what `arch=autoformer_t` means.

Sources: AutoFormer (https://arxiv.org/abs/2107.00651), its released configurations; PreNAS
(https://arxiv.org/abs/2304.14636), its released candidate lists; TF-TAS (https://arxiv.org/abs/2203.12217), its
released configurations (its table of PiTs lists other sizes); PiT (https://arxiv.org/abs/2103.16302). Parameters with
1000 classes, 224 px and patches of 16 are in `PARAMS`.
"""

from __future__ import annotations

import os

from lightning_tas.architecture import Architecture, Block, Stage
from lightning_tas.errors import UserError, nearest, neighbour

_HEADS_AND_RATIOS: dict[str, tuple[int, list[int], list[float]]] = {
    "autoformer_t": (192, [3] * 10 + [4, 3, 3], [3.5, 3.5, 3, 3.5, 3, 3, 4, 4, 3.5, 4, 3.5, 4, 3.5]),
    "autoformer_s": (
        384,
        [6, 6, 5, 7, 5, 5, 5, 6, 6, 7, 7, 6, 7],
        [3, 3.5, 3, 3.5, 4, 4, 4, 4, 4, 4, 4, 3.5, 4],
    ),
    "autoformer_b": (
        576,
        [9, 9, 9, 9, 9, 10, 9, 9, 10, 9, 10, 9, 9, 10],
        [3.5, 3.5, 4, 3.5, 4, 3.5, 3.5, 3, 4, 4, 3, 4, 3, 3.5],
    ),
    "prenas_ti": (192, [4, 4, 4, 4, 3, 3, 3, 3, 3, 4, 3, 4], [4, 4, 4, 4, 4, 3.5, 3.5, 4, 4, 3.5, 4, 4]),
    "prenas_s": (
        384,
        [7, 7, 7, 7, 5, 7, 7, 5, 6, 5, 5, 6, 5],
        [4, 4, 3.5, 4, 3.5, 4, 3.5, 3.5, 4, 4, 3, 4, 3.5],
    ),
    "prenas_b": (
        576,
        [9, 9, 10, 9, 9, 10, 9, 9, 9, 9, 9, 9, 10, 9],
        [3.5, 4, 3.5, 3.5, 3.5, 4, 3.5, 3.5, 3.5, 3.5, 4, 3, 3.5, 4],
    ),
    "tf_tas_ti": (
        192,
        [4, 3, 3, 3, 3, 4, 4, 3, 3, 3, 4, 3, 3],
        [3.5, 4, 3.5, 3.5, 4, 3.5, 3.5, 3.5, 4, 4, 4, 4, 3.5],
    ),
    "tf_tas_s": (
        384,
        [6, 6, 6, 6, 7, 6, 5, 7, 5, 5, 5, 7, 6, 7],
        [4, 4, 4, 3, 4, 3, 3, 3.5, 4, 3.5, 3.5, 4, 3, 3.5],
    ),
    "tf_tas_b": (
        576,
        [9, 10, 10, 10, 10, 10, 10, 9, 9, 10, 9, 9, 9, 9, 9],
        [3, 3.5, 4, 4, 3, 4, 3, 3, 3.5, 3, 3, 3.5, 4, 3, 4],
    ),
}

# PiTs: base_dim, depth and heads of the three stages, MLP ratio.
_PITS: dict[str, tuple[int, list[int], list[int], int]] = {
    "pit_ti": (32, [2, 6, 4], [2, 4, 8], 4),
    "pit_xs": (48, [2, 6, 4], [2, 4, 8], 4),
    "pit_s": (48, [2, 6, 4], [3, 6, 12], 4),
    "tf_tas_pit_ti": (40, [2, 4, 4], [2, 4, 8], 2),
    "tf_tas_pit_xs": (56, [1, 4, 2], [2, 8, 8], 2),
    "tf_tas_pit_s": (36, [1, 4, 4], [3, 12, 12], 6),
}


def _pit(base_dim: int, depths: list[int], heads: list[int], mlp_ratio: int) -> Architecture:
    stages = [Stage([Block()] * depth, num_heads=h) for depth, h in zip(depths, heads, strict=True)]
    return Architecture("pit", stages, base_dim=base_dim, mlp_ratio=mlp_ratio)


PUBLISHED: dict[str, Architecture] = {
    name: Architecture.vit(embed_dim=width, num_heads=heads, mlp_ratio=ratios, family="autoformer")
    for name, (width, heads, ratios) in _HEADS_AND_RATIOS.items()
} | {name: _pit(*sizes) for name, sizes in _PITS.items()}

PARAMS: dict[str, int] = {
    "autoformer_t": 5_867_944,
    "autoformer_s": 22_891_432,
    "autoformer_b": 53_691_688,
    "prenas_ti": 5_994_760,
    "prenas_s": 22_989_928,
    "prenas_b": 53_876_104,
    "tf_tas_ti": 6_200_776,
    "tf_tas_s": 23_935_336,
    "tf_tas_b": 56_470_792,
    "pit_ti": 4_847_272,
    "pit_xs": 10_618_888,
    "pit_s": 23_461_912,
    "tf_tas_pit_ti": 4_732_120,
    "tf_tas_pit_xs": 10_643_464,
    "tf_tas_pit_s": 24_966_496,
}

# The space whose supernet each network lives in.
SPACES: dict[str, str] = {
    name: {"t": "autoformer_tiny", "s": "autoformer_small", "b": "autoformer_base"}[name.rpartition("_")[2][0]]
    for name in _HEADS_AND_RATIOS
} | {name: name.removeprefix("tf_tas_") for name in _PITS}


def check_name(given: str) -> None:
    """`UserError` where ``arch=given`` names neither a published network, nor a file or folder, `@LABEL` or not."""
    path = given.rpartition("@")[0] if "@" in given else given
    if path in PUBLISHED or os.path.exists(path):
        return
    match = neighbour(path) if os.sep in path else nearest(path, PUBLISHED)
    raise UserError(
        f"arch: {given!r} is neither a file, a run folder, nor a published architecture; "
        f"valid names: {', '.join(PUBLISHED)}" + (f". Did you mean {match!r}?" if match else "")
    )
