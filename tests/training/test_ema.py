"""Averaged weights: what they are, when they are used, that training does not notice, on every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_tas import spaces
from lightning_tas.samplers import SamplerConfig
from lightning_tas.supernets import supernet
from lightning_tas.training.checkpoint import load_supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.ema import WeightAverage
from lightning_tas.training.sharded import read_checkpoint
from lightning_tas.training.supernet_module import SupernetModule

Make = Callable[..., Any]
DECAY = 0.5


def recipe(**given: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-2, "lr_batch": None, "warmup_epochs": 0, "ema": True, "ema_decay": DECAY, **given})


class Naive(pl.Callback):
    """The average by its definition, from the live weights after each update; what validation saw."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}
        self.validated: list[dict[str, torch.Tensor]] = []
        self.step = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        self.live = copy(module)
        now = {name: value.float() for name, value in self.live.items()}
        self.average = {k: DECAY * self.average.get(k, v) + (1 - DECAY) * v for k, v in now.items()}

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self.validated.append(copy(module))


def copy(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=name)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def train(make_module: Make, make_trainer: Make, make_loader: Make) -> Callable[..., Any]:
    def fit(*callbacks: pl.Callback, ema: bool = True, **given: Any) -> tuple[pl.Trainer, Any]:
        module = make_module(recipe(ema=ema), seed=1)
        trainer = make_trainer(callbacks=[*module.callbacks(), *callbacks], num_sanity_val_steps=1, **given)
        trainer.fit(module, make_loader(), make_loader(8))
        return trainer, module

    return fit


def test_the_average_is_what_it_is_defined_as_and_training_does_not_notice(train: Make, tmp_path: Path) -> None:
    naive = Naive()
    trainer, module = train(naive, accumulate_grad_batches=2)
    bare = Naive()
    train(bare, ema=False, accumulate_grad_batches=2)
    assert equal(naive.live, bare.live)
    close(copy(module), naive.average)  # after the fit the module holds it
    close(naive.validated[-1], naive.average)
    assert len(naive.validated) == 3 and not equal(naive.validated[0], naive.validated[1])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    content = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert equal(content["state_dict"], naive.live)
    assert equal(content["ema_state"]["average"], copy(module)) and content["lightning_tas"]["weights"] == "ema"
    live, ema = (load_supernet(tmp_path / "end.ckpt", weights=which) for which in ("live", "ema"))  # type: ignore[arg-type]
    assert (live.weights, ema.weights, load_supernet(tmp_path / "end.ckpt").weights) == ("live", "ema", "ema")
    assert equal({f"net.{k}": v for k, v in live.net.state_dict().items()}, naive.live)
    trainer.test(module, torch.utils.data.DataLoader([(torch.zeros(1, 8, 8), 0)] * 2), verbose=False)
    trainer.validate(module, torch.utils.data.DataLoader([(torch.zeros(1, 8, 8), 0)] * 2), verbose=False)
    close(copy(module), naive.average)


def test_a_bfloat16_network_is_averaged_in_float32(make_module: Make) -> None:
    module = make_module(recipe()).bfloat16()
    average, want = WeightAverage(0.9), {}
    for step in range(5):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01 * step)
        average._update(module)
        now = {name: value.float() for name, value in copy(module).items()}
        want = {name: 0.9 * want[name] + 0.1 * value for name, value in now.items()} if want else now
    assert average.average is not None
    close(average.average, want)
    live = copy(module)
    average._show(module)
    assert all(torch.equal(value, want[name].bfloat16()) for name, value in copy(module).items())
    average._hide(module)
    assert equal(copy(module), live)


def test_before_the_first_update_there_is_none(train: Make, tmp_path: Path, make_module: Make) -> None:
    trainer, module = train(max_epochs=0)
    trainer.save_checkpoint(tmp_path / "start.ckpt")
    assert load_supernet(tmp_path / "start.ckpt").weights == "live"
    checkpoint: dict[str, Any] = {"state_dict": {}}
    WeightAverage(0.9).on_save_checkpoint(trainer, module, checkpoint)
    assert checkpoint == {"state_dict": {}}
    with pytest.warns(UserWarning, match="the average begins anew"):
        WeightAverage(0.9).on_load_checkpoint(trainer, module, checkpoint)


# --- several processes ------------------------------------------------------------------------------------------------


def averaged(folder: str, strategy: str, precision: str) -> dict[str, Any]:
    """Train on two processes with the naive average beside; go on from the middle and compare."""
    from lightning_tas.commands.config import CheckpointConfig
    from lightning_tas.data import TASDataModule
    from lightning_tas.data.config import DataConfig
    from lightning_tas.launch.checkpoints import RunCheckpoints
    from lightning_tas.launch.strategies import build_strategy

    space = spaces.isotropic("mini", embed_dim=[16], depth=[1, 2], num_heads=[2], mlp_ratio=[1, 2])

    def fit(name: str, resume: str | None = None) -> Naive:
        torch.manual_seed(0)
        net = supernet(space, num_classes=10, img_size=8, in_chans=1, patch_size=4)
        module = SupernetModule(net, None, recipe(), 16, seed=3, sampler_config=SamplerConfig("uniform"))
        module.unused = "zero"
        naive = Naive()
        saver = RunCheckpoints(Path(folder) / name, CheckpointConfig(every_n_steps=2, keep_last=-1))
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=build_strategy(strategy, 2, "cpu", True), precision=precision,
            max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[*module.callbacks(), naive, saver],
        )  # fmt: skip
        data = TASDataModule(DataConfig(batch_size=8, train_subset=64, search_val=16), seed=1)
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        return naive

    whole = fit("whole")
    fit("rest", str(Path(folder) / "whole" / "epoch=0000-step=0000002.ckpt"))
    return {"average": whole.average, "live": whole.live, "validated": whole.validated[-1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "32-true"), ("deepspeed_stage_1", "32-true"), ("deepspeed_stage_2", "bf16-mixed")],
)
def test_it_survives_in_the_checkpoints_of_every_strategy(
    processes: Any, tmp_path: Path, strategy: str, precision: str
) -> None:
    want = processes.run(averaged, 2, str(tmp_path), strategy, precision, timeout=200)
    assert equal(want[0]["average"], want[1]["average"])
    whole, rest = (read_checkpoint(tmp_path / name / "epoch=0000-step=0000004.ckpt") for name in ("whole", "rest"))
    average = whole["ema_state"]["average"]
    close(average, want[0]["average"])
    assert {value.dtype for value in average.values()} == {torch.float32}
    assert equal(rest["ema_state"]["average"], average) and equal(rest["state_dict"], whole["state_dict"])
    shown = want[0]["validated"]
    assert equal({name: value.to(shown[name].dtype) for name, value in average.items()}, shown)
    # Under bf16-mixed DeepSpeed trains a bfloat16 module; what it keeps, and we read, is float32.
    live = {name: value.to(want[0]["live"][name].dtype) for name, value in whole["state_dict"].items()}
    assert equal(live, want[0]["live"])
