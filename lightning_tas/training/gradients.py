"""The gradient of an optimiser step as a whole: its norm, clipping it, and leaving the step out.

Two homes of gradients look alike from here: parameters' own `grad` (one process and DDP), and the partitions of a
DeepSpeed engine (ZeRO 1, 2 and 3), which clips by itself. The norm is computed once, for finiteness, clipping and the
log. Nothing here imports DeepSpeed: an engine is there only where somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_tas.errors import UserError
from lightning_tas.training.guard import Decision
from lightning_tas.training.unused import fill_missing


class Gradients(Protocol):
    """What the module does with gradients between the backward pass and the optimiser."""

    def complete(self) -> bool:
        """Whether an optimiser step follows; false while batches only accumulate."""

    def norm(self) -> Tensor:
        """2-norm over all ranks and parameters before clipping, a scalar; not finite where a gradient is not."""

    def settle(self, decision: Decision, unused: str) -> None:
        """Prepare the optimiser step that follows: it does nothing if it is bad; `unused` as in `train.unused`."""

    def clip(self, limit: float, by_value: bool) -> None:
        """Scale the gradient to a norm of at most `limit`, or cut its elements to ``-limit .. limit``."""


def gradients_of(trainer: pl.Trainer, optimizer: Optimizer) -> Gradients:
    """The gradients that `trainer`'s strategy keeps for `optimizer`."""
    engine = trainer.model
    if hasattr(engine, "zero_optimization_stage"):
        return EngineGradients(engine)
    return ParameterGradients(optimizer, getattr(trainer.precision_plugin, "scaler", None))


class ParameterGradients:
    """Gradients in `Parameter.grad`; under float16 they are still scaled when a fused optimiser is to unscale them."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._norm: Tensor | None = None

    def complete(self) -> bool:
        return True  # Lightning comes here for whole steps only

    def norm(self) -> Tensor:
        if self.scaler is not None and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # Lightning leaves it to the fused kernel, too late for us; the scaler then tells the kernel not to.
            self.scaler.unscale_(self.optimizer)
        self._norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters() if p.grad is not None])
        return self._norm

    def settle(self, decision: Decision, unused: str) -> None:
        if decision.bad:
            # The optimiser passes over parameters without a gradient: weights, moments and step counts stay.
            for parameter in self._parameters():
                parameter.grad = None
        elif unused == "zero":
            fill_missing(self._parameters())

    def clip(self, limit: float, by_value: bool) -> None:
        assert self._norm is not None
        if by_value:
            torch.nn.utils.clip_grad_value_(self._parameters(), limit)
        else:
            torch.nn.utils.clip_grads_with_norm_(self._parameters(), limit, self._norm)

    def _parameters(self) -> Iterator[Parameter]:
        return (p for group in self.optimizer.param_groups for p in group["params"])


class EngineGradients:
    """Gradients inside a DeepSpeed engine of ZeRO stage 1, 2 or 3.

    The engine computes the norm in its step, and leaves a step out whose norm is not finite. We compute it before, by
    its own method, and have that method answer what was agreed on: the norm, or infinity for a bad step. The answer
    lies on the host, so the engine's look at it waits for nothing.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self._method = "_get_norm_groups" if engine.zero_optimization_stage() == 3 else "scaled_global_norm"
        if not hasattr(self.optimizer, self._method):
            raise UserError(
                f"trainer.strategy: this version of deepspeed steps through {type(self.optimizer).__name__}, which "
                "does not tell its gradient's norm; bad steps could not be left out"
            )

    def complete(self) -> bool:
        return bool(self.engine.is_gradient_accumulation_boundary())

    def norm(self) -> Tensor:
        for name in (self._method, "has_overflow"):
            vars(self.optimizer).pop(name, None)  # our answers of the step before
        norms = getattr(self.optimizer, self._method)()
        norms = torch.stack([n.float() for n in norms]) if isinstance(norms, list) else norms.float().reshape(1)
        # The engine's helpers write -1 for what is not finite.
        norm = torch.where((norms < 0).any(), float("inf"), torch.linalg.vector_norm(norms))
        return norm / self.optimizer.loss_scale

    def settle(self, decision: Decision, unused: str) -> None:
        optimizer = self.optimizer
        norm = torch.tensor(float("inf") if decision.bad else decision.grad_norm * optimizer.loss_scale)
        answer: Any = [norm] if self._method == "_get_norm_groups" else norm
        setattr(optimizer, self._method, lambda *_, **__: answer)
        optimizer.has_overflow = lambda *_, **__: decision.bad
        optimizer.check_grad_overflow = True  # else bfloat16 steps would not look at the norm

    def clip(self, limit: float, by_value: bool) -> None:
        """The engine has been told `limit` and clips in its step."""
