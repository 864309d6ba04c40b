"""Memory of a training step, counted on the meta device: no arithmetic, no memory, any size in a second."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_tas.activations import saved_storages
from lightning_tas.architecture import Architecture
from lightning_tas.supernets import ImageNetwork


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a training step keeps: `state` for the whole supernet, `activations` for one sub-network's graph."""

    weights: int
    gradients: int
    optimiser: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of the parts, without the allocator's slack and library workspaces."""
        return self.weights + self.gradients + self.optimiser + self.activations


def step_memory(net: ImageNetwork, arch: Architecture | None, batch_size: int, activation_bytes: int = 4) -> StepMemory:
    """Count what forward and backward of `arch` hold at `batch_size`, float32 master weights, AdamW.

    Args:
        net: supernet or stand-alone network on the meta device, with `img_size` and `options`.
        arch: the sub-network, usually the largest that is trained; None for a stand-alone network.
        batch_size: images per process.
        activation_bytes: 4 in float32, 2 under bf16 or fp16 autocast (an estimate there: some tensors stay float32).

    Activations are the distinct storages that autograd saves for the backward pass; parameters are not counted twice.
    """
    parameters = list(net.parameters())
    assert all(p.device.type == "meta" for p in parameters), "step_memory counts on the meta device"
    kept = saved_storages(net, arch, batch_size)
    floats = sum(
        tensor.untyped_storage().nbytes() * (activation_bytes / 4 if tensor.dtype == torch.float32 else 1)
        for tensor in kept.values()
    )
    weights = sum(p.numel() * 4 for p in parameters)
    return StepMemory(weights, weights, 2 * weights, int(floats))
