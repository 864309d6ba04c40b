"""Learning rate over training: linear warm-up, then a cosine, as a pure function of the epoch.

Equals timm's `CosineLRScheduler` (``warmup_prefix=False``: the cosine runs from epoch 0 and is joined where the
warm-up ends), which the references use. One rule holds for every length of training, be it a supernet's, a network's,
or a short one that judges a network: the warm-up is as configured, but at most `train.warmup_share` of it, a fifth.

Driven through torch's `LambdaLR`, whose state holds plain numbers, so that Lightning and DeepSpeed can save and
restore it.
"""

from __future__ import annotations

import math

from pytorch_lightning.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_tas.training.config import TrainConfig


class WarmupCosine:
    """Learning rate at a count of epochs (or of steps), as a multiple of the peak rate; picklable, plain attributes."""

    def __init__(
        self,
        peak: float,
        min_lr: float,
        warmup_lr: float,
        warmup_epochs: float,
        total_epochs: float,
        counts_per_epoch: int = 1,
        lag: bool = False,
    ) -> None:
        self.peak = peak
        self.min_lr = min_lr
        self.warmup_lr = warmup_lr
        self.warmup_epochs = warmup_epochs
        self.total_epochs = total_epochs
        self.counts_per_epoch = counts_per_epoch
        self.lag = lag

    @property
    def per_step(self) -> bool:
        """Whether counts are steps; else they are epochs."""
        return self.counts_per_epoch > 1

    def lr(self, count: int) -> float:
        """The learning rate during epoch (or step) `count`, from 0."""
        epoch = (max(count - 1, 0) if self.lag else count) / self.counts_per_epoch
        if epoch < self.warmup_epochs:
            return self.warmup_lr + epoch * (self.peak - self.warmup_lr) / self.warmup_epochs
        if epoch >= self.total_epochs:
            return self.min_lr
        return self.min_lr + 0.5 * (self.peak - self.min_lr) * (1 + math.cos(math.pi * epoch / self.total_epochs))

    def __call__(self, count: int) -> float:
        return self.lr(count) / self.peak


def warmup_epochs(train: TrainConfig, total_steps: int, steps_per_epoch: int) -> float:
    """Epochs of warm-up: as configured, at most `train.warmup_share`; none where that is less than a step."""
    warmup = min(train.warmup_epochs, train.warmup_share * total_steps / steps_per_epoch)
    return warmup if warmup * steps_per_epoch >= 1 else 0.0


def plan(train: TrainConfig, peak: float, total_steps: int, steps_per_epoch: int) -> WarmupCosine:
    """The schedule for training that takes `total_steps` updates, `steps_per_epoch` in each epoch.

    What cannot be as configured is warned about and made to fit: a warm-up of more than `train.warmup_share` of the
    training is cut to it; a `min_lr` or `warmup_lr` above the peak becomes the peak. A warm-up that does not end with
    an epoch changes the rate per step: per epoch, a part of an epoch would be a whole one at `warmup_lr`.
    """
    total_epochs = total_steps / steps_per_epoch
    warmup = warmup_epochs(train, total_steps, steps_per_epoch)
    per_step = train.schedule == "step" or train.warmup_epochs > warmup or warmup % 1 != 0
    if train.warmup_epochs > train.warmup_share * total_epochs:
        rank_zero_warn(
            f"train.warmup_epochs={train.warmup_epochs:g} is more than train.warmup_share={train.warmup_share:g} of "
            f"this training ({total_epochs:g} epochs): it is cut to {warmup:g} epochs, and the rate changes per step"
        )
    lag = train.schedule_lag
    if lag and per_step:
        rank_zero_warn("train.schedule_lag is ignored: it is a slip of schedules that change per epoch")
        lag = False
    floors = {}
    for key in ("min_lr", "warmup_lr"):
        floors[key] = min(getattr(train, key), peak)
        if floors[key] != getattr(train, key):
            rank_zero_warn(
                f"train.{key}={getattr(train, key):g} is above the learning rate for this batch, {peak:g}: it is used "
                "instead (train.lr_batch=null switches the scaling off)"
            )
    if per_step:
        return WarmupCosine(peak, floors["min_lr"], floors["warmup_lr"], warmup, total_epochs, steps_per_epoch)
    return WarmupCosine(peak, floors["min_lr"], floors["warmup_lr"], warmup, math.ceil(total_epochs), 1, lag)


def attach(optimiser: Optimizer, curve: WarmupCosine) -> LambdaLR:
    """The torch scheduler that follows `curve`; step it once per epoch, or per step where `curve.per_step`."""
    return LambdaLR(optimiser, curve)
