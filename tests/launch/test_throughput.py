"""Speed is that of training: images of all processes, waiting for data, without validation."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_tas.launch import throughput
from lightning_tas.launch.metrics import RunMetrics
from lightning_tas.launch.throughput import Throughput

FETCH, STEP, VALIDATION = 0.06, 0.02, 1.0
"""Seconds that a batch of 4, a training step and a validation batch take; the overhead is far below."""


class Slow(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(FETCH / 4)
        return torch.ones(2), torch.tensor(0)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(STEP)
        loss: Tensor = self.layer(batch[0]).sum()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(VALIDATION)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def rows(path: Path) -> Iterator[dict[str, float]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield {key: float(value) for key, value in row.items() if key != "phase"}


def test_speed_waiting_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=[RunMetrics(tmp_path / "metrics.csv", "supernet")],
        log_every_n_steps=2, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[Throughput()], accumulate_grad_batches=2, num_sanity_val_steps=0,
    )  # fmt: skip
    validation: DataLoader[Any] = DataLoader(TensorDataset(torch.ones(1, 2), torch.zeros(1)))
    began = time.perf_counter()
    monkeypatch.setattr(throughput, "AFTER", 3 * (FETCH + STEP))
    with pytest.warns(UserWarning, match=r"\d\d % of the time went into waiting .*data.num_workers is 0\)") as said:
        trainer.fit(Module(), DataLoader(Slow(), batch_size=4), validation)
    assert sum("waiting for data" in str(warning.message) for warning in said) == 1
    assert time.perf_counter() - began > 2 * VALIDATION
    found = list(rows(tmp_path / "system.csv"))
    # Eight batches an epoch, two to an update, a row every two updates: 16 images, and the last row spans a validation.
    assert [row["step"] for row in found] == [1, 3, 5, 7]
    fastest = 4 / (FETCH + STEP)
    for row in found:
        # With validation counted, the third row would be at a quarter of this.
        assert 0.4 * fastest < row["system/images_per_second"] <= fastest
        assert 50 < row["system/data_wait_percent"] < 95  # 75 where sleeping ends on time
        assert 0.05 < row["system/peak_memory_gib"] < 64
