"""Measuring without a trainer, the processes sharing the images: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_tas.data import TASDataModule
from lightning_tas.data.config import DataConfig
from lightning_tas.evaluator import evaluate

IMAGES = 360  # of the test set


def _measured(batch_sizes: list[int]) -> list[tuple[float, float, float, int]]:
    torch.manual_seed(0)
    # In double precision sums of other parts differ by less than the test allows.
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double()

    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.net(images.double())
            return logits

    found = []
    for batch_size in batch_sizes:
        data = TASDataModule(DataConfig(name="digits", batch_size=7, eval_batch_size=batch_size, num_workers=0))
        loader = data.test_dataloader()
        (one,) = evaluate(Doubled(), [None], loader)
        found.append((one.top1, one.top5, one.loss, one.samples))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_each_image_counts_once_on_any_number_of_processes(world: int, processes: Any) -> None:
    batch_sizes = [1, 7, 119, 1000]
    alone = _measured(batch_sizes)
    assert {one[3] for one in alone} == {IMAGES} and len({one[:2] for one in alone}) == 1
    for rank in processes.run(_measured, world, batch_sizes, timeout=100):
        for one, other in zip(alone, rank, strict=True):
            assert one[0] == other[0] and one[1] == other[1] and one[3] == other[3]
            assert one[2] == pytest.approx(other[2], rel=1e-6)
