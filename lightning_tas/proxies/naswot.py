"""NASWOT (Mellor et al. 2021, "Neural Architecture Search without Training"): do activations tell images apart?

Each image has a binary code, bit by bit whether an activation function's input is positive. Summed over the
layers with an activation function (x: codes, B x bits):

    K = sum_layers x x^T + (1 - x) (1 - x)^T        NASWOT = log |det K|

K_ij counts the bits in which images i and j agree. It was made for ReLU; here the bits are those of the GELU inputs in
the MLPs, all tokens side by side. With signs s = 2 x - 1 the count over n bits is (n + s s^T) / 2, one product instead
of two. Counts are integers, exact in float32 below 2^24, which each product stays under, and summed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_tas.proxies.gaussian import gaussian_weights
from lightning_tas.proxies.passes import Pass, Watcher
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import Needs, register
from lightning_tas.proxies.roles import Layer

_EXACT = 2**20  # bits per product: far below 2^24, and few enough to keep the codes of 64 images in the cache


def agreement(inputs: Tensor) -> Tensor:
    """In how many entries two rows of `inputs` (B, bits) are both positive or both not: (B, B), float64, exact."""
    total = torch.zeros(len(inputs), len(inputs), dtype=torch.float64, device=inputs.device)
    for part in inputs.split(_EXACT, dim=1):
        # Written straight into floats: torch.where takes ten times as long.
        signs = torch.gt(part, 0, out=torch.empty_like(part)).mul_(2).sub_(1)
        total += signs @ signs.t()
    return (total + inputs.shape[1]) / 2


class _Codes(Watcher):
    roles = frozenset({"fc1"})

    def __init__(self) -> None:
        self.kernel: Any = 0.0
        self.bits = 0

    def forward(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        self.kernel = self.kernel + agreement(y.flatten(1))
        self.bits += y[0].numel()


@register(
    "naswot",
    needs=Needs(data=True),
    paper="Mellor et al. 2021, https://arxiv.org/abs/2006.04647",
    equation="log |det K|, K = sum over layers of x x^T + (1 - x)(1 - x)^T",
    cost="1 forward (shared with snip)",
    layers="inputs of the MLPs' GELU (fc1)",
    changes=lambda options: {"deterministic": not options["redraw"]},
)
def naswot(probe: Probe, redraw: bool = False) -> Callable[[], Measured]:
    """How different the images' codes of GELU inputs are; `redraw`: with N(0, 1) weights, as a released code has it."""
    watcher = _Codes()
    if redraw:
        weights = gaussian_weights(probe, "naswot")
        Pass(probe, torch.sum, probe.images, weights=lambda name, _: weights[name]).watch(watcher)
    else:
        probe.loss.watch(watcher)

    def measure() -> Measured:
        sign, logdet = torch.linalg.slogdet(watcher.kernel)
        twins = torch.triu(watcher.kernel == watcher.bits, 1).any()
        same, sign_, value = torch.stack([twins.double(), sign, logdet]).tolist()
        # Rounding would turn the determinant 0 of two equal rows into a finite logarithm.
        reason = "two images have the same code" if same else None if sign_ > 0 else "K is singular"
        return Measured(value, reason=reason)

    return measure
