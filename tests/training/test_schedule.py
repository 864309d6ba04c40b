"""The learning rate against literals of the reference recipe and against timm's scheduler."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from lightning_tas.errors import UserError
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.schedule import WarmupCosine, attach, plan


def rates(curve: WarmupCosine, counts: int) -> list[float]:
    """What an optimiser really uses, through torch's scheduler."""
    optimiser = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]}], lr=curve.peak)
    scheduler = attach(optimiser, curve)
    used = []
    for _ in range(counts):
        used.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return used


def test_autoformer_recipe_per_epoch_equals_literals() -> None:
    """500 epochs, 20 of warm-up from 1e-6 to 1e-3, cosine to 1e-5 (AutoFormer's supernets)."""
    used = rates(plan(TrainConfig(), peak=1e-3, total_steps=500 * 1251, steps_per_epoch=1251), 500)
    assert used[0] == pytest.approx(1e-6)
    assert used[1] == pytest.approx(1e-6 + 999e-6 / 20)
    assert used[19] == pytest.approx(1e-6 + 19 * 999e-6 / 20)
    # The cosine runs from epoch 0 and is joined at epoch 20: 1e-5 + 0.5 * 0.99e-3 * (1 + cos(pi * 20 / 500)).
    assert used[20] == pytest.approx(0.00099609750, rel=1e-6)
    assert used[250] == pytest.approx((1e-3 + 1e-5) / 2)
    assert used[499] == pytest.approx(1e-5, rel=2e-3) and used[499] > 1e-5
    assert all(a > b for a, b in pairwise(used[20:]))


def test_lag_repeats_the_first_epoch_and_shifts_the_curve() -> None:
    straight = rates(plan(TrainConfig(warmup_epochs=5), 1e-3, 50, 1), 50)
    lagging = rates(plan(TrainConfig(warmup_epochs=5, schedule_lag=True), 1e-3, 50, 1), 50)
    assert lagging[0] == lagging[1] == pytest.approx(1e-6)
    assert lagging[1:] == straight[:-1]


@pytest.mark.parametrize(("epochs", "warmup"), [(30, 5), (30, 0), (10, 2)])
def test_equals_timm(epochs: int, warmup: int) -> None:
    curve = plan(TrainConfig(warmup_epochs=warmup), 2e-3, epochs * 7, 7)
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-3)
    theirs = CosineLRScheduler(optimiser, t_initial=epochs, lr_min=1e-5, warmup_t=warmup, warmup_lr_init=1e-6)
    expected = [optimiser.param_groups[0]["lr"]]
    for epoch in range(1, epochs):
        theirs.step(epoch)
        expected.append(optimiser.param_groups[0]["lr"])
    assert rates(curve, epochs) == pytest.approx(expected, rel=1e-9)


def test_per_step_is_the_same_curve_at_fractions_of_epochs() -> None:
    for schedule in ("step", "epoch"):  # per epoch half an epoch of warm-up would be a whole one at 1e-6
        train = TrainConfig(schedule=schedule, warmup_epochs=1.5)
        used = rates(plan(train, 1e-3, total_steps=80, steps_per_epoch=10), 80)
        assert used[0] == pytest.approx(1e-6)
        assert used[6] == pytest.approx(1e-6 + 0.4 * 999e-6)  # 0.6 of 1.5 epochs
        assert used[15] == pytest.approx(1e-5 + 0.5 * 0.99e-3 * (1 + math.cos(math.pi * 1.5 / 8)))
        assert all(a > b for a, b in pairwise(used[15:])) and used[-1] < 2e-5


