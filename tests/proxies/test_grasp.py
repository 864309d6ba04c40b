"""GraSP equals -w . Hg with Hg from differences of gradients, and the reference's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from lightning_tas.errors import UserError
from lightning_tas.proxies.roles import find_layers


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_equals_difference_of_gradients(small: Any, temperature: float) -> None:
    """H g is the derivative of the gradient along g: central differences in float64."""
    found = small.score("grasp", temperature=temperature)
    layers = [layer for layer in find_layers(small.net) if layer.role != "norm"]
    others = {name: p.detach().double() for name, p in small.net.named_parameters()}
    weights = {layer.weight: others.pop(layer.weight) for layer in layers}

    def gradient(at: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
        logits = functional_call(small.net, {**others, **leaves}, (small.images.double(),))
        return list(torch.autograd.grad(F.cross_entropy(logits / temperature, small.labels), list(leaves.values())))

    g = dict(zip(weights, gradient(weights), strict=True))
    step = 1e-5
    ahead = gradient({name: w + step * g[name] for name, w in weights.items()})
    behind = gradient({name: w - step * g[name] for name, w in weights.items()})
    value, blocks, size = 0.0, [0.0] * len(found.parts), 0.0
    for layer, w, a, b in zip(layers, weights.values(), ahead, behind, strict=True):
        term = -(w * (a - b) / (2 * step)).sum().item()
        value, size = value + term, size + abs(term)
        if layer.block is not None and layer.block >= 0:
            blocks[layer.block] += term
    assert found.value == pytest.approx(value, abs=2e-5 * size)
    assert found.parts == pytest.approx(blocks, abs=2e-5 * size)


def test_temperature_that_is_not_positive_is_refused(small: Any) -> None:
    with pytest.raises(UserError, match="temperature of grasp: 0 is not valid"):
        small.score("grasp", temperature=0)


@pytest.mark.slow
@pytest.mark.parametrize(("space", "row"), [(space, row) for space in ("pit", "autoformer") for row in range(4)])
def test_reference_numbers(auto_prox: Any, space: str, row: int) -> None:
    """Auto-Prox's code on its own classes, in float32 like ours."""
    small, expected = auto_prox(space, row)
    assert small.score("grasp").value == pytest.approx(expected["grasp"], rel=2e-6)
