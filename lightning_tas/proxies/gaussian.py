"""Weights N(0, 1): what Zen-NAS's code, and the NASWOT code beside it, puts in place of a network's own.

Layers' weights are drawn and their biases become 0; batch norms become (1, 0). What ViTs have besides (layer norms,
class token, positions, relative position tables) that code does not know, so it stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_tas.proxies.probe import Probe
from lightning_tas.proxies.roles import NORM


def gaussian_weights(probe: Probe, *purpose: int | str) -> dict[str, Tensor]:
    """All parameters by name, layers' weights drawn from the probe's seed and `purpose`."""
    # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
    generator = probe.generator(*purpose)
    values = {name: value.detach() for name, value in probe.net.named_parameters()}
    for layer in probe.layers:
        weight, bias = values[layer.weight], f"{layer.name}.bias"
        if layer.role != NORM:
            values[layer.weight] = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu").to(
                weight
            )
        elif not isinstance(layer.module, nn.LayerNorm):
            values[layer.weight] = torch.ones_like(weight)
        else:
            continue
        if bias in values:
            values[bias] = torch.zeros_like(values[bias])
    return values