@pytest.mark.parametrize(("schedule", "per_epoch"), [("epoch", 10), ("step", 10), ("epoch", 1251)])
@pytest.mark.parametrize("epochs", [1, 3, 10, 20, 99, 100, 300])
def test_one_rule_for_every_length(epochs: int, schedule: str, per_epoch: int) -> None:
    """The whole curve at 20 epochs of warm-up: a ramp over a fifth of training at most, then the cosine to its end."""
    steps = epochs * per_epoch
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        curve = plan(TrainConfig(schedule=schedule), 1e-3, steps, per_epoch)
    assert len(heard) == (epochs < 100) == any("more than train.warmup_share=0.2" in str(one.message) for one in heard)
    warmup = min(20, epochs / 5)
    for step in range(steps):
        at = step // per_epoch if not curve.per_step else step / per_epoch
        ramp = 1e-6 + 999e-6 * at / warmup
        cosine = 1e-5 + 0.5 * 0.99e-3 * (1 + math.cos(math.pi * at / epochs))
        used = curve.lr(step if curve.per_step else at)
        assert used == pytest.approx(ramp if at < warmup else cosine, rel=1e-9), f"step {step}"
    assert curve.per_step == (schedule == "step" or epochs < 100)
    # What of the peak is reached, and how much of training runs below a tenth of it before.
    last = [curve.lr(i if curve.per_step else i // per_epoch) for i in range(steps)]
    assert max(last) > 0.89e-3 and sum(rate < 1e-4 for rate in last[: steps // 5]) <= 0.03 * steps + 1
    print(epochs, [f"{rate:.2g}" for rate in last[:: max(steps // 10, 1)]])


def test_a_warmup_of_less_than_a_step_is_none() -> None:
    """Its first step would run at 1e-6, and with one step that is the whole training."""
    for steps, first in ((1, 1e-3), (4, 1e-3), (5, 1e-6)):
        with pytest.warns(UserWarning, match=r"more than train.warmup_share=0.2"):
            assert plan(TrainConfig(), 1e-3, steps, 100).lr(0) == pytest.approx(first)


def test_a_longer_share_of_warmup_can_be_asked_for() -> None:
    """As a fine-tuning of 10 epochs with 5 of warm-up."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curve = plan(TrainConfig(warmup_epochs=5, warmup_share=0.5), 1e-3, 100, 10)
    assert curve.warmup_epochs == 5 and not curve.per_step


def test_a_fitting_schedule_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(TrainConfig(warmup_epochs=0, min_lr=0), 1e-3, 5, 5)
        plan(TrainConfig(warmup_epochs=2.5), 1e-3, 130, 10)


def test_floors_above_the_peak_and_a_useless_lag_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"train\.min_lr"):
        curve = plan(TrainConfig(warmup_epochs=0), 2e-6, 10, 1)
    assert rates(curve, 10) == pytest.approx([2e-6] * 10)
    with pytest.warns(UserWarning, match="schedule_lag is ignored"):
        plan(TrainConfig(schedule="step", schedule_lag=True), 1e-3, 1000, 10)


def test_state_holds_primitives_and_restores_the_curve() -> None:
    curve = plan(TrainConfig(warmup_epochs=2), 1e-3, 10, 1)
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = attach(optimiser, curve)
    for _ in range(4):
        optimiser.step()
        scheduler.step()
    state = scheduler.state_dict()
    assert all(isinstance(v, int | float | bool) for v in state["lr_lambdas"][0].values())
    again = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    restored = attach(again, WarmupCosine(1e-3, 0.0, 0.0, 0.0, 99))
    restored.load_state_dict(state)
    for _ in range(3):
        for one in (optimiser, again):
            one.step()
        scheduler.step()
        restored.step()
        assert (
            again.param_groups[0]["lr"]
            == optimiser.param_groups[0]["lr"]
            == pytest.approx(curve.lr(restored.last_epoch))
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mixup_mode", "bach"), ("schedule", "epochs"), ("betas", [0.9]), ("lr_batch", 0), ("lr", 0.0),
        ("lr", math.nan), ("min_lr", -1.0), ("warmup_epochs", -1), ("mixup_prob", 1.5), ("label_smoothing", 1.0),
        ("ema_decay", 2.0),
    ],
)  # fmt: skip
def test_impossible_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"train.{field}: .*{'Did you mean' if isinstance(value, str) else ''}"):
        TrainConfig(**{field: value}).check()  # type: ignore[arg-type]


def test_config_passes_through_hydra_s_schema() -> None:
    from omegaconf import OmegaConf

    node = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.create({"lr_batch": None, "warmup_epochs": 3}))
    train = OmegaConf.to_object(node)
    assert isinstance(train, TrainConfig) and train.lr_batch is None and train.warmup_epochs == 3
    train.check()
