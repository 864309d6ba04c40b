"""Networks that papers published, by name: what `arch=autoformer_t` means.

Sources: AutoFormer (https://arxiv.org/abs/2107.00651), its released configurations; PreNAS
(https://arxiv.org/abs/2304.14636), its released candidate lists; TF-TAS (https://arxiv.org/abs/2203.12217), its
released configurations. Parameters with 1000 classes, 224 px and patches of 16 are in `PARAMS`.
"""

from __future__ import annotations

from lightning_tas.architecture import Architecture

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

PUBLISHED: dict[str, Architecture] = {
    name: Architecture.vit(embed_dim=width, num_heads=heads, mlp_ratio=ratios, family="autoformer")
    for name, (width, heads, ratios) in _HEADS_AND_RATIOS.items()
}

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
}

# The space whose supernet each network lives in.
SPACES: dict[str, str] = {
    name: {"t": "autoformer_tiny", "s": "autoformer_small", "b": "autoformer_base"}[name.rpartition("_")[2][0]]
    for name in PUBLISHED
}
