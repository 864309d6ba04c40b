"""A training of seconds, saved by `RunCheckpoints`: what the tests of checkpoints and signals share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_tas.commands.config import CheckpointConfig
from lightning_tas.data import TASDataModule
from lightning_tas.data.config import DataConfig
from lightning_tas.launch.checkpoint_io import AtomicCheckpointIO
from lightning_tas.launch.checkpoints import RunCheckpoints
from lightning_tas.training.guard import StepGuard


class Module(pl.LightningModule):
    """A linear classifier of digits; keeps epoch and loss of each update, and when it was validated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(64, 10)
        self.guard = StepGuard()
        self.seen: dict[int, tuple[int, float]] = {}
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, targets = batch
        loss = torch.nn.functional.cross_entropy(self.net(images.flatten(1)), targets)
        self.guard.note_loss(loss)
        self.seen[self.global_step] = (self.current_epoch, loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.guard.decide()

    def on_validation_epoch_start(self) -> None:
        self.validated.append(self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(
    folder: Path, *callbacks: pl.Callback, resume: Path | None = None, workers: int = 0, **given: Any
) -> tuple[pl.Trainer, Module]:
    """Train 3 epochs of 4 batches; `given` are fields of `CheckpointConfig` and arguments of the Trainer."""
    module, trainer, data = prepare(folder, *callbacks, workers=workers, **given)
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return trainer, module


def prepare(
    folder: Path, *callbacks: pl.Callback, workers: int = 0, **given: Any
) -> tuple[Module, pl.Trainer, TASDataModule]:
    """The parts of `fit`, for tests that need them although the fit ends with an exception."""
    settings = CheckpointConfig(**{key: given.pop(key) for key in list(given) if hasattr(CheckpointConfig, key)})
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 3, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
        "plugins": [AtomicCheckpointIO()],
    }  # fmt: skip
    trainer = pl.Trainer(**{**options, **given}, callbacks=[*callbacks, RunCheckpoints(folder, settings)])
    size = 16 // trainer.world_size
    data = TASDataModule(DataConfig(batch_size=size, train_subset=64, search_val=64, num_workers=workers), seed=1)
    return Module(), trainer, data


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())
