"""`python -m lightning_tas.fit -m seed=1,2 recipe=a,b ...`: every combination as a job with its own run folder.

Each job is a process of its own, `python -m lightning_tas.fit <its overrides> run=<sweep>-<NN>`, so that it may use
several devices. Hydra's launchers start the jobs: one after the other here, or `hydra/launcher=joblib`,
`submitit_local`, `submitit_slurm` where those plugins are installed. All jobs are checked before the first one starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_tas.analysis.tables import text_table
from lightning_tas.commands import compose, names, schema
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.errors import Stopped, UserError
from lightning_tas.launch import environment
from lightning_tas.launch.early import take_save_signal
from lightning_tas.launch.files import make_folder, take_lock, write_json
from lightning_tas.launch.follow import PATIENCE_SECONDS, VARIABLE
from lightning_tas.launch.run_folder import RUN_VARIABLE, RunFolder
from lightning_tas.reading import check_argument, read_json

LAUNCHER = ("hydra/launcher=", "hydra.launcher.")
SWEEPS = "sweeps"
"""Folder beside those of the recipes, for what belongs to no single job."""
ONE_FOR_ALL = ("run", "output_dir", "resume", "plan")
MARGIN_SECONDS = 10.0
"""How much longer than a job may take to stop another one waits for it to be gone."""
STOPPED = (130, 143)


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    swept: str  # what tells it from the others
    folder: Path

    @property
    def command(self) -> list[str]:
        """What its process is started with."""
        return [sys.executable, "-m", "lightning_tas.fit", *self.overrides, f"run={self.folder.name}"]


def run(arguments: Sequence[str]) -> None:
    """Run a sweep: `arguments` without the flag. Raises Stopped with a non-zero status unless all jobs succeed."""
    if environment.launched() and environment.world_size() > 1:
        raise UserError("-m: start a sweep once, without torchrun or srun; its jobs start processes of their own")
    launcher = [argument for argument in arguments if argument.startswith("hydra")]
    for argument in launcher:
        if not argument.startswith(LAUNCHER):
            raise UserError(f"{argument!r} is not for a sweep; valid: hydra/launcher=NAME, hydra.launcher.KEY=VALUE")
    own = [argument for argument in arguments if argument not in launcher]
    name, configs, combinations = _checked(own)
    output_dir = Path(configs[0].output_dir)
    width = max(2, len(str(len(combinations) - 1)))
    jobs = []
    for number, (config, (overrides, swept)) in enumerate(zip(configs, combinations, strict=True)):
        folder = RunFolder.locate(config.output_dir, config.recipe, f"{name}-{number:0{width}d}", config.seed)
        if config.resume is None and folder.study.exists():
            raise UserError(
                f"run: {str(folder.path)!r} exists already; resume=auto continues it, or choose another run="
            )
        jobs.append(Job(overrides, swept, folder.path))
    place = make_folder((output_dir / SWEEPS / name).absolute())
    write_json(place / "jobs.json", {"cwd": os.getcwd(), "commands": [job.command for job in jobs]})
    for number in range(len(jobs)):
        _status_file(place, number).unlink(missing_ok=True)
    say(f"sweep {name}: {len(jobs)} jobs")
    try:
        _launch(place, len(jobs), launcher)
    except SystemExit as stopped:
        raise Stopped(
            f"stopped; the same command with run={name} resume=auto goes on", int(stopped.code or 1)
        ) from None
    finally:
        statuses = [_status(place, number) for number in range(len(jobs))]
        if any(status is not None for status in statuses):
            say(_summary(jobs, statuses))
    _judge(name, statuses)


def _checked(arguments: Sequence[str]) -> tuple[str, list[Config], list[tuple[tuple[str, ...], str]]]:
    """Name of the sweep, the configuration of every job, and its (overrides, what is special about it)."""
    choices = [split(argument) for argument in arguments]
    single = {
        argument.partition("=")[0]: found[0].partition("=")[2]
        for argument, found in zip(arguments, choices, strict=True)
    }
    name = single.get("run") or environment.slurm_run_name() or time.strftime("%Y%m%d-%H%M%S")
    combinations, configs = [], []
    for number, values in enumerate(itertools.product(*choices)):
        overrides = tuple(value for value in values if not value.startswith("run="))
        swept = " ".join(value for value, found in zip(values, choices, strict=True) if len(found) > 1)
        try:
            configs.append(compose.config_from("fit", [*overrides, f"run={name}-{number:02d}"]))
            names.check("fit", configs[-1])
            if configs[-1].resume not in (None, "auto"):
                raise UserError(f"resume: {configs[-1].resume!r} is one run; valid for a sweep: resume=auto run=NAME")
        except UserError as error:
            raise UserError(f"job {number} ({swept or 'the only one'}): {error}") from None
        combinations.append((overrides, swept))
    return name, configs, combinations


def split(argument: str) -> list[str]:
    """The `key=value` of each of the values that an argument sweeps over: Hydra's grammar, as in `seed=1,2`.

    Keys that take a path or a name as typed (`recipe`, `ckpt`, `arch`, ...) are split at commas outside of brackets
    and quotes.

    Raises:
        UserError: the key does not exist, cannot be swept, or its values cannot be read.
    """
    key, equals, value = argument.partition("=")
    if not equals or key.startswith(("+", "~", "-")):
        compose.parse(argument)  # says what is wrong with it
    schema.check_key(key)
    if key in compose.VERBATIM or key in compose.VERBATIM_OR_MAPPING:
        values = _pieces(value)
    else:
        try:
            check_argument(argument)
            parsed = OverridesParser.create().parse_override(argument)
            if not parsed.is_sweep_override():
                return [argument]
            if not parsed.is_discrete_sweep():
                raise UserError(f"{key}: {value!r} is not a list of values; write {key}=A,B or {key}=range(1,4)")
            values = list(parsed.sweep_string_iterator())
        except HydraException as error:
            raise UserError(f"{key}: {value!r} cannot be read ({schema.first_line(error)})") from None
    if len(values) > 1 and key in ONE_FOR_ALL:
        raise UserError(f"{key}: {value!r} is several values, and all jobs of a sweep share one")
    return [f"{key}={value}" for value in values]


def _pieces(value: str) -> list[str]:
    """Split at commas that stand in no brackets and no quotes."""
    pieces, depth, quote = [""], 0, ""
    for char in value:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append("")
            continue
        pieces[-1] += char
    return [piece.strip() for piece in pieces]


def _launch(place: Path, count: int, launcher: Sequence[str]) -> None:
    """Hand the jobs to Hydra's launcher; what it says about them is ours to say."""
    node = {
        "defaults": [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}, "_self_"],
        "hydra": {"sweep": {"dir": str(place), "subdir": "."}, "output_subdir": None, "job": {"chdir": False}},
        "folder": str(place),
        "job": 0,
    }
    ConfigStore.instance().store(name="lightning_tas_sweep", node=node)
    argv = ["lightning_tas.fit", "--multirun", *launcher, f"job={','.join(map(str, range(count)))}"]
    try:
        with _variables(sys_argv=argv, HYDRA_FULL_ERROR="1"):
            hydra.main(version_base="1.3", config_path=None, config_name="lightning_tas_sweep")(work)()
    except (HydraException, OmegaConfBaseException) as error:
        _remove(place)
        reason = " ".join(str(error).split())
        raise UserError(f"hydra/launcher: {reason}") from None


