"""The harness itself: results by rank, failures with their output, nothing left running."""

from __future__ import annotations

import time
from typing import Any

import pytest


def total(offset: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def fail_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    dist.barrier()


def test_a_function_runs_on_every_rank(processes: Any) -> None:
    assert processes.run(total, 2, 10) == [(0, 21), (1, 21)]


def test_a_failing_rank_ends_all_with_its_traceback(processes: Any) -> None:
    with pytest.raises(AssertionError, match="rank one gives up"):
        processes.run(fail_on_one, 2, timeout=60)
    assert all(process.status is not None for process in processes.started)


def test_what_a_command_started_ends_with_it(processes: Any) -> None:
    process = processes.command("sh", "-c", "setsid sleep 100 & echo $!; wait")
    end = time.monotonic() + 10
    while not process.stdout.strip() or not process.descendants():
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(AssertionError, match="still running"):
        processes.wait([process], timeout=0.1)
    while process.descendants():
        assert time.monotonic() < end
        time.sleep(0.02)
