"""GradSign (Zhang and Jia 2022): sum over weights of |sum over images of sign(dl_b/dw)|."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register
from lightning_tas.proxies.roles import Layer


class _Signs(Watcher):
    def __init__(self) -> None:
        self.agreement: dict[Layer, Tensor] = {}

    def samples(self, layer: Layer, grads: Tensor) -> None:
        # Sums of signs are small whole numbers, exact in float32; their sum over a layer needs float64.
        self.agreement[layer] = grads.sign().sum(0).abs().sum(dtype=torch.float64)


@register(
    "gradsign",
    needs=Needs(data=True, labels=True, backward=True, per_sample=True),
    paper="Zhang and Jia 2022, https://arxiv.org/abs/2110.08616",
    equation="sum_k |sum_b sign(dl_b/dw_k)|",
    cost="1 forward and backward with gradients per image",
)
def gradsign(probe: Probe) -> Callable[[], Measured]:
    """How far images agree on the direction of every weight: local optima of single images then lie close."""
    signs = _Signs()
    probe.loss.watch(signs)
    return lambda: per_block(probe, signs.agreement)
