"""Jacobian covariance (Mellor et al. 2020, first version): how alike a network's linear maps are at different images.

Sigma is the (B, B) correlation matrix of the gradients of the sum of logits by the images, nu its eigenvalues:

    S = -sum_b (log(nu_b + k) + 1 / (nu_b + k)),  k = 1e-5
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import Needs, register

K = 1e-5


@register(
    "jacob_cov",
    needs=Needs(data=True, backward=True, images=2),
    paper="Mellor et al. 2020, https://arxiv.org/abs/2006.04647v1",
    equation="-sum_b (log(nu_b + k) + 1 / (nu_b + k)), k = 1e-5",
    cost="1 forward and backward",
    layers="images",
)
def jacob_cov(probe: Probe) -> Callable[[], Measured]:
    """Spread of the eigenvalues of the correlation of input Jacobians, in float64."""
    logits = probe.logits
    logits.want_image_gradients()
    return lambda: Measured(spread(logits.image_gradients.flatten(1)))


def spread(jacobians: Tensor) -> Tensor:
    """The score of input Jacobians (B, entries); NaN where one is constant or not finite."""
    correlation = torch.corrcoef(jacobians.double())
    finite = correlation.isfinite().all()
    # An eigensolver raises on NaN; the score has to say instead that there is none.
    found = torch.linalg.eigvalsh(
        torch.where(finite, correlation, torch.eye(len(jacobians), dtype=correlation.dtype, device=correlation.device))
    )
    nu = found.clamp(min=0.0) + K
    return torch.where(finite, -(nu.log() + 1 / nu).sum(), torch.nan)
