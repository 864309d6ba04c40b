"""Bad steps on one process: what is left out, counted, restored, and when training ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor

from lightning_tas.errors import Stopped, UserError
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.guard import Decision, StepGuard
from lightning_tas.training.optim import build_optimiser

Make = Callable[..., Any]
PLAIN: dict[str, Any] = {
    "lr": 1e-3, "lr_batch": None, "warmup_epochs": 0, "min_lr": 1e-3, "mixup": 0.0, "cutmix": 0.0,
}  # fmt: skip


class Spoil(torch.autograd.Function):
    """The identity with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * math.inf


class Log(pl.Callback):
    """What each batch logged, and the optimiser's state after it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.states: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.states.append(torch.cat([value.flatten().clone() for value in (*trainer.model.parameters(), *moments)]))


def spoil(module: Any, batches: tuple[int, ...], fault: str = "loss") -> Any:
    """`module`, whose loss or gradient is not finite at these batches of every epoch."""
    sound, current = module.mean_loss, {"batch": -1}
    started = module.on_train_batch_start

    def on_train_batch_start(batch: Any, batch_idx: int) -> None:
        current["batch"] = batch_idx
        started(batch, batch_idx)

    def mean_loss(*given: Any) -> Tensor:
        loss = sound(*given)
        if current["batch"] in batches:
            return loss * math.nan if fault == "loss" else Spoil.apply(loss)
        return loss

    module.mean_loss, module.on_train_batch_start = mean_loss, on_train_batch_start
    return module


def plain_loop(
    make_net: Make, loader: Any, archs: Callable[[int], Any], skip: tuple[int, ...] = (), unused: str = "skip",
    clip: float | None = None, accumulate: int = 1, autocast: bool = False,
) -> tuple[Any, list[float]]:  # fmt: skip
    """The same training without Lightning, passing over steps; the network and the norms of its steps."""
    net, norms = make_net(drop_path_rate=0.0).train(), []
    optimiser = build_optimiser(net, TrainConfig(**PLAIN), 1e-3)
    batches = list(loader)
    for step in range(len(batches) // accumulate):
        if step in skip:
            continue
        optimiser.zero_grad()
        for images, targets in batches[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                logits = net(images, archs(step)[0])
            loss = F.cross_entropy(logits.float(), targets, label_smoothing=0.1)
            (loss / accumulate).backward()
        grouped = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        norms.append(float(torch.nn.utils.clip_grad_norm_(grouped, clip or math.inf)))
        for parameter in net.parameters():
            if unused == "zero" and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimiser.step()
    return net, norms


def assert_equal(net: Any, other: Any, tolerance: float = 0.0) -> None:
    wanted = other.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=tolerance)


def test_the_guard_counts_grants_and_forgets() -> None:
    guard, fine, bad = StepGuard(), torch.tensor(1.0), torch.tensor(math.nan)
    guard.note_loss(fine)
    guard.note_loss(bad)
    assert guard.decide(fine) == guard.last and guard.last.bad and guard.last.bad_loss == 0
    guard.note_loss(fine)
    assert guard.last == Decision()  # a batch that only accumulates decides nothing
    assert guard.decide(torch.tensor(math.inf)).bad and guard.last.bad_loss is None and math.isnan(guard.last.grad_norm)
    assert guard.state_dict() == {"total": 2, "in_a_row": 2}
    guard.requests.save = guard.requests.stop = True
    for save in (True, False):
        guard.note_loss(fine)
        decision = guard.decide(torch.tensor(0.5))
        assert (decision.bad, decision.save, decision.stop, decision.grad_norm) == (False, save, True, 0.5)
    assert guard.state_dict() == {"total": 2, "in_a_row": 0}
    other = StepGuard()
    other.load_state_dict({"total": 5, "in_a_row": 4})
    other.note_loss(bad)
    assert other.decide().bad and other.state_dict() == {"total": 6, "in_a_row": 5}
    with pytest.raises(AssertionError, match="no loss"):
        guard.decide()
    guard.note_loss(bad)
    guard.forget()
    guard.note_loss(fine)
    assert not guard.decide().bad


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("unused", ["skip", "zero"])
def test_a_bad_step_is_as_if_it_had_not_been(
    make_module: Make, make_net: Make, make_loader: Make, make_trainer: Make, fault: str, unused: str
) -> None:
    module = make_module(TrainConfig(**PLAIN), net=make_net(drop_path_rate=0.0))
    module.unused = unused
    log = Log()
    place = "batch 2 of rank 0" if fault == "loss" else "batch 2"
    with pytest.warns(UserWarning, match=rf"step 2 \(epoch 0, {place}\): the {fault} is not finite"):
        make_trainer(max_epochs=1, callbacks=[log]).fit(spoil(module, (2,), fault), make_loader(48))
    wanted, _ = plain_loop(make_net, make_loader(48), module.sampler, (2,), unused)
    other, _ = plain_loop(make_net, make_loader(48), module.sampler, (), unused)
    assert_equal(module.net, wanted)
    assert any(not torch.equal(a, b) for a, b in zip(wanted.parameters(), other.parameters(), strict=True))
    # Moments and step counts too: nothing but the counters moves.
    assert torch.equal(log.states[2], log.states[1]) and not torch.equal(log.states[2], log.states[3])
    assert [row["train/bad_steps"] for row in log.rows] == [0, 0, 1, 1, 1, 1]
    assert [math.isnan(row["train/grad_norm"]) for row in log.rows] == [False, False, True, False, False, False]


def test_zero_moves_what_a_step_leaves_out_and_skip_does_not(
    make_module: Make, make_net: Make, make_loader: Make, make_trainer: Make, space: Any
) -> None:
    nets = {}
    for unused in ("skip", "zero"):
        # Deep at first, so that there are moments, then shallow.
        archs = [space.largest(), space.smallest()]
        module = make_module(TrainConfig(**PLAIN), net=make_net(drop_path_rate=0.0), sampler=_fixed(archs))
        module.unused = unused
        make_trainer(max_epochs=1).fit(module, make_loader(32))
        nets[unused] = module.net
        assert_equal(module.net, plain_loop(make_net, make_loader(32), module.sampler, (), unused)[0])
    first, _ = plain_loop(make_net, make_loader(8), _fixed([space.largest()]))
    last = "blocks.2.mlp.fc1.weight"
    assert torch.equal(nets["skip"].state_dict()[last], first.state_dict()[last])
    assert not torch.equal(nets["zero"].state_dict()[last], first.state_dict()[last])


def _fixed(archs: list[Any]) -> Any:
    """The first architecture at step 0, the last one from then on."""
    return lambda step: [archs[min(step, len(archs) - 1)]]


@pytest.mark.parametrize(("precision", "accumulate"), [("32-true", 1), ("32-true", 2), ("bf16-mixed", 1)])
def test_clipping_uses_the_logged_norm_and_the_fused_optimiser(
    make_module: Make, make_net: Make, make_loader: Make, make_trainer: Make, precision: str, accumulate: int
) -> None:
    module, log = make_module(TrainConfig(**PLAIN), net=make_net(drop_path_rate=0.0)), Log()
    trainer = make_trainer(
        max_epochs=1, callbacks=[log], precision=precision, gradient_clip_val=0.1, accumulate_grad_batches=accumulate
    )
    trainer.fit(module, make_loader(48))
    assert trainer.optimizers[0].param_groups[0]["fused"]
    wanted, norms = plain_loop(
        make_net, make_loader(48), module.sampler, (), clip=0.1, accumulate=accumulate, autocast=precision != "32-true"
    )
    assert_equal(module.net, wanted)
    assert min(norms) > 0.1  # before clipping, and at every step clipped
    assert [row["train/grad_norm"] for row in log.rows[accumulate - 1 :: accumulate]] == pytest.approx(norms, rel=1e-6)


def test_clipping_by_value(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    seen = []

    class Look(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            seen.extend(float(p.grad.abs().max()) for p in pl_module.parameters() if p.grad is not None)

    module = make_module(TrainConfig(**PLAIN))
    trainer = make_trainer(callbacks=[Look()], gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    trainer.fit(module, make_loader())
    assert max(seen) == pytest.approx(1e-3)


def test_the_scaler_of_float16_finds_its_scale(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    """GradScaler works on CPU too; Lightning offers 16-mixed on GPUs only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module, log = make_module(TrainConfig(max_bad_steps=40, **PLAIN)), Log()
    trainer = make_trainer(max_epochs=8, callbacks=[log], plugins=[plugin], gradient_clip_val=0.1)
    trainer.fit(module, make_loader())
    assert trainer.optimizers[0].param_groups[0]["fused"]
    bad = int(log.rows[-1]["train/bad_steps"])
    assert 8 < bad < 31 and module.guard.in_a_row == 0
    assert scaler.get_scale() == 2.0 ** (40 - bad)
    assert [row["train/bad_steps"] for row in log.rows] == [*range(1, bad + 1), *[bad] * (32 - bad)]
    assert torch.equal(log.states[bad - 1], log.states[0]) and len(log.states[bad]) > len(log.states[0])
    norms = [row["train/grad_norm"] for row in log.rows[bad:]]
    assert all(0.01 < norm < 100 for norm in norms)  # of unscaled gradients


