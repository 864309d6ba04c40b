"""Parameters that a step leaves out: the meaning `train.unused=zero` on one process and under DDP.

There such parameters have no gradient (None), and AdamW skips them. ZeRO knows no such thing: they have a gradient of
zero, moments and weight decay move them. Filling the missing gradients in makes all strategies train alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def fill_missing(parameters: Iterable[nn.Parameter]) -> None:
    """Give every trainable parameter without a gradient one of zeros; call it before the optimiser's step."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
