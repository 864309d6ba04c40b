"""SIGTERM and SIGUSR1: the step is saved, all processes stop at the same one, Slurm is asked to start again."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_tas.launch.checkpoints import newest_whole
from lightning_tas.launch.results import comparable
from lightning_tas.launch.signals import outside_fit, slurm_job

sys.path.append(str(Path(__file__).parent))
from tiny import fit, names, prepare


class Send(pl.Callback):
    """Sends this process a signal when update `step` begins, or in the validation after it."""

    def __init__(self, number: int, step: int, hook: str = "on_train_batch_start") -> None:
        self.number, self.step, self.sent = number, step, False
        setattr(self, hook, self._send)

    def _send(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


def at(epoch: int, step: int) -> str:
    return f"epoch={epoch:04d}-step={step:07d}.ckpt"


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """A Slurm batch job whose `scontrol` notes what it is asked for and ends with the given status."""

    def make(status: int) -> Path:
        tool, log = tmp_path / "bin" / "scontrol", tmp_path / "scontrol.log"
        tool.parent.mkdir()
        tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho sorry >&2\nexit {status}\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "1234")
        return log

    return make


def test_sigterm_saves_the_step_and_stops_and_the_rest_is_exact(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    whole = fit(tmp_path / "whole")[1]
    module, trainer, data = prepare(tmp_path / "part", Send(signal.SIGTERM, 5))
    with pytest.raises(SIGTERMException):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 6 and names(tmp_path / "part") == [at(0, 4), at(1, 6)]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    rest = fit(tmp_path / "part", resume=tmp_path / "part" / at(1, 6))[1]
    assert {**module.seen, **rest.seen} == whole.seen and len(rest.seen) == 6
    assert module.validated + rest.validated == whole.validated
    for a, b in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("step", "hook"), [(3, "on_train_batch_start"), (4, "on_validation_start"), (12, "on_validation_end")]
)
def test_sigterm_around_a_validation_waits_for_its_end(tmp_path: Path, step: int, hook: str) -> None:
    module, trainer, data = prepare(tmp_path, Send(signal.SIGTERM, step, hook), every_n_epochs=3)
    with pytest.raises(SIGTERMException):
        trainer.fit(module, datamodule=data)
    end = -(-step // 4) * 4
    assert newest_whole(tmp_path) == (tmp_path / at(end // 4 - 1, end), end)
    assert module.validated[-1] == end


def test_sigterm_after_the_last_step_is_obeyed_after_the_fit(tmp_path: Path) -> None:
    module, trainer, data = prepare(tmp_path, Send(signal.SIGTERM, 12, "on_train_end"))
    with pytest.raises(SIGTERMException):
        trainer.fit(module, datamodule=data)
    assert newest_whole(tmp_path)[1] == 12


def test_sigusr1_saves_and_changes_nothing(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", keep_last=-1)[1]
    saved = fit(tmp_path / "saved", Send(signal.SIGUSR1, 5), keep_last=-1)[1]
    assert names(tmp_path / "saved") == sorted([*names(tmp_path / "whole"), at(1, 6)])
    assert saved.seen == whole.seen and saved.validated == whole.validated


def test_sigusr1_in_a_slurm_job_requeues_it(tmp_path: Path, scontrol: Callable[[int], Path]) -> None:
    log = scontrol(0)
    module, trainer, data = prepare(tmp_path / "run", Send(signal.SIGUSR1, 5))
    with pytest.raises(SIGTERMException):
        trainer.fit(module, datamodule=data)
    assert log.read_text() == "requeue 1234\n" and newest_whole(tmp_path / "run")[1] == 6


def test_a_requeue_that_fails_is_told(
    tmp_path: Path, scontrol: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scontrol(1)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1200")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    module, trainer, data = prepare(tmp_path / "run", Send(signal.SIGUSR1, 5))
    with (
        pytest.warns(UserWarning, match=r"scontrol requeue 1200_7 failed \(sorry\)"),
        pytest.raises(SIGTERMException),
    ):
        trainer.fit(module, datamodule=data)
    assert log.read_text() == "requeue 1200_7\n" and newest_whole(tmp_path / "run")[1] == 6


def test_outside_of_a_fit_signals_act_at_once(scontrol: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException), outside_fit():
        os.kill(os.getpid(), signal.SIGUSR1)  # no job: nothing to save, nothing to do
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM was not obeyed")
    log = scontrol(0)
    with pytest.raises(SIGTERMException), outside_fit():
        os.kill(os.getpid(), signal.SIGUSR1)
        pytest.fail("SIGUSR1 was not obeyed")
    assert log.read_text() == "requeue 1234\n" and signal.getsignal(signal.SIGTERM) == before


def test_which_slurm_job() -> None:
    assert slurm_job({}) is None
    assert slurm_job({"SLURM_JOB_ID": "12"}) == "12"
    assert slurm_job({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}) == "12_2"
    assert slurm_job({"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "interactive"}) is None
    assert slurm_job({"SLURM_JOB_ID": "12; rm"}) is None


# --- several processes --------------------------------------------------------------------------------------------


def stop_by_rank_zero(folder: str) -> tuple[int, bool]:
    """Two processes train; only rank 0 gets the signal, only rank 1 learns that the job's time ends."""
    import torch.distributed as dist

    first = dist.get_rank() == 0
    send = Send(signal.SIGTERM, 5) if first else Send(signal.SIGUSR1, 5)
    module, trainer, data = prepare(Path(folder), send, devices=2, strategy="ddp")
    try:
        trainer.fit(module, datamodule=data)
    except SIGTERMException:
        return trainer.global_step, True
    return trainer.global_step, False


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(
    tmp_path: Path, processes: Any, scontrol: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scontrol(0)
    assert processes.run(stop_by_rank_zero, 2, str(tmp_path / "run"), timeout=120) == [(6, True), (6, True)]
    assert names(tmp_path / "run") == [at(0, 4), at(1, 6)]
    assert log.read_text() == "requeue 1234\n"


def hang() -> None:
    """Rank 1 sleeps, rank 0 waits for it in a collective, where Python handles no signals."""
    import torch.distributed as dist

    from lightning_tas.launch.signals import FitSignals
    from lightning_tas.training.guard import Requests

    if dist.get_rank() == 1:
        time.sleep(300)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    FitSignals().install(trainer, Requests())

    def insist() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5.5)

    threading.Thread(target=insist, daemon=True).start()
    dist.barrier()


