"""The elastic ViT as the spec reads, with loops over heads and (N, N, 64) tensors: what fast code must equal.

Works on a state dict in the names of `ElasticViT`, shares no code with the package, and is meant for tiny float64 nets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def offsets(gh: int, gw: int) -> tuple[Tensor, Tensor]:
    """Table rows (N, N) of query i and key j: 0 with the class token, else clip(key - query) + side + 1."""
    n = 1 + gh * gw
    vertical, horizontal = torch.zeros(n, n, dtype=torch.long), torch.zeros(n, n, dtype=torch.long)
    for i in range(1, n):
        for j in range(1, n):
            rows = (j - 1) // gw - (i - 1) // gw
            columns = (j - 1) % gw - (i - 1) % gw
            vertical[i, j] = max(-gh, min(gh, rows)) + gh + 1
            horizontal[i, j] = max(-gw, min(gw, columns)) + gw + 1
    return vertical, horizontal


def attention(q: Tensor, k: Tensor, v: Tensor, r_k: Tensor | None, r_v: Tensor | None) -> Tensor:
    """One head: q, k, v (B, N, 64), r (N, N, 64) -> (B, N, 64)."""
    logits = torch.einsum("bnd,bmd->bnm", q, k)
    if r_k is not None:
        logits = logits + torch.einsum("bnd,nmd->bnm", q, r_k)
    weights = torch.softmax(logits / 8, dim=-1)
    out = torch.einsum("bnm,bmd->bnd", weights, v)
    if r_v is not None:
        out = out + torch.einsum("bnm,nmd->bnd", weights, r_v)
    return out


def forward(
    state: Mapping[str, Tensor], arch: Any, allocated: Mapping[str, Any], options: Mapping[str, Any], x: Tensor
) -> Tensor:
    """Logits of `arch` cut from the supernet `state`; `options` are the keys of `ElasticViT.options`."""
    d = arch.embed_dim
    patch = options["patch_size"]
    gh, gw = options["img_size"][0] // patch, options["img_size"][1] // patch

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (d,), state[f"{name}.weight"][:d], state[f"{name}.bias"][:d], 1e-5)

    x = F.conv2d(x, state["patch_embed.proj.weight"][:d], state["patch_embed.proj.bias"][:d], stride=patch)
    x = torch.stack([x[:, :, i, j] for i in range(gh) for j in range(gw)], dim=1)
    x = torch.cat([state["cls_token"][:, :, :d].repeat(len(x), 1, 1), x], dim=1)
    if options["abs_pos"]:
        x = x + state["pos_embed"][:, :, :d]
    vertical, horizontal = offsets(gh, gw)
    for i, (heads, ratio) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
        name = f"blocks.{i}"
        y = norm(x, f"{name}.norm1") if options["pre_norm"] else x
        y = _attention_layer(state, name, y, heads, allocated, options, (vertical, horizontal))
        x = x + y if options["pre_norm"] else norm(x + y, f"{name}.norm1")
        y = norm(x, f"{name}.norm2") if options["pre_norm"] else x
        f = int(ratio * d)
        y = y @ state[f"{name}.mlp.fc1.weight"][:f, :d].T + state[f"{name}.mlp.fc1.bias"][:f]
        y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
        y = y @ state[f"{name}.mlp.fc2.weight"][:d, :f].T + state[f"{name}.mlp.fc2.bias"][:d]
        y = y * allocated["mlp_ratio"] / ratio if options["scale"] else y
        x = x + y if options["pre_norm"] else norm(x + y, f"{name}.norm2")
    x = norm(x, "norm") if options["pre_norm"] else x
    x = x[:, 1:].mean(1) if options["pool"] == "avg" else x[:, 0]
    return x @ state["head.weight"][:, :d].T + state["head.bias"]


def _attention_layer(
    state: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    heads: int,
    allocated: Mapping[str, Any],
    options: Mapping[str, Any],
    index: tuple[Tensor, Tensor],
) -> Tensor:
    d, q = x.shape[-1], 64 * heads
    weight = state[f"{name}.attn.qkv.weight"][: 3 * q, :d]
    components = [x @ weight[c::3].T for c in range(3)]
    if options["qkv_bias"]:
        bias = state[f"{name}.attn.qkv.bias"][: 3 * q]
        parts = [bias[c::3] if options["bias_rule"] == "regroup" else bias[c * q : (c + 1) * q] for c in range(3)]
        components = [y + part for y, part in zip(components, parts, strict=True)]
    tables: list[Tensor | None] = [None, None]
    if options["relative_position"]:
        tables = [
            state[f"{name}.attn.{kind}.vertical"][index[0]] + state[f"{name}.attn.{kind}.horizontal"][index[1]]
            for kind in ("rel_pos_k", "rel_pos_v")
        ]
    outs = []
    for h in range(heads):
        cut = slice(64 * h, 64 * (h + 1))
        outs.append(attention(*(y[..., cut] for y in components), *tables))
    out = torch.cat(outs, dim=-1)
    out = out * allocated["embed_dim"] / q if options["scale"] else out
    return out @ state[f"{name}.attn.proj.weight"][:d, :q].T + state[f"{name}.attn.proj.bias"][:d]
