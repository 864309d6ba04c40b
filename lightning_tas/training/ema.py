"""Exponential moving average of the weights, on every strategy that keeps whole weights on each process.

The average lies in a checkpoint under its own key, `EMA`, and ``state_dict`` always holds the live weights: DeepSpeed
writes the weights itself, so that a callback could not put others in their place (Lightning's own averaging does).
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_tas.training.config import TrainConfig
from lightning_tas.training.entries import EMA


def ema_callbacks(train: TrainConfig) -> list[Callback]:
    """The callback that `train.ema` asks for, none when it is off."""
    return [WeightAverage(train.ema_decay)] if train.ema else []


class WeightAverage(Callback):
    """Averages everything in the module's ``state_dict`` after each update: e <- decay e + (1 - decay) w.

    The first update copies, so that nothing of the initial weights remains. Blocks that a step leaves out are averaged
    with their unchanged values. Averages are float32 also where the module is bfloat16 (under ZeRO); counters are
    copied. Validation and tests run on the average, once there is one, and after a fit the module holds it.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] | None = None
        self._live: dict[str, Tensor] | None = None  # the live weights while the module holds the average
        self._borrowed = False  # until an evaluation ends
        self._step = 0  # updates seen

    # --- training ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on from the restored step, with the live weights also in a second fit."""
        self._step = trainer.global_step
        self._hide(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Average after an update, not after every accumulated batch."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._update(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module; what is saved from now on still has the live weights apart."""
        self._show(pl_module)

    @torch.no_grad()
    def _update(self, module: LightningModule) -> None:
        now = _state(module)
        if self.average is None:
            self.average = {name: value.to(_wide(value.dtype), copy=True) for name, value in now.items()}
            return
        self._move(now)
        floating = [name for name, value in now.items() if value.is_floating_point()]
        averages = [self.average[name] for name in floating]
        torch._foreach_lerp_(averages, [now[name].to(_wide(now[name].dtype)) for name in floating], 1 - self.decay)
        for name in now.keys() - set(floating):
            self.average[name].copy_(now[name])

    def _move(self, now: dict[str, Tensor]) -> None:
        """Bring the average to the device of the weights; a checkpoint is read on the CPU."""
        assert self.average is not None
        if any(self.average[name].device != value.device for name, value in now.items()):
            self.average = {name: self.average[name].to(value.device) for name, value in now.items()}

    # --- validation and tests ---------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the average."""
        self._borrow(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on with the live weights."""
        self._give_back(pl_module)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Test the average."""
        self._borrow(pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        self._give_back(pl_module)

    def _borrow(self, module: LightningModule) -> None:
        self._borrowed = self.average is not None and self._live is None
        if self._borrowed:
            self._show(module)

    def _give_back(self, module: LightningModule) -> None:
        if self._borrowed:
            self._borrowed = False
            self._hide(module)

    @torch.no_grad()
    def _show(self, module: LightningModule) -> None:
        if self.average is None or self._live is not None:
            return
        now = _state(module)
        self._move(now)
        self._live = {name: value.clone() for name, value in now.items()}
        for name, value in now.items():
            value.copy_(self.average[name])

    @torch.no_grad()
    def _hide(self, module: LightningModule) -> None:
        if self._live is None:
            return
        for name, value in _state(module).items():
            value.copy_(self._live[name])
        self._live = None

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the average, once there is one."""
        if self.average is not None:
            checkpoint[EMA] = {"decay": self.decay, "average": dict(self.average)}
        if self._live is not None:
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._live}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from the average in the checkpoint; without one it begins with the next update."""
        saved = checkpoint.get(EMA)
        self._live = None
        self.average = dict(saved["average"]) if saved is not None else None
        if saved is None:
            rank_zero_warn("the checkpoint holds no averaged weights: the average begins anew (train.ema)")


def _state(module: LightningModule) -> dict[str, Tensor]:
    """The tensors of ``state_dict`` themselves."""
    return {name: value.detach() for name, value in module.state_dict(keep_vars=True).items()}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a value of `dtype` is averaged in: at least float32; counters stay what they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
