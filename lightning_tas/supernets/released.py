"""What a network is whose weights came without its settings: sizes and options, read off names and shapes.

All functions take a state dict under our names (`checkpoints.our_names`). `KeyError` for a network of another kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from lightning_tas.architecture import Architecture, Block, Stage

HEAD_DIM = 64
"""Channels of a head: of AutoFormer's networks, and of timm's plain ViTs, whose weights do not tell."""


def supernet_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a supernet of plain ViTs allocates."""
    width = len(state["patch_embed.proj.weight"])
    return {
        "embed_dim": width,
        "depth": 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
        "num_heads": state["blocks.0.attn.qkv.weight"].shape[0] // (3 * HEAD_DIM),
        "mlp_ratio": state["blocks.0.mlp.fc1.weight"].shape[0] / width,
    }


def build_options(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Build options of a network, of square images."""
    in_chans, patch = state["patch_embed.proj.weight"].shape[1:3]
    table = next((value for name, value in state.items() if name.endswith("rel_pos_k.vertical")), None)
    positions = state.get("pos_embed")
    stride = patch
    if positions is not None and positions.dim() == 4:  # a PiT's map
        grid, stride = positions.shape[-1], max(1, patch // 2)
    elif positions is not None:
        grid = isqrt(positions.shape[1] - 1)
    else:
        grid = 224 // patch if table is None else (len(table) - 2) // 2
    return {
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
        "in_chans": in_chans,
        "patch_size": patch,
        "patch_stride": stride,
        "img_size": (grid - 1) * stride + patch,
        "relative_position": table is not None,
        "abs_pos": positions is not None,
        "qkv_bias": any(name.endswith("attn.qkv.bias") for name in state),
    }


def plain_vit(state: Mapping[str, Tensor]) -> Architecture:
    """The architecture of a plain ViT of timm, with heads of `HEAD_DIM` channels."""
    width = len(state["patch_embed.proj.weight"])
    hidden = {int(match[1]): len(value) for name, value in state.items() if (match := _FC1.match(name))}
    if not hidden or sorted(hidden) != list(range(len(hidden))):
        raise KeyError("blocks.0.mlp.fc1.weight")
    blocks = [Block(num_heads=max(1, width // HEAD_DIM), mlp_ratio=hidden[i] / width) for i in range(len(hidden))]
    return Architecture("autoprox_vit", [Stage(blocks, embed_dim=width)])


def interleaved(state: Mapping[str, Tensor], bias_rule: str) -> dict[str, Tensor]:
    """The weights of a stand-alone network as those of a supernet of its size, whose queries, keys and values alternate
    row by row (`elastic.ElasticQKV`); biases do so where its `bias_rule` regroups them.
    """
    found = dict(state)
    for name, value in state.items():
        if name.endswith("attn.qkv.weight") or (name.endswith("attn.qkv.bias") and bias_rule == "regroup"):
            found[name] = value.unflatten(0, (3, -1)).transpose(0, 1).flatten(0, 1)
    return found


_FC1 = re.compile(r"blocks\.(\d+)\.mlp\.fc1\.weight$")
