"""Kill drills: start a study, kill it at some moment, start it again until it is finished, compare with the whole run.

Shared by `tests/cluster/test_drill.py` (a small form) and `benchmarks/kill_drill.py` (many kills at random). A study
is the whole of PreNAS on the 8x8 digits, in seconds: select, train with depths that vary, mixup, cutmix, clipping,
accumulation and averaged weights, measure.

Both runs of a pair have the same command line and differ in their working folder only, so that everything in their
`result.json` that is to be equal can be.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .compare import check_whole, compare
from .progress import STEPS, Progress

STUDY = (
    "recipe=quickstart",
    "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}",
    "select.margin=0.02",
    "select.batch_size=4",
    "data.train_subset=256",
    "train.warmup_epochs=1",
    "train.mixup=0.8",
    "train.cutmix=1.0",
    "trainer.accelerator=cpu",
    f"trainer.max_epochs={STEPS.epochs}",
    "trainer.log_every_n_steps=1",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=1.0",
    # Not a divisor of an epoch's steps: checkpoints in the middle of epochs as well as at their ends.
    "checkpoint.every_n_steps=3",
    "run=drill",
    "resume=auto",
)
IMAGES_PER_STEP = 64
ATTEMPTS = 3
TIMEOUT = 180.0  # seconds for a run of some seconds: it hangs, or the machine is very busy


@dataclass(frozen=True)
class Combination:
    """How a study is run. `launch`: "one" process, "spawn" (Lightning starts the second) or "nodes" (two torchruns)."""

    launch: str
    strategy: str
    workers: int = 0
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name, unique in `COMBINATIONS`."""
        stage = self.strategy.replace("deepspeed_stage_", "zero")
        return f"{self.launch}-{stage}-{self.workers}w"

    @property
    def ema(self) -> bool:
        """Whether averaging works with the strategy."""
        return self.strategy != "deepspeed_stage_3"

    def arguments(self) -> list[str]:
        """The arguments of `fit`."""
        processes = 1 if self.launch == "one" else 2
        given = [
            *STUDY,
            f"data.batch_size={IMAGES_PER_STEP // processes // 2}",
            f"data.num_workers={self.workers}",
            f"trainer.strategy={self.strategy}",
            f"trainer.devices={2 if self.launch == 'spawn' else 1}",
            *(["trainer.num_nodes=2"] if self.launch == "nodes" else []),
            *(["train.ema=true", "train.ema_decay=0.9"] if self.ema else []),
            *self.extra,
        ]
        return [f"{key}={value}" for key, value in dict(item.split("=", 1) for item in given).items()]


_BASE = [
    Combination(launch, strategy, workers)
    for strategy in ("auto", "deepspeed_stage_2")
    for launch in ("one", "spawn")
    for workers in (0, 2)
]
_MORE = [
    Combination("spawn", "deepspeed_stage_1"),
    Combination("spawn", "deepspeed_stage_3"),
    Combination("nodes", "ddp"),
    Combination("nodes", "deepspeed_stage_1", 2),
    Combination("nodes", "deepspeed_stage_2"),
    Combination("nodes", "deepspeed_stage_3"),
]
COMBINATIONS = {combination.name: combination for combination in (*_BASE, *_MORE)}

WHEN = ("step", "write", "validation", "selection", "time", "start")
HOW = ("kill", "one first", "SIGTERM", "SIGINT", "SIGUSR1")


class TooLate(Exception):
    """The moment to kill a run did not come before its end: machines are not equally fast all the time."""


class Kill(NamedTuple):
    """A moment and a manner. `draws` in [0, 1) place it: which step or epoch, how long after, which process."""

    when: str
    how: str
    draws: tuple[float, float, float]


