"""ZiCo (Li et al. 2023): sum over layers of log sum_i E[|g_i|] / sqrt(Var[g_i]), over batches.

The published form takes 2 batches. Their standard deviation is half the difference of two gradients, so the sum is
ruled by the few weights on which both agree by chance, and float32 decides how well: on small networks the score moves
by per cents between float32 and float64. More batches are steadier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, least, register
from lightning_tas.proxies.roles import Layer


class _Batches(Watcher):
    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.terms: dict[Layer, Tensor] = {}

    def samples(self, layer: Layer, grads: Tensor) -> None:
        # A constant factor on all gradients cancels, so the 1/B of the mean loss may stay.
        self.terms[layer] = inverse_variation(grads, self.batches)


def inverse_variation(grads: Tensor, batches: int) -> Tensor:
    """A layer's term, from the gradients of single images (B, *weight.shape): log sum_i mean_b |g_i| / std_b(g_i)."""
    means = torch.stack([group.mean(0) for group in grads.tensor_split(batches)]).double()
    deviation = (means - means.mean(0)).square().mean(0).sqrt()  # `std` over so short an axis is far slower
    return torch.where(deviation > 0, means.abs().mean(0) / deviation, 0.0).sum().log()


@register(
    "zico",
    needs=Needs(data=True, labels=True, backward=True, per_sample=True, images=lambda options: int(options["batches"])),
    paper="Li et al. 2023, https://arxiv.org/abs/2301.11300",
    equation="sum over layers of log sum_i mean_b |g_i| / std_b(g_i)",
    cost="1 forward and backward with gradients per image",
)
def zico(probe: Probe, batches: Annotated[int, least(2)] = 2) -> Callable[[], Measured]:
    """Inverse coefficient of variation of gradients between batches: the images, split into `batches` groups."""
    groups = _Batches(batches)
    probe.loss.watch(groups)
    return lambda: per_block(probe, groups.terms)
