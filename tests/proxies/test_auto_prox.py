"""The three formulas of Auto-Prox, written out block by block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_tas as tas
from lightning_tas.errors import UserError

Block = dict[str, Tensor]


def statistics(small: Any) -> list[Block]:
    """Of every block: weights and gradients of qkv, fc1, fc2, and the gradient of fc1's output, in float64."""
    net: nn.Module = copy.deepcopy(small.net).double()
    blocks = [module for name, module in net.named_modules() if name.split(".")[-1].isdigit() and "blocks." in name]
    outputs: dict[nn.Module, Tensor] = {}
    for block in blocks:

        def keep(module: nn.Module, inputs: Any, output: Tensor, block: nn.Module = block) -> None:
            output.retain_grad()
            outputs[block] = output

        block.mlp.fc1.register_forward_hook(keep)  # type: ignore[union-attr, operator]
    F.cross_entropy(net(small.images.double()), small.labels).backward()
    found = []
    for block in blocks:
        entry: Block = {"activation": outputs[block].grad}  # type: ignore[dict-item]
        for key, layer in (("qkv", block.attn.qkv), ("fc1", block.mlp.fc1), ("fc2", block.mlp.fc2)):  # type: ignore[union-attr]
            entry[key], entry[f"g_{key}"] = layer.weight.detach(), layer.weight.grad  # type: ignore[union-attr, assignment]
        found.append(entry)
    return found


def prox_a(b: Block) -> float:
    mlp = [x for key in ("g_fc1", "g_fc2") for x in b[key].flatten()]
    return float(b["g_qkv"].abs().sum()) + sum(float(torch.sigmoid(x)) for x in mlp) / (len(mlp) + 1e-9)


def prox_a_mean(b: Block) -> float:
    return prox_a(b) - float(b["g_qkv"].abs().sum()) + float(b["g_qkv"].abs().mean())


def prox_p(b: Block) -> float:
    norms = torch.stack([row.norm() for key in ("fc1", "fc2") for row in b[key]])
    softmax = norms.exp() / norms.exp().sum()
    return float((1 / (1 + (-b["qkv"]).exp())).square().sum().sqrt()) - float(softmax.log().mean())


def released(b: Block) -> float:
    w = b["fc1"]
    scaled = (w - w.min()) / (w.max() - w.min())
    return float((scaled.square().sum().sqrt() + torch.sigmoid(b["activation"]).sqrt()).mean())


CASES = [
    ("auto_prox_a", {}, prox_a),
    ("auto_prox_a", {"reduce": "mean"}, prox_a_mean),
    ("auto_prox_p", {}, prox_p),
    ("auto_prox_released", {}, released),
]


@pytest.mark.parametrize(("name", "options", "formula"), CASES)
def test_the_formulas(small: Any, name: str, options: dict[str, str], formula: Callable[[Block], float]) -> None:
    blocks = [formula(b) for b in statistics(small)]
    found = small.score(name, **options)
    assert found.value == pytest.approx(sum(blocks) / len(blocks), rel=1e-5)
    assert found.parts == pytest.approx([block / len(blocks) for block in blocks], rel=1e-5)
    summed = small.score(name, layer_reduce="sum", **options)
    assert summed.value == pytest.approx(sum(blocks), rel=1e-5)
    assert summed.parts == pytest.approx(blocks, rel=1e-5)


@pytest.mark.parametrize("name", ["auto_prox_a", "auto_prox_p", "auto_prox_released"])
def test_unknown_reductions(name: str) -> None:
    arch, build = tas.Architecture.vit(24, [1], [2]), {"img_size": 32, "num_classes": 3}
    with pytest.raises(UserError, match=r"layer_reduce.*'max'.*mean"):
        tas.score_one(name, None, arch, build=build, layer_reduce="max")
    if name == "auto_prox_a":
        with pytest.raises(UserError, match=r"reduce.*'max'"):
            tas.score_one(name, None, arch, build=build, reduce="max")


def test_equal_weights_have_no_min_max() -> None:
    """0 / 0 is no score, and says so."""
    net = tas.network(tas.Architecture.vit(24, [1], [2]), img_size=32, num_classes=3)
    with torch.no_grad():
        net.blocks[0].mlp.fc1.weight.fill_(0.5)
    score = tas.score_one("auto_prox_released", net, batch_size=2)
    assert not score.valid and "nan" in score.reason