def test_too_many_in_a_row_end_training(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    module = spoil(make_module(TrainConfig(max_bad_steps=3, **PLAIN)), (0, 2, 3, 4))
    with pytest.raises(Stopped) as stopped:
        make_trainer().fit(module, make_loader(64))
    arch = module.sampler(4)[0]
    assert stopped.value.status == 3
    for part in ("step 4 (epoch 0, batch 4 of rank 0)", "loss", "train.max_bad_steps=3", f"{arch.id} {arch!r}"):
        assert part in str(stopped.value)
    fewer = spoil(make_module(TrainConfig(max_bad_steps=3, **PLAIN)), (0, 2, 3))
    make_trainer().fit(fewer, make_loader(64))
    assert fewer.guard.state_dict() == {"total": 6, "in_a_row": 0}


def test_the_count_goes_on_after_a_resume(
    make_module: Make, make_loader: Make, make_trainer: Make, tmp_path: Path
) -> None:
    first = spoil(make_module(TrainConfig(max_bad_steps=6, **PLAIN)), (2, 3))
    trainer = make_trainer(max_epochs=1)
    trainer.fit(first, make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    second = spoil(make_module(TrainConfig(max_bad_steps=6, **PLAIN)), (0, 1, 2, 3))
    with pytest.raises(Stopped, match=r"step 7 .*after 6 such steps"):
        make_trainer(max_epochs=2).fit(second, make_loader(), ckpt_path=str(tmp_path / "a.ckpt"))
    assert second.guard.total == 6
    third = make_module(TrainConfig(**PLAIN))
    third.unused = "zero"
    with pytest.raises(UserError, match=r"resume: train.unused is 'zero', but 'skip' in the checkpoint"):
        make_trainer(max_epochs=2).fit(third, make_loader(), ckpt_path=str(tmp_path / "a.ckpt"))


def test_a_fit_forgets_what_was_noted_before_it(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    """A fit that was interrupted inside a step leaves a loss that the next one must not take for its own."""
    module = make_module(TrainConfig(**PLAIN), sampler="uniform")
    module.guard.note_loss(torch.tensor(float("nan")))
    module._batches.append(7)
    make_trainer(max_epochs=1).fit(module, make_loader())
    assert module.guard.total == 0
