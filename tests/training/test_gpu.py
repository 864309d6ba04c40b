"""What only a GPU can show: one synchronisation a step, float16 scaling, evaluation on a device; else skipped."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_tas.evaluator import Meter, evaluate
from lightning_tas.launch.trainer import deterministic
from lightning_tas.training.config import TrainConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Make = Callable[..., Any]


class Waits(pl.Callback):
    """Counts how often the host waits for the device between getting a batch and having done with it."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.places: list[str] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._catching = warnings.catch_warnings(record=True)
        self._caught = self._catching.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catching.__exit__(None, None, None)
        waits = [warning for warning in self._caught or [] if "called a synchronizing" in str(warning.message)]
        self.counts.append(len(waits))
        self.places += [f"{wait.filename}:{wait.lineno}" for wait in waits]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(("accumulate", "unused"), [(1, "skip"), (2, "zero")])
def test_the_host_waits_once_for_each_update(
    make_module: Make, make_trainer: Make, make_loader: Make, precision: str, accumulate: int, unused: str
) -> None:
    train = TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=1, ema=True, schedule="step", checkpoint_activations=True)
    module, waits = make_module(train, sampler="sandwich"), Waits()
    module.unused = unused
    trainer = make_trainer(
        accelerator="gpu", devices=1, precision=precision, callbacks=[*module.callbacks(), waits],
        gradient_clip_val=1.0, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(module, make_loader(64))
    assert trainer.optimizers[0].param_groups[0]["fused"]
    later = waits.counts[8:]  # in the first epoch tables of indices are made, and states of the optimiser
    assert later == [0, 1][-accumulate:] * (8 // accumulate), (later, waits.places)
    assert all("guard.py" in place for place in waits.places[-4:]), waits.places


def test_deterministic_training_repeats_itself_bit_for_bit(
    make_module: Make, make_trainer: Make, make_loader: Make
) -> None:
    weights = []
    for _ in range(2):
        module = make_module(TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=0), sampler="sandwich")
        with deterministic(True):
            make_trainer(accelerator="gpu", devices=1, deterministic=True).fit(module, make_loader(64))
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


def test_float16_steps_that_overflow_are_left_out(make_module: Make, make_trainer: Make, make_loader: Make) -> None:
    module = make_module(TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=0))
    sound = module.mean_loss

    def mean_loss(*given: Any) -> Tensor:
        loss: Tensor = sound(*given)
        return loss * math.nan if module.global_step == 2 else loss

    module.mean_loss = mean_loss
    trainer = make_trainer(accelerator="gpu", devices=1, precision="16-mixed", gradient_clip_val=0.1)
    trainer.fit(module, make_loader())
    assert module.guard.total >= 1 and module.guard.in_a_row == 0
    scale = trainer.precision_plugin.scaler.get_scale()
    assert scale == 2.0 ** (16 - module.guard.total)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
def test_a_step_never_waits_for_the_device(make_module: Make, mode: str) -> None:
    module = make_module(TrainConfig(mixup_mode=mode)).cuda()
    space, meter = module.space, Meter()
    images, targets = torch.randn(7, 1, 8, 8, device="cuda"), torch.randint(4, (7,), device="cuda")

    def step(seed: int) -> None:
        mixed, soft = module.mixing(images, targets, seed)
        module.mean_loss(mixed, soft, [space.largest(), space.sample(seed=seed)]).backward()
        with torch.no_grad():
            meter.update(module(images, space.smallest()), targets)

    step(0)  # caches of indices are filled once
    try:
        torch.cuda.set_sync_debug_mode("error")
        for seed in range(1, 5):
            step(seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.compute().samples == 35


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_training_on_the_device(make_module: Make, make_trainer: Make, make_loader: Make, precision: str) -> None:
    module = make_module(TrainConfig(lr=3e-3, lr_batch=None, warmup_epochs=1, ema=True))
    trainer = make_trainer(
        accelerator="gpu", devices=1, precision=precision, callbacks=module.callbacks(), gradient_clip_val=1.0
    )
    trainer.fit(module, make_loader(), make_loader())
    assert all(torch.isfinite(value) for value in trainer.callback_metrics.values())


def test_evaluation_moves_there_and_back(make_net: Make, make_loader: Make) -> None:
    net = make_net()
    archs, loader = [net.space.smallest(), net.space.largest()], make_loader()
    state = torch.cuda.get_rng_state()
    here, there = evaluate(net, archs, loader), evaluate(net, archs, loader, device="cuda")
    assert next(net.parameters()).device.type == "cpu" and torch.equal(torch.cuda.get_rng_state(), state)
    for a, b in zip(here, there, strict=True):
        assert (a.top1, a.top5, a.samples) == (b.top1, b.top5, b.samples) and a.loss == pytest.approx(b.loss, rel=1e-4)
    low = evaluate(net, archs, loader, device="cuda", amp_dtype=torch.bfloat16)
    assert low[1].loss == pytest.approx(here[1].loss, rel=0.05)