def draw_kill(seed: int, index: int) -> Kill:
    """Kill number `index`: moments and manners in turn, in an order of the seed; where exactly is drawn."""
    turns = index // len(WHEN)
    order = random.Random(f"when {seed} {turns}").sample(WHEN, len(WHEN))
    # Half of the kills are SIGKILL of everything: the case that leaves nothing any chance to tidy up.
    how = random.Random(f"how {seed} {index // 8}").sample([*HOW[1:], *["kill"] * 4], 8)[index % 8]
    place = random.Random(f"place {seed} {index}")
    return Kill(order[index % len(WHEN)], how, (place.random(), place.random(), place.random()))


@dataclass
class Outcome:
    """What came of one kill."""

    combination: Combination
    kill: Kill
    doing: str  # what was going on
    redone: int  # optimiser steps that the continuation did again
    differences: list[str]  # from the run that nobody killed; none: exact


def start(processes: Any, combination: Combination, home: Path, **variables: str) -> list[Any]:
    """Start the study in the folder `home`: one process, or an agent for each node; `variables` of the environment."""
    home.mkdir(parents=True, exist_ok=True)
    words = ["-m", "lightning_tas.fit", *combination.arguments()]
    environment = {"WANDB_MODE": "disabled", **variables}
    if combination.launch == "nodes":
        return list(processes.torchrun(*words, env=environment, cwd=home))
    return [processes.command("python", *words, env=environment, cwd=home, fork=True)]


def run_folder(home: Path) -> Path:
    """Where the study in `home` writes."""
    return home / "runs" / "quickstart" / "drill"


def whole_run(processes: Any, combination: Combination, home: Path) -> float:
    """Run the study without disturbance; seconds from its first sign to its end."""
    job, progress = start(processes, combination, home), Progress(run_folder(home))
    _until(job, lambda: progress.started)
    began = time.monotonic()
    _until(job, lambda: progress.finished)
    seconds = time.monotonic() - began
    processes.wait(job, timeout=TIMEOUT)
    check_whole(home)
    return seconds


