"""SNIP (Lee et al. 2019): sum |dL/dW * W|, the sensitivity of the loss to removing each weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register


@register(
    "snip",
    needs=Needs(data=True, labels=True, backward=True),
    paper="Lee et al. 2019, https://arxiv.org/abs/1810.02340",
    equation="sum |dL/dW * W|",
    cost="1 forward and backward",
)
def snip(probe: Probe) -> Callable[[], Measured]:
    """Connection sensitivity |g * w|, which equals |dL/dm| for masks m = 1 on the weights."""
    loss = probe.loss
    loss.want_gradients()

    def measure() -> Measured:
        terms = {
            layer: (loss.gradients[layer.weight] * loss.weights[layer.weight]).abs().sum(dtype=torch.float64)
            for layer in probe.weighted
        }
        return per_block(probe, terms)

    return measure
