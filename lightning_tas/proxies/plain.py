"""Plain (Abdelfattah et al. 2021, after Mozer and Smolensky 1989): sum dL/dW * W, signed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register


@register(
    "plain",
    needs=Needs(data=True, labels=True, backward=True),
    paper="Abdelfattah et al. 2021, https://arxiv.org/abs/2101.08134",
    equation="sum dL/dW * W",
    cost="1 forward and backward",
)
def plain(probe: Probe) -> Callable[[], Measured]:
    """Signed sum of g * w. It is 0 for a layer in front of a scale-invariant norm, so mostly small signed sums."""
    loss = probe.loss
    loss.want_gradients()

    def measure() -> Measured:
        terms = {
            layer: (loss.gradients[layer.weight] * loss.weights[layer.weight]).sum(dtype=torch.float64)
            for layer in probe.weighted
        }
        return per_block(probe, terms)

    return measure
