"""What a training leaves behind at every step, for comparing it with another one bit for bit."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    for value in values:
        tensor = isinstance(value, torch.Tensor)
        found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor else repr(value).encode())
    return found.hexdigest()


class Trace(pl.Callback):
    """At every step: loss, sub-networks, random states, gradients; at every epoch: modes, hooks, flags, weights."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Before the module seeds torch anew."""
        states = digest(torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
        archs = [arch.id for arch in module.architectures(trainer.global_step)]
        self.steps.append({"random": states, "batch": digest(*batch), "archs": archs})

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.steps[-1]["gradients"] = digest(*[p.grad if p.grad is not None else "none" for p in module.parameters()])

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.steps[-1]["loss"] = float(outputs["loss"])

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        modules = list(module.modules())
        self.epochs.append({
            "modes": [m.training for m in modules],
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules],
            "flags": [(p.requires_grad, p.dtype, p.grad is None) for p in module.parameters()],
            "weights": digest(*module.parameters()),
            "metrics": sorted((key, float(value)) for key, value in trainer.callback_metrics.items()),
        })  # fmt: skip


def same(a: Any, b: Any, where: str = "") -> None:
    """Deep equality, bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{i}")
    elif a != b:
        # DeepSpeed keeps objects in its shards, without an equality of their own.
        assert hasattr(a, "__dict__") and not isinstance(a, type), where
        same(vars(a), vars(b), where)
