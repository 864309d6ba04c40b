"""GraSP (Wang et al. 2020, "Picking Winning Tickets Before Training by Preserving Gradient Flow"): -w . Hg.

Removing weight w_q changes the gradient's flow ||g||^2 by about -2 w_q (H g)_q, H being the Hessian of the loss and g
its gradient, both in the layers' weight matrices alone. As a score of networks (Abdelfattah et al. 2021) these are
summed, without the 2 and with the paper's sign:

    GraSP = sum_q - w_q (H g)_q        H g = d/dw <g(w), g>, the second g held fixed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, above, register
from lightning_tas.proxies.sample_norms import dead_layer


@register(
    "grasp",
    needs=Needs(data=True, labels=True, backward=True),
    paper="Wang et al. 2020, https://arxiv.org/abs/2002.07376",
    equation="sum -W * (H g)",
    cost="1 forward, backward and backward of the backward: about 4 forwards and backwards",
)
def grasp(probe: Probe, temperature: Annotated[float, above(0)] = 1.0) -> Callable[[], Measured]:
    """Change of the gradient's flow by removing weights: -w * Hg, logits divided by `temperature` before the loss."""

    def measure() -> Measured:
        values = {name: value.detach() for name, value in probe.net.named_parameters()}
        weights = {layer: values[layer.weight].requires_grad_() for layer in probe.weighted}
        # Fused attention kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            logits = functional_call(probe.net, values, (probe.images,))
            loss = F.cross_entropy(logits / temperature, probe.labels)
            first = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        flow = torch.stack([(g.detach() * g).sum() for g in first]).sum()
        second = torch.autograd.grad(flow, list(weights.values()))
        terms = {
            layer: -(weight.detach() * h).sum(dtype=torch.float64)
            for (layer, weight), h in zip(weights.items(), second, strict=True)
        }
        reached = {layer: g.detach().norm() for layer, g in zip(weights, first, strict=True)}
        return replace(per_block(probe, terms), reason=dead_layer(reached, probe.weighted))

    return measure
