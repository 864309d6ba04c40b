"""ZeRO 1, 2 and 3 train what DDP trains: AdamW at its full rate, weight decay, depths that alternate, 2 processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # here and in the processes that import this file
import small

ZERO = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
# Four batches an epoch: with three to a step, the second step of an epoch has one.
ACCUMULATED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}


def equal_ddp(sampler: str, trainer: dict[str, Any]) -> None:
    """On every rank: fit by each strategy and compare; all draw dropout and drop path alike."""
    options: dict[str, Any] = {
        "sampler": sampler, "trainer": trainer, "net": {"drop_path_rate": 0.2, "drop_rate": 0.1}, "unused": "zero",
    }  # fmt: skip
    ddp = small.fit("ddp", **options)
    start = small.make_net().state_dict()
    assert all((value - start[name]).abs().max() > 1e-4 for name, value in ddp.weights.items())
    assert len(ddp.rates) == (4 if trainer else 8) and len(set(ddp.rates)) == 2
    if sampler != "sandwich":
        assert set(ddp.depths) == {1, 2}
    for strategy in ZERO:
        zero = small.fit(strategy, **options)
        assert zero.distance(ddp) < 1e-5, (strategy, zero.distance(ddp))
        assert zero.rates == ddp.rates and zero.depths == ddp.depths
        assert zero.metrics.keys() == ddp.metrics.keys() and {"val/smallest/top1", "val/largest/loss"} <= set(
            zero.metrics
        )
        for name, value in ddp.metrics.items():
            assert zero.metrics[name] == pytest.approx(value, abs=1e-4), (strategy, name)
        assert not zero.warned, (strategy, zero.warned)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "sandwich", "preferred", "balanced"])
def test_equals_ddp(processes: Any, sampler: str) -> None:
    for process_result in processes.run(equal_each_way, 2, sampler, timeout=240):
        assert process_result is None


def equal_each_way(sampler: str) -> None:
    equal_ddp(sampler, {})
    equal_ddp(sampler, ACCUMULATED)
