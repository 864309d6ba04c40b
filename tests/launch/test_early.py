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
    try:
        os.kill(os.getpid(), signal.SIGUSR1)  # whichever thread gets it
        time.sleep(0.05)
        assert not asked
        with pytest.raises(SIGTERMException), outside_fit():
            raise AssertionError("not handled")
        assert asked == ["4711"]
    finally:
        drop_save_signal()


def test_it_is_forgotten_at_the_end() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    hold_save_signal()
    signal.raise_signal(signal.SIGUSR1)
    drop_save_signal()
    assert signal.getsignal(signal.SIGUSR1) is before
    with outside_fit():
        pass  # nothing waits


@pytest.mark.slow
def test_a_starting_command_survives_it(processes: Any, tmp_path: Path) -> None:
    process = processes.command("python", "-m", "lightning_tas.fit", "recipe=quickstart", "plan=true", cwd=tmp_path)
    status, end, caught = Path(f"/proc/{process.pid}/status"), time.monotonic() + 60, False
    while time.monotonic() < end and not caught:
        line = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        caught = bool(int(line.split()[1], 16) & (1 << (signal.SIGUSR1 - 1)))
        time.sleep(0.01)
    assert caught
    process.send(signal.SIGUSR1)
    assert processes.wait([process], timeout=120) == [0]
