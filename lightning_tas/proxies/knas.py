"""KNAS (Xu et al. 2021): MGM, the mean of the Gram matrix of the images' gradients.

    MGM = (1 / B^2) sum_{a,b} <g_a, g_b> = ||mean_b g_b||^2

so one ordinary backward pass gives it exactly. The released code (``variant="reference"``) computes something else: of
the first 11 weights with at least 50 entries, it takes the first 50 entries, and for each the dot product of the
gradients of the first half of the images with those of the second half, both centred, over B^2 (there B = 50).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, one_of, register
from lightning_tas.proxies.roles import Layer

VARIANTS = ("exact", "reference")
TENSORS, ENTRIES = 11, 50


def _images(options: Mapping[str, Any]) -> int:
    """The released code compares halves of the batch, each of which is centred."""
    return 4 if options["variant"] == "reference" else 1


@register(
    "knas",
    needs=Needs(data=True, labels=True, backward=True, images=_images),
    paper="Xu et al. 2021, https://proceedings.mlr.press/v139/xu21m.html",
    equation="(1 / B^2) sum_{a,b} <g_a, g_b> = ||mean_b g_b||^2",
    cost="1 forward and backward",
)
def knas(probe: Probe, variant: Annotated[str, one_of(VARIANTS)] = "exact") -> Callable[[], Measured]:
    """Mean of the Gram matrix of gradients, summed over layers; ``variant="reference"`` is the released code's."""
    return _exact(probe) if variant == "exact" else _reference(probe)


def _exact(probe: Probe) -> Callable[[], Measured]:
    loss = probe.loss
    loss.want_gradients()

    def measure() -> Measured:
        return per_block(
            probe, {layer: loss.gradients[layer.weight].square().sum(dtype=torch.float64) for layer in probe.weighted}
        )

    return measure


class _Halves(Watcher):
    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.layers = layers
        self.terms: dict[Layer, Tensor] = {}

    def wants(self, layer: Layer) -> bool:
        return layer in self.layers

    def samples(self, layer: Layer, grads: Tensor) -> None:
        half = len(grads) // 2
        # The loss is a mean: times B it is the loss of a single image, as the released code sees it.
        entries = grads[: 2 * half].flatten(1)[:, :ENTRIES].double() * len(grads)
        first, second = (part - part.mean(0) for part in entries.split(half))
        self.terms[layer] = (first * second).sum() / (2 * half) ** 2


def _reference(probe: Probe) -> Callable[[], Measured]:
    large = [layer for layer in probe.weighted if layer.module.weight.numel() >= ENTRIES]  # type: ignore[operator]
    halves = _Halves(tuple(large[:TENSORS]))
    probe.loss.watch(halves)
    return lambda: per_block(probe, halves.terms)
