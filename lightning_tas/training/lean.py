"""The mean loss of several sub-networks, with the graph of only one of them in memory at a time.

One backward of summed losses keeps the activations of all sub-networks of a step. Here each loss is differentiated as
soon as it is computed, its graph is freed, and the gradients are summed. The returned loss carries the sum: its own
backward only hands it out, times whatever the loss is scaled by. For everything that follows (automatic optimisation,
one all-reduce of DDP, the reduction of ZeRO-1 and -2, accumulation, clipping) it is a loss like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def lean_mean(losses: Sequence[Callable[[], Tensor]], parameters: Iterable[nn.Parameter]) -> Tensor:
    """Mean of scalar losses, each given as a function that computes it; the largest graph should come last.

    One backward is possible, first-order only. Parameters that no loss depends on get no gradient. Not for ZeRO-3
    (parameters are shards outside of forward and backward passes) nor for float16 (a loss scale comes too late).
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    count = len(losses)
    sums: list[Tensor | None] = [None] * len(trained)
    total: Tensor | None = None
    for compute in losses:
        loss = compute()
        # Autocast is for forward passes: backward ones follow the types that they find.
        with torch.autocast(loss.device.type, enabled=False):
            share = torch.full_like(loss, 1.0 / count)
            gradients = torch.autograd.grad(loss, trained, share, allow_unused=True)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                # Not in place: autograd may hand one tensor to two parameters.
                before = sums[i]
                sums[i] = gradient if before is None else before + gradient
        total = loss.detach() / count if total is None else total + loss.detach() / count
        del loss, gradients
    assert total is not None, "a mean of no losses"
    used = [(parameter, gradient) for parameter, gradient in zip(trained, sums, strict=True) if gradient is not None]
    mean: Tensor = _Carrier.apply(total, [gradient for _, gradient in used], *(parameter for parameter, _ in used))
    return mean


class _Carrier(torch.autograd.Function):
    """A value with given gradients for its inputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients were handed out already"
        return (None, None, *(gradient * outer[0].to(gradient.dtype) for gradient in gradients))
