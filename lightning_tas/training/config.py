"""The `train.*` part of a recipe: optimiser, schedule, mixing, averaging.

The defaults are the DeiT-style recipe shared by AutoFormer and PreNAS (https://arxiv.org/abs/2012.12877, table 9).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_tas.errors import UserError, unknown

MIXUP_MODES = ("batch", "pair", "elem")
SCHEDULES = ("epoch", "step")
UNUSED = ("skip", "zero")


@dataclass
class TrainConfig:
    """How weights are trained. Rates are per update, `*_epochs` in epochs (fractions allowed)."""

    lr: float = 5e-4  # for a global batch of `lr_batch` images; scaled linearly to the real one
    lr_batch: int | None = 512  # None: `lr` is used as it is
    min_lr: float = 1e-5  # where the cosine ends; not scaled
    warmup_lr: float = 1e-6  # where the warm-up begins; not scaled
    warmup_epochs: float = 20  # of linear warm-up, before the cosine
    warmup_share: float = 0.2  # of the training that the warm-up takes at most: a longer one is cut to it
    schedule: str = "epoch"  # the rate changes per "epoch", as in the references, or per "step"
    schedule_lag: bool = False  # the references' slip: epochs 0 and 1 share the first rate, the curve lags an epoch
    weight_decay: float = 0.05
    decay_relative_position: bool = True  # the references mean to spare these tables, but their pattern misses them
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    label_smoothing: float = 0.1
    mixup: float = 0.8  # Beta parameter, 0: off
    cutmix: float = 1.0  # Beta parameter, 0: off
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5  # share of cutmix where both are on
    mixup_mode: str = "batch"
    ema: bool = False
    ema_decay: float = 0.99996
    unused: str | None = None  # parameters that a step leaves out: skip, zero (a gradient of 0); None: zero under ZeRO
    max_bad_steps: int = 20  # end with status 3 after so many steps in a row whose loss or gradient is not finite
    memory_lean: bool = False  # back-propagate one sub-network of a step at a time: less memory, same gradients
    checkpoint_activations: bool = False  # recompute the blocks' activations in the backward pass
    compile: bool = False  # torch.compile; stand-alone networks only
    from_checkpoint: str | None = None  # a checkpoint or a run to start from; a head with other classes begins afresh

    def check(self) -> None:
        """Refuse values that cannot be meant.

        Raises:
            UserError: names the key, the value, and what is valid.
        """
        if self.mixup_mode not in MIXUP_MODES:
            raise unknown("train.mixup_mode", self.mixup_mode, MIXUP_MODES)
        if self.schedule not in SCHEDULES:
            raise unknown("train.schedule", self.schedule, SCHEDULES)
        if self.unused is not None and self.unused not in UNUSED:
            raise unknown("train.unused", self.unused, UNUSED)
        if self.max_bad_steps < 1:
            raise UserError(f"train.max_bad_steps: {self.max_bad_steps} is not valid; it must be at least 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"train.betas: {list(self.betas)} is not valid; give two numbers, at least 0 and below 1")
        if self.lr_batch is not None and self.lr_batch < 1:
            raise UserError(f"train.lr_batch: {self.lr_batch} is not valid; a batch size of at least 1, or null")
        for key in ("lr", "eps"):
            if not getattr(self, key) > 0:
                raise UserError(f"train.{key}: {getattr(self, key)} is not valid; it must be above 0")
        for key in ("min_lr", "warmup_lr", "warmup_epochs", "weight_decay", "mixup", "cutmix"):
            if not getattr(self, key) >= 0:
                raise UserError(f"train.{key}: {getattr(self, key)} is not valid; it must be at least 0")
        for key in ("mixup_prob", "mixup_switch_prob", "ema_decay", "warmup_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"train.{key}: {getattr(self, key)} is not valid; it must lie in 0..1")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"train.label_smoothing: {self.label_smoothing} is not valid; at least 0 and below 1")
