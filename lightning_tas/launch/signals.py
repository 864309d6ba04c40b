"""What SIGTERM and SIGUSR1 do to a run: save, stop, ask Slurm to start the job again.

During a fit the handlers only leave a request; all processes agree on it at the next optimiser step (`StepGuard`), save
there and stop together. SIGTERM saves and stops (status 143); SIGUSR1 saves and goes on, or in a Slurm batch job, where
it announces the end of the job's time, saves, requeues the job and stops. Outside of a fit there is nothing to save,
and both act at once. Validation is not interrupted, because nothing in the middle of it could be resumed exactly.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn, Protocol

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_tas.launch import group
from lightning_tas.launch.early import take_save_signal
from lightning_tas.launch.run_folder import global_rank

STATUS = 143  # 128 + SIGTERM, as shells say it
AGAIN_SECONDS = 5.0
"""Launchers and batch systems repeat SIGTERM within moments; one that comes later means: now."""
GRACE_SECONDS = 3.0


class Asked(Protocol):
    """What handlers set: `StepGuard.requests`."""

    save: bool
    stop: bool


def slurm_job(environment: Mapping[str, str] | None = None) -> str | None:
    """What `scontrol` calls the Slurm batch job that this process belongs to; None outside of one.

    Interactive allocations do not count: nobody wants his terminal requeued.
    """
    variables = os.environ if environment is None else environment
    if variables.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    array = variables.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{variables.get('SLURM_ARRAY_TASK_ID')}" if array else variables.get("SLURM_JOB_ID", "")
    return job if re.fullmatch(r"\d+(_\d+)?", job) else None


def requeue(job: str) -> None:
    """Ask Slurm to start `job` again; warn when it does not."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        failed = " ".join(done.stderr.split()) or f"status {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if failed:
        warnings.warn(f"scontrol requeue {job} failed ({failed}): submit the job again to go on", stacklevel=2)


@contextlib.contextmanager
def outside_fit() -> Iterator[None]:
    """SIGTERM, and SIGUSR1 in a Slurm batch job, raise `SIGTERMException` at once while the context lasts.

    Every file of a run is written atomically, so any moment is good.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        job = slurm_job()
        if number == signal.SIGUSR1:
            if job is None:
                return  # nothing to save here
            if global_rank() == 0:
                requeue(job)
        raise SIGTERMException

    before = _set({signal.SIGTERM: stop, signal.SIGUSR1: stop})
    try:
        take_save_signal()
        yield
    finally:
        _set(before)


class FitSignals:
    """The handlers of a fit. `install` and `remove` may be called any number of times."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._requests: Asked | None = None
        self._first: float | None = None  # when the first SIGTERM came
        self._requeue = False
        self._watch: _Watch | None = None

    def install(self, trainer: Trainer, requests: Asked) -> None:
        """Handle the signals in place of Lightning, whose SIGTERM handler communicates from within."""
        _silence(trainer)
        self._requests = requests
        before = _set({signal.SIGTERM: self._on_terminate, signal.SIGUSR1: self._on_save})
        if not self._before:
            self._before = before
            self._watch = _Watch() if before else None

    def remove(self) -> None:
        """Put back the handlers of before."""
        _set(self._before)
        self._before = {}
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def pending(self) -> bool:
        """Whether this process was asked to stop, and nobody has obeyed yet."""
        return self._requests is not None and self._requests.stop

    def stop(self, trainer: Trainer) -> NoReturn:
        """End the fit, after the save, on all processes; requeue the job if any of them was told that its time ends."""
        if trainer.strategy.reduce_boolean_decision(self._requeue, all=False) and trainer.is_global_zero:
            job = slurm_job()
            if job is not None:
                requeue(job)
        group.release_children()
        if self._requests is not None:
            self._requests.stop = False
        raise SIGTERMException

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > AGAIN_SECONDS:
            raise SIGTERMException
        self._ask(stop=True)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._requeue = slurm_job() is not None
        self._ask(stop=self._requeue)

    def _ask(self, stop: bool) -> None:
        assert self._requests is not None
        self._requests.save = True
        self._requests.stop = self._requests.stop or stop


class _Watch(threading.Thread):
    """Ends the process at a late SIGTERM even when it hangs in a collective, where Python runs no handlers.

    Python writes the number of each signal into a pipe the moment it comes; this thread reads them.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="late-sigterm")
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._ended = threading.Event()
        self._owner = os.getpid()
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self.start()

    def run(self) -> None:
        first: float | None = None
        while number := os.read(self._read, 1):
            if number[0] != signal.SIGTERM:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif now - first > AGAIN_SECONDS and not self._ended.wait(GRACE_SECONDS):
                os.write(2, b"stopped at once by a second SIGTERM\n")
                os._exit(STATUS)
        os.close(self._read)

    def close(self) -> None:
        """Stop watching."""
        if not self._ended.is_set():
            self._ended.set()
            signal.set_wakeup_fd(self._before)
            os.close(self._write)


def _set(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Install handlers and return those of before; nothing in a thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    # None stands for a handler that was not installed from Python and cannot be put back.
    return {number: signal.signal(number, handler or signal.SIG_DFL) for number, handler in handlers.items()}


def _silence(trainer: Trainer) -> None:
    """Keep Lightning from handling signals itself, and from asking rank 0 for one before every batch.

    Its question is a collective and a wait for the device in each step; `StepGuard` asks once for everything.
    """
    # Private names: where a version of Lightning has others, `install` at the start of training still replaces its
    # handlers, and its question costs what it costs.
    for owner, name in (
        (getattr(trainer, "_signal_connector", None), "register_signal_handlers"),
        (trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _nothing)


def _nothing() -> None:
    pass
