"""KNAS (Xu et al. 2021): MGM, the mean of the Gram matrix of the images' gradients.

    MGM = (1 / B^2) sum_{a,b} <g_a, g_b> = ||mean_b g_b||^2

so one ordinary backward pass gives it exactly. The released code (``variant="reference"``) computes something else: of
the first 11 parameters (norms, biases and positions too) with at least 50 entries, it takes the first 50 entries, and
for each the dot product of the gradients of the first half of the images with those of the second half, over B^2 (there
B = 50). Each half is centred about its own mean, as in the released code, not about that of all B images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tas.proxies.probe import Measured, Probe, parts_by_name, per_block
from lightning_tas.proxies.registry import Needs, one_of, register

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
    cost="1 forward and backward; the reference one for every image",
    changes=lambda options: {"per_sample": options["variant"] == "reference"},
)
def knas(probe: Probe, variant: Annotated[str, one_of(VARIANTS)] = "exact") -> Callable[[], Measured]:
    """Mean of the Gram matrix of gradients over weight matrices; ``variant="reference"`` is the released code's."""
    return _exact(probe) if variant == "exact" else _reference(probe)


def _exact(probe: Probe) -> Callable[[], Measured]:
    loss = probe.loss
    loss.want_gradients()

    def measure() -> Measured:
        return per_block(
            probe, {layer: loss.gradients[layer.weight].square().sum(dtype=torch.float64) for layer in probe.weighted}
        )

    return measure


def _reference(probe: Probe) -> Callable[[], Measured]:
    large = {name: one for name, one in probe.net.named_parameters() if one.numel() >= ENTRIES}
    names = list(large)[:TENSORS]

    def measure() -> Measured:
        # Image by image as released: what is looked at lies outside of layers too, and for few images that is cheap.
        rows: dict[str, list[Tensor]] = {name: [] for name in names}
        for image, label in zip(probe.images.split(1), probe.labels.split(1), strict=True):
            loss = F.cross_entropy(probe.net(image), label)
            grads = torch.autograd.grad(loss, [large[name] for name in names], materialize_grads=True)
            for name, grad in zip(names, grads, strict=True):
                rows[name].append(grad.flatten()[:ENTRIES].double())
        terms = {name: _halves(torch.stack(found)) for name, found in rows.items()}
        return Measured(torch.stack(list(terms.values())).sum(), parts_by_name(probe, terms))

    return measure


def _halves(entries: Tensor) -> Tensor:
    """Centred products of the first half of the images' gradients (B, entries) with the second, over B^2."""
    half = len(entries) // 2
    first, second = (part - part.mean(0) for part in entries[: 2 * half].split(half))
    return (first * second).sum() / (2 * half) ** 2
