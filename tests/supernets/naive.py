"""The supernets as the spec reads, with loops over heads and (N, N, 64) tensors: what fast code must equal.

Works on a state dict in the names of `ElasticViT` or `ElasticPiT`, shares no code with the package, and is meant for
tiny float64 nets.
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
    """One head: q, k, v (B, N, D), r (N, N, 64) where there is one -> (B, N, D)."""
    logits = torch.einsum("bnd,bmd->bnm", q, k)
    if r_k is not None:
        logits = logits + torch.einsum("bnd,nmd->bnm", q, r_k)
    weights = torch.softmax(logits / q.shape[-1] ** 0.5, dim=-1)
    out = torch.einsum("bnm,bmd->bnd", weights, v)
    if r_v is not None:
        out = out + torch.einsum("bnm,nmd->bnd", weights, r_v)
    return out


def forward(
    state: Mapping[str, Tensor], arch: Any, allocated: Mapping[str, Any], options: Mapping[str, Any], x: Tensor
) -> Tensor:
    """Logits of `arch` cut from the supernet `state`; `options` are the keys of ``net.options``."""
    return (pit if arch.family == "pit" else vit)(state, arch, allocated, options, x)


def vit(
    state: Mapping[str, Tensor], arch: Any, allocated: Mapping[str, Any], options: Mapping[str, Any], x: Tensor
) -> Tensor:
    """A plain ViT: AutoFormer's (64 channels per head, eps 1e-5) or Auto-Prox's (d / heads channels, eps 1e-6)."""
    d = arch.embed_dim
    eps = 1e-5 if arch.family == "autoformer" else 1e-6
    patch = options["patch_size"]
    gh, gw = options["img_size"][0] // patch, options["img_size"][1] // patch
    x = F.conv2d(x, state["patch_embed.proj.weight"][:d], state["patch_embed.proj.bias"][:d], stride=patch)
    x = torch.stack([x[:, :, i, j] for i in range(gh) for j in range(gw)], dim=1)
    x = torch.cat([state["cls_token"][:, :, :d].repeat(len(x), 1, 1), x], dim=1)
    if options["abs_pos"]:
        x = x + state["pos_embed"][:, :, :d]
    index = offsets(gh, gw)
    for i, (heads, ratio) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
        q = 64 * heads if arch.family == "autoformer" else d
        sizes = (heads, q, ratio, allocated["embed_dim"], allocated["mlp_ratio"])
        x = block(state, f"blocks.{i}", x, sizes, options, index, eps)
    x = norm(state, "norm", x, eps) if options["pre_norm"] else x
    x = x[:, 1:].mean(1) if options["pool"] == "avg" else x[:, 0]
    return x @ state["head.weight"][:, :d].T + state["head.bias"]


def pit(
    state: Mapping[str, Tensor], arch: Any, allocated: Mapping[str, Any], options: Mapping[str, Any], x: Tensor
) -> Tensor:
    """PiT: a map and a class token, kept apart; joined for the blocks of a stage, pooled apart between stages."""
    dims = [arch.base_dim * stage.num_heads for stage in arch.stages]
    d = dims[0]
    weight, bias = state["patch_embed.proj.weight"][:d], state["patch_embed.proj.bias"][:d]
    x = F.conv2d(x, weight, bias, stride=options["patch_stride"])
    if options["abs_pos"]:
        x = x + state["pos_embed"][:, :d]
    token = state["cls_token"][:, :, :d].repeat(len(x), 1, 1)
    block_of_net = 0
    for s, stage in enumerate(arch.stages):
        d = dims[s]
        if s:
            times = d // dims[s - 1]
            pooled = []
            for o in range(d):  # output o looks at input o // times alone
                at = slice(o // times, o // times + 1)
                kernel = state[f"pools.{s - 1}.conv.weight"][o : o + 1]
                pooled.append(F.conv2d(x[:, at], kernel, stride=2, padding=1) + state[f"pools.{s - 1}.conv.bias"][o])
            x = torch.cat(pooled, dim=1)
            weight = state[f"pools.{s - 1}.fc.weight"][:d, : dims[s - 1]]
            token = token @ weight.T + state[f"pools.{s - 1}.fc.bias"][:d]
        gh, gw = x.shape[2:]
        tokens = torch.cat([token, *(x[:, :, i, j][:, None] for i in range(gh) for j in range(gw))], dim=1)
        widest = allocated["base_dim"] * allocated["num_heads"][s]
        for b in range(stage.depth):
            sizes = (stage.num_heads, d, arch.mlp_ratio[block_of_net], widest, allocated["mlp_ratio"])
            tokens = block(state, f"stages.{s}.blocks.{b}", tokens, sizes, options, None, 1e-6)
            block_of_net += 1
        token = tokens[:, :1]
        rows = [torch.stack([tokens[:, 1 + i * gw + j] for j in range(gw)], dim=2) for i in range(gh)]
        x = torch.stack(rows, dim=2)
    if options["pool"] == "avg":
        token = x.flatten(2).transpose(1, 2)
    token = norm(state, "norm", token, 1e-6) if options["pre_norm"] else token
    return token.mean(1) @ state["head.weight"][:, :d].T + state["head.bias"]


def norm(state: Mapping[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    """LayerNorm over the width of `x`."""
    d = x.shape[-1]
    return F.layer_norm(x, (d,), state[f"{name}.weight"][:d], state[f"{name}.bias"][:d], eps)


def block(
    state: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    sizes: tuple[int, int, float, int, float],
    options: Mapping[str, Any],
    index: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """One block; `sizes`: heads, query width, MLP ratio, and what is allocated: width and MLP ratio."""
    heads, q, ratio, widest, largest = sizes
    d, pre = x.shape[-1], options["pre_norm"]
    y = norm(state, f"{name}.norm1", x, eps) if pre else x
    y = _attention_layer(state, name, y, heads, q, widest, options, index)
    x = x + y if pre else norm(state, f"{name}.norm1", x + y, eps)
    y = norm(state, f"{name}.norm2", x, eps) if pre else x
    f = int(ratio * d)
    y = y @ state[f"{name}.mlp.fc1.weight"][:f, :d].T + state[f"{name}.mlp.fc1.bias"][:f]
    y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
    y = y @ state[f"{name}.mlp.fc2.weight"][:d, :f].T + state[f"{name}.mlp.fc2.bias"][:d]
    y = y * largest / ratio if options["scale"] else y
    return x + y if pre else norm(state, f"{name}.norm2", x + y, eps)


def _attention_layer(
    state: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    heads: int,
    q: int,
    widest: int,
    options: Mapping[str, Any],
    index: tuple[Tensor, Tensor] | None,
) -> Tensor:
    d, channels = x.shape[-1], q // heads
    weight = state[f"{name}.attn.qkv.weight"][: 3 * q, :d]
    components = [x @ weight[c::3].T for c in range(3)]
    if options["qkv_bias"]:
        bias = state[f"{name}.attn.qkv.bias"][: 3 * q]
        parts = [bias[c::3] if options["bias_rule"] == "regroup" else bias[c * q : (c + 1) * q] for c in range(3)]
        components = [y + part for y, part in zip(components, parts, strict=True)]
    tables: list[Tensor | None] = [None, None]
    if options["relative_position"]:
        assert index is not None
        tables = [
            state[f"{name}.attn.{kind}.vertical"][index[0]] + state[f"{name}.attn.{kind}.horizontal"][index[1]]
            for kind in ("rel_pos_k", "rel_pos_v")
        ]
    outs = []
    for h in range(heads):
        cut = slice(channels * h, channels * (h + 1))
        outs.append(attention(*(y[..., cut] for y in components), *tables))
    out = torch.cat(outs, dim=-1)
    out = out * widest / q if options["scale"] else out
    return out @ state[f"{name}.attn.proj.weight"][:d, :q].T + state[f"{name}.attn.proj.bias"][:d]
