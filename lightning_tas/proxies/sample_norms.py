"""Norms of single images' gradients, from one backward pass over the whole batch.

A linear layer's gradient for image b is E_b^T A_b, tokens in A (T, in), gradients by its output E (T, out). Its norm is
had in two ways: by writing the gradient down, T in out multiplications, or (ghost norm; Li et al. 2022,
https://arxiv.org/abs/2110.05679, section 4) as <A A^T, E E^T>, T^2 (in + out) of them. Each layer takes the cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_tas.proxies.passes import sample_gradients
from lightning_tas.proxies.roles import Layer


def weight_norms(module: nn.Module, x: Tensor, grad_y: Tensor) -> Tensor:
    """Squared L2 norm of the gradient by the weight of a linear layer or convolution, image by image: (B,) float64."""
    if isinstance(module, nn.Linear) and x.ndim > 2:
        inside, outside = x.flatten(1, -2), grad_y.flatten(1, -2)  # (B, T, in), (B, T, out)
        tokens, width, out = inside.shape[1], inside.shape[2], outside.shape[2]
        if tokens * (width + out) < width * out:
            grams = inside @ inside.transpose(1, 2), outside @ outside.transpose(1, 2)  # (B, T, T) each
            return torch.linalg.vecdot(grams[0].flatten(1), grams[1].flatten(1)).double().clamp(min=0.0)
    return squared(sample_gradients(module, x, grad_y))


def bias_gradients(module: nn.Module, grad_y: Tensor) -> Tensor:
    """Gradient by the bias of a linear layer, convolution or LayerNorm, image by image: (B, out)."""
    if isinstance(module, nn.Conv2d):
        return grad_y.flatten(2).sum(2)
    return grad_y.flatten(1, -2).sum(1) if grad_y.ndim > 2 else grad_y


def squared(grads: Tensor) -> Tensor:
    """Squared L2 norm of (B, rows, ...), image by image: (B,) float64, for float32 loses digits of sums this long."""
    rows = grads.flatten(2) if grads.ndim > 2 else grads
    return torch.linalg.vector_norm(rows, dim=-1).double().square().reshape(len(grads), -1).sum(1)


def dead_layer(terms: Mapping[Layer, Tensor], expected: tuple[Layer, ...]) -> str | None:
    """Why a sum over layers means nothing: a layer that no gradient reached. One look at the device."""
    missing = [layer.name for layer in expected if layer not in terms]
    if not missing:
        alive = torch.stack([terms[layer] != 0 for layer in expected]).tolist()
        missing = [layer.name for layer, ok in zip(expected, alive, strict=True) if not ok]
    return f"no gradient reaches layer {missing[0]}" if missing else None