def _remove(place: Path) -> None:
    """Delete the folder of a sweep that did not begin, and those above it that are empty without it."""
    (place / "jobs.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # one holds something else
        for folder in (place, place.parent, place.parent.parent):
            folder.rmdir()


@contextlib.contextmanager
def _variables(sys_argv: list[str], **environ: str) -> Iterator[None]:
    """The process's arguments and environment as Hydra is to find them."""
    before, argv = {name: os.environ.get(name) for name in environ}, sys.argv
    sys.argv = sys_argv
    os.environ.update(environ)
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def work(config: DictConfig) -> int:
    """Run one job, wherever Hydra's launcher has brought us; leave its exit status in the sweep's folder."""
    place, number = Path(config.folder), int(config.job)
    with _started(place, number) as process, _passing_on(process) as passed:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            _send(process, signal.SIGINT)
            _end(process)
            _write_status(place, number, STOPPED[0])
            raise
    _write_status(place, number, 128 - status if status < 0 else status)
    if signal.SIGTERM in passed or (passed and status in STOPPED):  # SIGUSR1 stops a job of Slurm, whose time ends
        raise SystemExit(STOPPED[1])  # an ordinary exception would let Hydra start the next job
    return status


@contextlib.contextmanager
def _started(place: Path, number: int) -> Iterator[subprocess.Popen[Any]]:
    """A job's process, which stops when this one is gone; alone with its number, which it keeps as long as it lives."""
    jobs: dict[str, Any] = read_json(place / "jobs.json")
    given = {key: value for key, value in os.environ.items() if key not in (RUN_VARIABLE, "HYDRA_FULL_ERROR")}
    lock = os.open(place / f"job-{number}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    watched, held = os.pipe()
    try:
        told = f"job {number} of a sweep that was killed is still stopping; waiting for it ..."
        if not take_lock(lock, PATIENCE_SECONDS + MARGIN_SECONDS, lambda: say(told)):
            say(f"job {number} is still running, by another sweep in {str(place)!r}")
            raise SystemExit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # it would end a job that has no handler yet
        try:
            # A session of its own: it gets the signals that we pass on, each of them once, and all of its processes do.
            process = subprocess.Popen(
                jobs["commands"][number],
                cwd=jobs["cwd"],
                env={**given, VARIABLE: str(watched)},
                pass_fds=(watched, lock),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        yield process
    finally:
        for handle in (lock, watched, held):
            os.close(handle)


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[Any]) -> Iterator[list[int]]:
    """Hand SIGTERM and SIGUSR1 on to the job; gives the list of those handed on. Possible in main threads only."""
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        if number == signal.SIGTERM:
            _send(process, number)
        elif process.poll() is None:
            process.send_signal(number)  # to one process, which tells the others: helpers of torch's would die of it

    try:
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    except ValueError:
        yield passed
        return
    try:
        take_save_signal()
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(process: subprocess.Popen[Any], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, number)


def _end(process: subprocess.Popen[Any]) -> None:
    """Wait for a job that was told to stop, and for the processes that it started; then kill what is left of them."""
    end = time.monotonic() + PATIENCE_SECONDS
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)


def _status_file(place: Path, number: int) -> Path:
    return place / f"status-{number}.json"


def _write_status(place: Path, number: int, status: int) -> None:
    if environment.rank() == 0:  # of the processes that a launcher starts for one job
        write_json(_status_file(place, number), {"status": status})


def _status(place: Path, number: int) -> int | None:
    path = _status_file(place, number)
    return int(read_json(path)["status"]) if path.exists() else None


def _summary(jobs: Sequence[Job], statuses: Sequence[int | None]) -> str:
    rows = [
        [number, job.swept or "-", _word(status), *_best(job.folder), job.folder]
        for number, (job, status) in enumerate(zip(jobs, statuses, strict=True))
    ]
    return "\n" + text_table(["job", "overrides", "status", "best top-1 [%]", "network", "run folder"], rows)


def _best(folder: Path) -> tuple[str, str]:
    """Accuracy and label of the most accurate network that a job has measured."""
    try:
        record = read_json(folder / "result.json")
        found = [(entry["metrics"]["top1"], entry["label"]) for entry in record["architectures"] if entry["metrics"]]
        top1, label = max((pair for pair in found if pair[0] is not None), key=lambda pair: pair[0])
    except (UserError, KeyError, TypeError, ValueError):  # none was measured, or not by this version
        return "-", "-"
    return f"{top1:.2f}", str(label)


def _word(status: int | None) -> str:
    if status is None:
        return "not started"
    return "finished" if status == 0 else f"stopped ({status})" if status in STOPPED else f"failed ({status})"


def _judge(name: str, statuses: Sequence[int | None]) -> None:
    """Raise what the sweep as a whole ends with, if that is not success."""
    bad = [status for status in statuses if status != 0]
    if bad:
        known = {status for status in bad if status is not None}
        message = (
            f"{len(bad)} of {len(statuses)} jobs did not finish; the same command with run={name} resume=auto goes on"
        )
        raise Stopped(message, known.pop() if len(known) == 1 else 1)
