"""Gradient norm (Abdelfattah et al. 2021, "Zero-Cost Proxies for Lightweight NAS"): sum over layers of ||dL/dW||_2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register


@register(
    "grad_norm",
    needs=Needs(data=True, labels=True, backward=True),
    paper="Abdelfattah et al. 2021, https://arxiv.org/abs/2101.08134",
    equation="sum over layers of ||dL/dW||_2",
    cost="1 forward and backward",
)
def grad_norm(probe: Probe) -> Callable[[], Measured]:
    """Sum of the L2 norms of the layers' weight gradients (not the norm of all gradients together)."""
    probe.loss.want_gradients()

    def measure() -> Measured:
        return per_block(probe, {layer: norm(probe.loss.gradients[layer.weight]) for layer in probe.weighted})

    return measure


def norm(gradient: Tensor) -> Tensor:
    """L2 norm, rows (output channels) in the gradient's own type and then in float64: a float32 sum is too long."""
    return torch.linalg.vector_norm(gradient.flatten(1), dim=1).double().norm()
