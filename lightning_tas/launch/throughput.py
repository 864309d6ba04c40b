"""Images per second, share of time spent waiting for data, and peak memory, as `system/*` metrics.

Only wall-clock time at logging steps is read: nothing here makes the host wait for a device. Between two logging steps
the host may run ahead of a GPU, but at each of them Lightning reads the loss, so that a window covers finished work.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.profilers import PassThroughProfiler, Profiler
from pytorch_lightning.utilities import rank_zero_warn

WAITING, AFTER = 0.25, 60.0
"""Waiting for data for more than this share of the time is said once, after so many seconds."""
FETCH = "train_dataloader_next"
"""Last part of the name under which Lightning's training loop profiles taking the next batch."""


class FetchTime(Profiler):
    """Lightning profiler that adds up the seconds for which the training loop waits for its next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._began: float | None = None

    def start(self, action_name: str) -> None:
        if action_name.endswith(FETCH):
            self._began = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(FETCH) and self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None


class Throughput(Callback):
    """Logs, every `trainer.log_every_n_steps` updates, over the time since the last such row:

    ``system/images_per_second`` of all processes together, ``system/data_wait_percent`` of the time of rank 0, and
    ``system/peak_memory_gib`` since the start: of the GPU where there is one, else of the process. Validation counts
    neither as time nor as images; saving checkpoints does count as time. Waiting that matters gives one warning.
    """

    def __init__(self) -> None:
        self._fetch = FetchTime()
        self._images = 0
        self._began = self._waited = self._paused = 0.0
        self._logged_step = 0
        self._rows = 0
        self._seconds = self._waiting = 0.0  # of all rows but the first, in which workers start
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to the training loop where no other profiler does."""
        if isinstance(trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
            trainer.profiler = self._fetch  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = trainer.global_step
        self._reset()

    def _reset(self) -> None:
        self._images, self._began, self._waited = 0, time.perf_counter(), self._fetch.seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began += time.perf_counter() - self._paused

    def leave_out(self, seconds: float) -> None:
        """Time between two batches in which something else was done than training, such as scoring networks."""
        self._began += seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._images += len(batch[0])
        step = trainer.global_step
        if step == self._logged_step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        seconds = max(time.perf_counter() - self._began, 1e-9)
        row = {
            "system/images_per_second": self._images * trainer.world_size / seconds,
            "system/data_wait_percent": 100 * (self._fetch.seconds - self._waited) / seconds,
            "system/peak_memory_gib": peak_memory(trainer.strategy.root_device) / 2**30,
            "epoch": trainer.current_epoch,
        }
        for logger in trainer.loggers:
            logger.log_metrics(row, step - 1)
        self._heed(trainer, seconds, self._fetch.seconds - self._waited)
        self._logged_step = step
        self._reset()

    def _heed(self, trainer: Trainer, seconds: float, waited: float) -> None:
        """Say once that training waits for its images."""
        self._rows += 1
        if self._rows > 1:
            self._seconds += seconds
            self._waiting += waited
        if self._warned or self._seconds < AFTER or self._waiting < WAITING * self._seconds:
            return
        self._warned = True
        workers = getattr(trainer.train_dataloader, "num_workers", None)
        rank_zero_warn(
            f"{100 * self._waiting / self._seconds:.0f} % of the time went into waiting for data "
            f"(data.num_workers is {workers}): more workers, smaller files, a faster disk or lighter augmentation help"
        )


def peak_memory(device: torch.device) -> int:
    """Most bytes held at once so far: by torch on a GPU, by this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts KiB