@pytest.mark.slow
def test_a_late_second_sigterm_ends_a_process_that_hangs(processes: Any) -> None:
    with pytest.raises(AssertionError, match=r"status 143(.|\n)*stopped at once by a second SIGTERM"):
        processes.run(hang, 2, timeout=120)


# --- the command ----------------------------------------------------------------------------------------------------

TINY = (
    "recipe=quickstart", "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}",
    "select.margin=0.02", "select.batch_size=4", "data.train_subset=256", "data.batch_size=8", "train.warmup_epochs=1",
    "trainer.max_epochs=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "trainer.devices=1",
)  # fmt: skip


@pytest.mark.slow
def test_a_whole_job_is_signalled_workers_and_all(tmp_path: Path, processes: Any) -> None:
    """As Slurm does it. The workers must outlive the signals, or training would end with an error."""

    def start(run: str, *more: str) -> Any:
        given = (*TINY, f"output_dir={tmp_path}", f"run={run}", "data.num_workers=2", "train.ema=true", *more)
        return processes.command("python", "-m", "lightning_tas.fit", *given, fork=True)

    def rows(run: str) -> list[dict[str, str]]:
        path = tmp_path / "quickstart" / run / "metrics.csv"
        return list(csv.DictReader(path.open())) if path.exists() else []

    processes.wait([start("whole")], timeout=120)
    part = start("part")
    for number, at_row in ((signal.SIGUSR1, 4), (signal.SIGTERM, 12)):
        while len(rows("part")) < at_row:  # of 64
            assert part.status is None, part.report()
            time.sleep(0.02)
        os.killpg(part.pid, number)
    assert processes.wait([part], timeout=120, check=False) == [143], part.report()
    assert "resume=" in part.stderr and "Traceback" not in part.stderr
    processes.wait([start("part", "resume=auto")], timeout=120)
    results = [json.loads((tmp_path / "quickstart" / run / "result.json").read_text()) for run in ("whole", "part")]
    unlike = ("command", "git")  # the checkout may change meanwhile
    whole, rest = ({k: v for k, v in comparable(result).items() if k not in unlike} for result in results)
    assert rest == whole and whole["ema"]
    assert rows("part") == rows("whole")
