"""What only a GPU can show: no hidden synchronisation, evaluation on a device; skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_tas.evaluator import Meter, evaluate
from lightning_tas.training.config import TrainConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Make = Callable[..., Any]


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
