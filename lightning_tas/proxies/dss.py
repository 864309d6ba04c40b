"""DSS (Zhou et al. 2022, "Training-free Transformer Architecture Search"): synaptic diversity plus synaptic saliency.

    DSS = sum_m ||dL/dW_m||_* ||W_m||_*  +  sum_n |dL/dW_n * W_n|                                            (eq. 9)

m: the attention's matrices, n: the MLP's. The image is all ones, parameters are replaced by their absolute values, and
L is the sum of the logits, so no data are needed. Where the paper and the released code differ, see `dss`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lightning_tas.proxies.nuclear import nuclear_norms
from lightning_tas.proxies.passes import Pass
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, least, one_of, register
from lightning_tas.proxies.roles import Layer
from lightning_tas.proxies.synflow import ones_pass

MODES, QKV, LAYERS = ("paper", "released"), ("fused", "split"), ("paper", "autoprox")


@dataclass(frozen=True)
class Choice:
    """Which layers count, and how."""

    mode: str
    signed: bool
    qkv: str
    head_weight: float
    layers: str

    def __post_init__(self) -> None:
        changed = self.signed or self.qkv != "fused" or self.head_weight or self.layers != "paper"
        if self.mode == "released" and changed:
            warnings.warn("dss: signed, qkv, head_weight and layers have no effect with mode='released'", stacklevel=2)

    @property
    def released(self) -> bool:
        return self.mode == "released"

    def objective(self, probe: Probe) -> Pass:
        """The pass that weights and gradients are of."""
        return ones_pass(probe, _as_released) if self.released else ones_pass(probe)

    def diverse(self, probe: Probe) -> tuple[Layer, ...]:
        """Layers of which nuclear norms are multiplied."""
        if self.released:
            return probe.of("proj")  # the released code's qkv gradient is missing, so it counts as 0
        if self.layers == "paper":
            return probe.of("qkv", "proj")
        return tuple(layer for layer in probe.of("qkv", "proj", "pool_fc") if layer.role != "pool_fc" or _square(layer))

    def salient(self, probe: Probe) -> dict[Layer, float]:
        """Layers of which |g * W| is summed, with their factors."""
        counted = {layer: 1.0 for layer in probe.of("fc1", "fc2")}
        if self.released:
            return counted
        if self.layers == "autoprox":
            counted |= {layer: 1.0 for layer in probe.of("pool_fc") if not _square(layer)}
        factor = self.head_weight + (self.layers == "autoprox")
        return counted | ({layer: float(factor) for layer in probe.of("head")} if factor else {})

    def matrices(self, layer: Layer, tensor: Tensor) -> tuple[Tensor, ...]:
        """A layer's weight or gradient as the matrices m of eq. 9."""
        if layer.role == "qkv" and self.qkv == "split" and not self.released:
            return tensor.chunk(3)  # rows are all queries, then keys, then values
        return (tensor,)


def _square(layer: Layer) -> bool:
    weight = layer.module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0] == weight.shape[1]


def _as_released(name: str, weight: Tensor) -> Tensor:
    """The released code takes |.| of the supernet's parameters after cutting: only what is never cut changes."""
    return weight.abs() if name in ("cls_token", "pos_embed") else weight


@register(
    "dss",
    needs=Needs(backward=True),
    paper="Zhou et al. 2022, https://arxiv.org/abs/2203.12217",
    equation="sum ||dL/dW||_* ||W||_* over attention + sum |dL/dW * W| over MLPs",
    cost="1 forward and backward of one image, 4 nuclear norms a block",
    layers="qkv, proj; fc1, fc2",
    light=True,
)
def dss(
    probe: Probe,
    mode: Annotated[str, one_of(MODES)] = "paper",
    signed: bool = False,
    qkv: Annotated[str, one_of(QKV)] = "fused",
    head_weight: Annotated[float, least(0)] = 0,
    layers: Annotated[str, one_of(LAYERS)] = "paper",
) -> Callable[[], Measured]:
    """Nuclear norms of attention gradients times those of its weights, plus SNIP of the MLPs, for an image of ones.

    Options:
        mode: "paper" is eq. 9 with |.| around every product, as the released code has it; "released" is what that code
            does on a network cut out of a supernet: weights keep their signs, qkv and head count as 0.
        signed: the saliency as printed in eq. 9, without |.|.
        qkv: "fused" takes the norm of the matrix of all queries, keys and values, as released; "split" one of each.
        head_weight: how often the classifier's saliency is added (0 as in the paper; 2 is in the released loop).
        layers: "autoprox" also counts the head and the class token's pooling layers, a square one among these by
            nuclear norms, as in the code of Auto-Prox.

    Extras: diversity and saliency, the two sums, also block by block.
    """
    choice = Choice(mode, signed, qkv, head_weight, layers)
    ones = choice.objective(probe)
    diverse, salient = choice.diverse(probe), choice.salient(probe)
    ones.want_gradients(layer.weight for layer in (*diverse, *salient))

    def measure() -> Measured:
        diversity = _diversity(probe, ones, choice, diverse)
        saliency = {layer: factor * _saliency(ones, layer, choice) for layer, factor in salient.items()}
        sums = {"diversity": _total(diversity, probe), "saliency": _total(saliency, probe)}
        return per_block(probe, diversity | saliency, {"diversity": diversity, "saliency": saliency}, **sums)

    return measure


def _diversity(probe: Probe, ones: Pass, choice: Choice, layers: tuple[Layer, ...]) -> dict[Layer, Tensor]:
    """||g||_* ||W||_* of each layer, summed over its matrices."""
    weights = [(layer, m) for layer in layers for m in choice.matrices(layer, ones.weights[layer.weight])]
    gradients = [m for layer in layers for m in choice.matrices(layer, ones.gradients[layer.weight])]
    names = [layer.name for layer, _ in weights]
    products = probe.norms.norms(names, [m for _, m in weights]) * nuclear_norms(gradients)
    terms: dict[Layer, Tensor] = {}
    for (layer, _), product in zip(weights, products, strict=True):
        terms[layer] = terms[layer] + product if layer in terms else product
    return terms


def _saliency(ones: Pass, layer: Layer, choice: Choice) -> Tensor:
    product = ones.gradients[layer.weight] * ones.weights[layer.weight]
    signed = choice.signed and not choice.released
    return product.sum(dtype=torch.float64) if signed else product.abs().sum(dtype=torch.float64)


def _total(terms: dict[Layer, Tensor], probe: Probe) -> Tensor:
    return torch.stack(list(terms.values())).sum() if terms else torch.zeros((), device=probe.device)
