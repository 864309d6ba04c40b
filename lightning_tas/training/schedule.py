"""Learning rate over training: linear warm-up, then a cosine, as a pure function of the epoch.

Equals timm's `CosineLRScheduler` (``warmup_prefix=False``: the cosine runs from epoch 0 and is joined where the
warm-up ends), which the references use. Driven through torch's `LambdaLR`, whose state holds plain numbers, so that
Lightning and DeepSpeed can save and restore it.
"""

from __future__ import annotations

import math

from pytorch_lightning.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_tas.training.config import TrainConfig

SHORT_RUN_WARMUP = 0.1
"""Share of training that warms up where the configured warm-up does not fit."""


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


def plan(train: TrainConfig, peak: float, total_steps: int, steps_per_epoch: int) -> WarmupCosine:
    """The schedule for training that takes `total_steps` updates, `steps_per_epoch` in each epoch.

    What cannot be as configured is warned about and made to fit: a warm-up as long as training or longer becomes a
    tenth of it, stepped per update; a `min_lr` or `warmup_lr` above the peak becomes the peak.
    """
    total_epochs = total_steps / steps_per_epoch
    warmup, per_step = train.warmup_epochs, train.schedule == "step"
    if warmup >= total_epochs and warmup > 0:
        warmup, per_step = SHORT_RUN_WARMUP * total_epochs, True
        rank_zero_warn(
            f"train.warmup_epochs={train.warmup_epochs:g} does not fit: training ends at epoch {total_epochs:g}; the "
            f"warm-up ends at epoch {warmup:g} instead, and the rate changes per step"
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
