"""SIGUSR1 that comes while a command starts neither ends it nor is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.launch.early import drop_save_signal, hold_save_signal
from lightning_tas.launch.signals import outside_fit


def test_it_waits_for_the_runs_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytorch_lightning.utilities.exceptions import SIGTERMException

    asked: list[str] = []
    monkeypatch.setattr("lightning_tas.launch.signals.requeue", asked.append)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "supernet")
    hold_save_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not asked
    with pytest.raises(SIGTERMException), outside_fit():
        raise AssertionError("not handled")
    assert asked == ["4711"]


def test_it_is_forgotten_at_the_end() -> None:
    hold_save_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    drop_save_signal()  # else it ends this process
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
def test_a_starting_command_survives_it(processes: Any, tmp_path: Path) -> None:
    process = processes.command("python", "-m", "lightning_tas.fit", "recipe=quickstart", "plan=true", cwd=tmp_path)
    status, end = Path(f"/proc/{process.popen.pid}/status"), time.monotonic() + 60
    while time.monotonic() < end:
        blocked = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk"))
        if int(blocked.split()[1], 16) & (1 << (signal.SIGUSR1 - 1)):
            break
        time.sleep(0.01)
    process.send(signal.SIGUSR1)
    assert processes.wait([process], timeout=120) == [0]
