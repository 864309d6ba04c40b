"""Fisher equals its formula with gradients of single activations, on every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tas.proxies.roles import find_layers


@pytest.mark.parametrize("ref_axis", [False, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_equals_formula(small: Any, ref_axis: bool, broadcast: bool) -> None:
    found = small.score("fisher", ref_axis=ref_axis, broadcast=broadcast)
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        outputs[module] = output

    net = small.net.double()
    layers = [layer for layer in find_layers(net) if layer.role != "norm"]
    for layer in layers:
        layer.module.register_forward_hook(keep)
    F.cross_entropy(net(small.images.double()), small.labels).backward()
    value, parts = 0.0, [0.0] * len(found.parts)
    for layer in layers:
        output, weight = outputs[layer.module], layer.module.weight
        assert output.grad is not None and isinstance(weight, Tensor)
        effect = output * output.grad
        if effect.ndim == 4:
            effect = effect.sum((2, 3))  # map (B, C, H, W): one number per channel
        elif effect.ndim == 3:
            effect = effect.sum(2) if ref_axis else effect.sum(1)  # tokens (B, T, C): per token, or per channel
        term = sum(0.5 * (effect[:, k] ** 2).mean().item() for k in range(effect.shape[1]))
        term *= weight[0].numel() if broadcast else 1
        value += term
        if layer.block is not None and layer.block >= 0:
            parts[layer.block] += term
    assert found.value == pytest.approx(value, rel=1e-5)
    assert found.parts == pytest.approx(parts, rel=1e-5)