def drill(processes: Any, combination: Combination, kill: Kill, home: Path, straight: Path, seconds: float) -> Outcome:
    """Kill a run in `home` once and finish it; compare with the one in `straight`, which took `seconds`."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(TooLate):
            doing, statuses = kill_run(processes, combination, kill, home, seconds)
            break
        shutil.rmtree(home)
        kill = kill._replace(draws=(0.7 * kill.draws[0], *kill.draws[1:]))
    else:
        raise AssertionError(f"{kill}: the run was over before that {ATTEMPTS} times")
    progress = Progress(run_folder(home))
    reached, trained = progress.step, progress.trained
    wrong = _wrong_statuses(combination, kill, doing, statuses)
    job = start(processes, combination, home)
    processes.wait(job, timeout=TIMEOUT)
    found = [int(number) for process in job for number in re.findall(r"continuing .* \(step (\d+)\)", process.stdout)]
    restored = found[0] if found else reached if trained else 0
    redone = max(0, reached - restored)
    if kill.how == "SIGTERM" and doing.startswith("step") and redone:
        wrong.append(f"SIGTERM: {redone} steps were not saved")
    return Outcome(combination, kill, doing, redone, wrong + compare(straight, home))


def kill_run(processes: Any, combination: Combination, kill: Kill, home: Path, seconds: float) -> tuple[str, list[int]]:
    """Start a run in `home` and kill it; what it was doing, and exit statuses of what ended by itself or by a signal.

    `seconds`: how long it would take, for kills placed by time.

    Raises:
        TooLate: it ended well before the moment came.
    """
    progress = Progress(run_folder(home))
    job = start(processes, combination, home)
    if not _until(job, moment(kill, progress, seconds)):
        processes.wait(job, timeout=TIMEOUT)
        raise TooLate
    # Looking takes time: before a SIGKILL it might let the moment pass.
    doing = progress.doing() if kill.how.startswith("SIG") else None
    statuses = strike(job, kill, progress)
    return doing or progress.doing(), statuses


def _wrong_statuses(combination: Combination, kill: Kill, doing: str, statuses: list[int]) -> list[str]:
    """What is wrong with the exit statuses after a signal that arrived while the supernet was trained."""
    expected = {"SIGTERM": 143, "SIGINT": 130}.get(kill.how)
    if expected is None or combination.launch == "nodes" or not doing.startswith("step"):
        return []  # torchrun ends with a status of its own
    return [f"exit status {status} after {kill.how}" for status in statuses if status not in (expected, 0)]


def moment(kill: Kill, progress: Progress, seconds: float) -> Callable[[], bool]:
    """The event that `kill` waits for, as a question to ask again and again; true once."""
    first, second, _ = kill.draws
    if kill.when == "time":
        return _delayed(lambda: progress.started, first * seconds)
    if kill.when == "start":
        # Before or while the first folder is written: imports take some seconds.
        return _delayed(lambda: True, first * 8)
    if kill.when == "selection":
        return _delayed(lambda: progress.running == "select", first * 0.05)
    if kill.when == "validation":
        epoch = int(first * STEPS.epochs)
        return _delayed(lambda: progress.validates(epoch), second * 0.05)
    step = 1 + int(first * (STEPS.all - 1))
    if kill.when == "write":
        return lambda: progress.writes and progress.step >= step - 3
    assert kill.when == "step", kill
    return _delayed(lambda: progress.step >= step, second * 0.1)


def _delayed(event: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """True `seconds` after `event` was seen for the first time."""
    seen: list[float] = []

    def question() -> bool:
        if not seen and event():
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + seconds

    return question


def _until(job: list[Any], question: Callable[[], bool]) -> bool:
    """Wait until `question` is true; False when the job ends before."""
    end = time.monotonic() + TIMEOUT
    while not question():
        if any(process.status is not None for process in job):
            return False
        assert time.monotonic() < end, "hangs\n" + "\n".join(process.report() for process in job)
        time.sleep(0.002)
    return True


def strike(job: list[Any], kill: Kill, progress: Progress) -> list[int]:
    """Stop the job in the manner of `kill`, and kill what is left of it after a grace; statuses of what had ended."""
    if kill.how == "SIGUSR1":
        before = progress.checkpoints
        for pid in (pid for process in job for pid in ranks(process)):
            _signal(pid, signal.SIGUSR1)
        end = time.monotonic() + 5 * kill.draws[1]
        while progress.checkpoints == before and time.monotonic() < end:
            time.sleep(0.002)
    elif kill.how.startswith("SIG"):
        for process in job:
            if kill.how == "SIGINT":  # a terminal sends it to all processes of the foreground
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
            else:
                process.send(signal.SIGTERM)
        _wait(job, 60)
    elif kill.how == "one first":
        _kill_one(job, kill.draws[2])
        _wait(job, 3 * kill.draws[1])
    statuses = [process.status for process in job if process.status is not None]
    for process in job:
        process.kill()
    return statuses


def _kill_one(job: list[Any], draw: float) -> None:
    """SIGKILL one node with all its processes, or one rank."""
    if len(job) > 1:
        job[int(draw * len(job))].kill()
        return
    pids = ranks(job[0])
    _signal(pids[int(draw * len(pids))], signal.SIGKILL)


def ranks(process: Any) -> list[int]:
    """Ids of the processes that train, without their data workers and without torchrun's agent."""
    pids = {pid: _environment(pid) for pid in process.descendants()}
    launched = [pid for pid, text in pids.items() if b"\0LOCAL_RANK=" in text and _parent(pid) not in pids]
    agent = any(b"\0TORCHELASTIC_RUN_ID=" in text for text in pids.values())
    return sorted(launched) if agent else [process.pid, *sorted(launched)]


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        # "pid (name) state parent ...", where the name may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(job: list[Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.status is None for process in job) and time.monotonic() < end:
        time.sleep(0.02)
