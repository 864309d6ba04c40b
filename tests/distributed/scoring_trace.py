"""What a training leaves behind at every step, for comparing it with another one bit for bit; scoring in its middle."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_tas.callbacks.proxy_scoring import private_twin
from lightning_tas.proxies import score_many, score_one
from lightning_tas.supernets import network


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    for value in values:
        tensor = isinstance(value, torch.Tensor)
        found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor else repr(value).encode())
    return found.hexdigest()


def randomness() -> str:
    return digest(torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())


def facts(net: torch.nn.Module) -> dict[str, Any]:
    """Everything of a network and of the process that a score must not change."""
    modules, parameters = list(net.modules()), list(net.parameters())
    return {
        "modes": [m.training for m in modules],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules],
        "flags": [(id(p), p.requires_grad, p.dtype, p.grad is None) for p in parameters],
        "weights": digest(*net.state_dict().values()),
        "gradients": digest(*[p.grad if p.grad is not None else "none" for p in parameters]),
        "random": randomness(),
    }


class Trace(pl.Callback):
    """At every step: loss, sub-networks, random states, gradients; at every epoch: modes, hooks, flags, weights."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Before the module seeds torch anew."""
        archs = [arch and arch.id for arch in module.architectures(trainer.global_step)]
        self.steps.append({"random": randomness(), "batch": digest(*batch), "archs": archs})

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


class Killed(RuntimeError):
    pass


class Kill(pl.Callback):
    """Dies after `step` updates."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


class Live(pl.Callback):
    """Scores the very module that is trained, in the middle of a fit; a `Trace` behind it sees what comes after.

    At two steps of eight, each before its forward pass and once its gradients are there. `archs`: sub-networks of a
    supernet, which the processes share as they do anywhere; a network alone is scored on every process.
    """

    def __init__(self, names: list[str], archs: list[Any]) -> None:
        self.names, self.archs = names, archs
        self.found: list[dict[str, list[float]]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._look(trainer, module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._look(trainer, module)

    def _look(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step not in (1, 5):
            return
        net, before = module.net, facts(module.net)
        found = self._scores(net)
        same(facts(net), before, f"step {trainer.global_step}")
        if hasattr(net, "subnet"):
            twin = private_twin(net, module.device)
        else:
            with torch.random.fork_rng(devices=[]):  # building draws, scoring must not
                twin = network(net.arch, **net.options)
            twin.load_state_dict(net.state_dict())
        assert found == self._scores(twin), "not the scores of these weights"
        self.found.append(found)

    def _scores(self, net: Any) -> dict[str, list[float]]:
        if not hasattr(net, "subnet"):
            return {name: [score_one(name, net, batch_size=4).value] for name in self.names}
        scores = score_many(self.names, net, self.archs, batch_size=4)
        return {name: scores.value(name).tolist() for name in self.names}


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
