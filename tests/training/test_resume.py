"""A run killed in the middle of an epoch and resumed equals the uninterrupted one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_tas import spaces
from lightning_tas.data import TASDataModule
from lightning_tas.data.config import DataConfig
from lightning_tas.errors import UserError
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import ElasticViT, supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.retrain import RetrainModule

Make = Callable[..., Any]
STEPS = 24  # 3 epochs of 8


class Killed(RuntimeError):
    pass


class Watch(pl.Callback):
    """Notes the losses by step; dies after `kill` steps."""

    def __init__(self, kill: int | None = None) -> None:
        self.kill, self.seen = kill, dict[int, tuple[float, ...]]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        values = (trainer.logged_metrics[f"train/{name}"] for name in ("loss", "lr", "params"))
        self.seen[trainer.global_step] = tuple(float(value) for value in values)
        if trainer.global_step == self.kill:
            raise Killed

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            values = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val")}
            self.seen[-trainer.global_step] = tuple(float(values[name]) for name in sorted(values))


@pytest.fixture
def run(tmp_path: Path, make_module: Make, make_trainer: Make) -> Callable[..., Watch]:
    def start(name: str, workers: int, train: TrainConfig, kill: int | None = None, resume: str | None = None) -> Watch:
        torch.manual_seed(hash(name) % 1000)  # whatever the state was before
        data = TASDataModule(DataConfig(batch_size=16, train_subset=128, num_workers=workers, search_val=100), seed=3)
        module = make_module(train, seed=3, global_batch=16, sampler="uniform")
        watch = Watch(kill)
        saver = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=5, save_top_k=-1)
        trainer = make_trainer(
            max_epochs=3, log_every_n_steps=1, callbacks=[watch, *module.callbacks(), saver], enable_checkpointing=True
        )
        checkpoint = str(tmp_path / f"{resume}.ckpt") if resume else None
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / name / "end.ckpt")
        return watch

    return start


@pytest.fixture
def make_net(space: SearchSpace) -> Callable[..., Any]:
    """For the digits: ten classes, drop path on."""

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        return supernet(space, num_classes=10, img_size=8, in_chans=1, patch_size=4, drop_path_rate=0.3, **options)

    return make


def same(a: Any, b: Any, where: str = "") -> None:
    """Deep equality of two checkpoints' content, bit for bit."""
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
    else:
        assert a == b, where


@pytest.mark.parametrize(
    ("workers", "kill"),
    [(0, 13), pytest.param(2, 13, marks=pytest.mark.slow), pytest.param(0, 17, marks=pytest.mark.slow)],
)
def test_killed_and_resumed_equals_uninterrupted(
    run: Callable[..., Watch], tmp_path: Path, workers: int, kill: int
) -> None:
    """With averaging, mixing, drop path and sub-networks of varying depth; killed after work that was not saved."""
    train = TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=1, ema=True, ema_decay=0.9)
    whole = run("whole", workers, train)
    with pytest.raises(Killed):
        run("part", workers, train, kill=kill)
    saved = kill // 5 * 5
    rest = run("rest", workers, train, resume=f"part/step={saved}")
    assert min(step for step in rest.seen if step > 0) == saved + 1
    for step, values in rest.seen.items():
        assert whole.seen[step] == values, step
    assert {-8, -16, -24} <= whole.seen.keys() and -24 in rest.seen
    want = torch.load(tmp_path / "whole" / "step=20.ckpt", weights_only=True)
    got = torch.load(tmp_path / "rest" / "step=20.ckpt", weights_only=True)
    for key in ("state_dict", "ema_state", "optimizer_states", "lr_schedulers"):
        same(got[key], want[key], key)
    for key in ("state_dict", "optimizer_states"):
        got, want = (torch.load(tmp_path / name / "end.ckpt", weights_only=True)[key] for name in ("rest", "whole"))
        same(got, want, key)


@pytest.mark.slow
def test_per_step_schedule_resumes(run: Callable[..., Watch]) -> None:
    train = TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=1, schedule="step")
    whole = run("whole", 0, train)
    rest = run("rest", 0, train, resume="whole/step=10")
    assert {step: whole.seen[step] for step in rest.seen} == rest.seen and len(rest.seen) >= STEPS - 10


@pytest.fixture
def finished(tmp_path: Path, make_module: Make, make_trainer: Make, make_loader: Make) -> Path:
    """Checkpoint of a short training with 4 classes, as the loader has."""
    trainer = make_trainer(max_epochs=1)
    trainer.fit(make_module(net=four_classes(make_module)), make_loader())
    trainer.save_checkpoint(tmp_path / "finished.ckpt")
    return tmp_path / "finished.ckpt"


def four_classes(make_module: Make, space: SearchSpace | None = None) -> ElasticViT:
    torch.manual_seed(0)
    space = space or make_module().space
    return supernet(space, num_classes=4, img_size=8, in_chans=1, patch_size=4)


def test_resuming_with_another_length_warns(
    finished: Path, make_module: Make, make_trainer: Make, make_loader: Make
) -> None:
    module = make_module(net=four_classes(make_module))
    with pytest.warns(UserWarning, match=r"max_epochs was 1 and is 2 on resume"):
        make_trainer(max_epochs=2).fit(module, make_loader(), ckpt_path=finished, weights_only=True)
    assert module.global_step == 8


def test_checkpoints_of_something_else_are_refused_by_name(finished: Path, make_module: Make) -> None:
    module = make_module(net=four_classes(make_module))

    def refused(change: Callable[[dict[str, Any]], Any], match: str, target: Any = module) -> None:
        altered = torch.load(finished, weights_only=True)
        change(altered)
        with pytest.raises(UserError, match=match):
            target.on_load_checkpoint(altered)

    module.on_load_checkpoint(torch.load(finished, weights_only=True))
    refused(lambda c: c.pop("lightning_tas"), "not written by lightning_tas")
    refused(lambda c: c["lightning_tas"]["model"].update(num_classes=7), "model.num_classes")
    refused(lambda c: c["lightning_tas"].update(candidates=[{"arch": {}}]), "other candidates")
    other = spaces.isotropic("mini", embed_dim=[16, 32], depth=[1, 3], num_heads=[1, 2], mlp_ratio=[1, 2])
    refused(lambda c: None, "another space", make_module(net=four_classes(make_module, other)))
    single = RetrainModule(module.net.subnet(module.space.smallest()), TrainConfig(), 8)
    refused(lambda c: None, "'supernet', this phase trains a 'network'", single)


def test_another_number_of_processes_is_refused(make_module: Make) -> None:
    """The learning rate, the order of samples and the length of an epoch would be others from there on."""
    checkpoint = {"lightning_tas": {"kind": "supernet", "unused": "skip", "global_batch": 16}}
    with pytest.raises(UserError, match=r"global batch is 32 images, but 16 .* as many processes as before"):
        make_module(TrainConfig(), seed=3, global_batch=32, sampler="uniform").on_load_checkpoint(checkpoint)
