"""Gradient norm (Abdelfattah et al. 2021, "Zero-Cost Proxies for Lightweight NAS"): sum over layers of ||dL/dW||_2."""

from __future__ import annotations

from collections.abc import Callable

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
        return per_block(probe, {layer: probe.loss.gradients[layer.weight].norm() for layer in probe.weighted})

    return measure
