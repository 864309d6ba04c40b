"""SynFlow (Tanaka et al. 2020): sum |dR/dW * W| with R the sum of the outputs of the network of |W| for ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_tas.proxies.passes import Pass
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register


def magnitude(name: str, weight: Tensor) -> Tensor:
    """|weight|, for every parameter."""
    return weight.abs()


def ones_pass(
    probe: Probe, change: Callable[[str, Tensor], Tensor] = magnitude, dtype: torch.dtype = torch.float32
) -> Pass:
    """R, the sum of the logits for one image of ones under changed parameters: the objective of SynFlow and of DSS."""
    image = torch.ones_like(probe.images[:1])
    return probe.shared(("ones", change, dtype), lambda: Pass(probe, torch.sum, image, weights=change, dtype=dtype))


@register(
    "synflow",
    needs=Needs(backward=True),
    paper="Tanaka et al. 2020, https://arxiv.org/abs/2006.05467",
    equation="sum |dR/dW * W|, R = sum f(1; |W|)",
    cost="1 forward and backward of one image in float64",
    dtype="float64",
    light=True,
)
def synflow(probe: Probe) -> Callable[[], Measured]:
    """SNIP without data: an image of ones, parameters of positive sign, the sum of the logits.

    R grows like a product over the layers where no norm stands between them, hence float64.
    """
    ones = ones_pass(probe, dtype=torch.float64)
    ones.want_gradients(layer.weight for layer in probe.weighted)

    def measure() -> Measured:
        terms = {
            layer: (ones.gradients[layer.weight] * ones.weights[layer.weight]).abs().sum() for layer in probe.weighted
        }
        return per_block(probe, terms)

    return measure
