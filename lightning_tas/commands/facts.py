"""What a training phase amounts to over all its processes: functions of the whole configuration, stated and logged.

The learning rate, the length of an epoch and the treatment of unused parameters follow from recipe, devices and nodes;
nobody sets them by hand for a cluster. They are printed when a phase starts, and kept in `result.json` and W&B.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lightning_tas.commands.config import Config
from lightning_tas.data import TASDataModule
from lightning_tas.launch.strategies import unused_semantics
from lightning_tas.launch.trainer import world_size


@dataclass(frozen=True)
class Facts:
    """Global batch in images per update, peak learning rate, epoch length in updates, total length, and semantics.

    `images_per_epoch` counts augmented images over all processes, `repeats` of each distinct one.
    """

    processes: int
    batch_size: int
    accumulate_grad_batches: int
    global_batch: int
    peak_lr: float
    images_per_epoch: int
    repeats: int
    steps_per_epoch: int
    steps: int
    strategy: str
    unused: str
    precision: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.processes} process{'es' if self.processes > 1 else ''} x {self.batch_size} images"
            + (f" x {self.accumulate_grad_batches} batches" if self.accumulate_grad_batches > 1 else "")
            + f" = global batch {self.global_batch:,}; peak learning rate {self.peak_lr:g}; {self.steps:,} steps, "
            f"{self.steps_per_epoch:,} an epoch; strategy {self.strategy}, precision {self.precision}, "
            f"unused parameters: {self.unused}"
        )


def facts(config: Config, data: TASDataModule) -> Facts:
    """The facts of training `config` on `data`; nothing is built or read beyond what `data` has loaded."""
    settings, train = config.trainer, config.train
    processes = world_size(settings)
    batch = config.data.batch_size * processes * settings.accumulate_grad_batches
    batches = data.steps_per_epoch(processes)
    limit = settings.limit_train_batches
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    per_epoch = math.ceil(batches / settings.accumulate_grad_batches)
    steps = settings.max_epochs * per_epoch
    if settings.max_steps and settings.max_steps > 0:
        steps = min(steps, settings.max_steps)
    return Facts(
        processes=processes,
        batch_size=config.data.batch_size,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        global_batch=batch,
        peak_lr=train.lr if train.lr_batch is None else train.lr * batch / train.lr_batch,
        images_per_epoch=batches * config.data.batch_size * processes,
        repeats=config.data.repeated_aug,
        steps_per_epoch=per_epoch,
        steps=steps,
        strategy=("ddp" if processes > 1 else "one process") if settings.strategy == "auto" else settings.strategy,
        unused=unused_semantics(train, settings.strategy),
        precision=str(settings.precision),
    )
