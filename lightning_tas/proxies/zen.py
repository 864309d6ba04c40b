"""Zen-score (Lin et al. 2021, "Zen-NAS: A Zero-Shot NAS for High-Performance Image Recognition").

How much features f (before pooling and head) move when the image does, at weights and images N(0, 1):

    Zen = log E ||f(x) - f(x + alpha e)||_1 + sum_k log sqrt( mean_channels var_k ),    alpha = 0.01

E over images x and perturbations e, both N(0, 1), averaged over `repeat` draws of weights (Algorithm 1 of the paper).
The second term undoes what batch norms (k) hide; a ViT has none and a layer norm hides the scale as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from lightning_tas.proxies.features import features
from lightning_tas.proxies.gaussian import gaussian_weights
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import Needs, least, register


@register(
    "zen",
    deterministic=False,
    needs=Needs(),
    paper="Lin et al. 2021, https://arxiv.org/abs/2102.01063",
    equation="log E ||f(x) - f(x + alpha e)||_1 + sum_BN log sqrt(mean var), Algorithm 1",
    cost="2 forwards per repeat",
    layers="features before pooling",
)
def zen(probe: Probe, repeat: Annotated[int, least(1)] = 4, alpha: float = 0.01) -> Callable[[], Measured]:
    """Sensitivity of features to the image, at N(0, 1) weights; the paper has `repeat` 32."""

    @torch.no_grad()
    def measure() -> Measured:
        scores = torch.stack([_zen(probe, turn, alpha) for turn in range(repeat)])
        return Measured(scores.mean())

    return measure


def _zen(probe: Probe, turn: int, alpha: float) -> Tensor:
    generator = probe.generator("zen", "images", turn)
    shape, kind = probe.images.shape, torch.float32  # whatever the default is, a seed means the same images
    images, noise = (
        torch.randn(shape, generator=generator, dtype=kind, device="cpu").to(probe.images) for _ in range(2)
    )
    weights = gaussian_weights(probe, "zen", "weights", turn)
    norms = [m for m in probe.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:  # the variance of this draw's two batches, whatever the network has seen before
        norm.reset_running_stats()
        norm.momentum = None
    before = features(probe.net, weights, images)
    after = features(probe.net, weights, images + alpha * noise)
    moved = (before - after).abs().double().flatten(1).sum(1).mean().log()
    return moved + sum(norm.running_var.double().mean().sqrt().log() for norm in norms if norm.running_var is not None)
