"""`python -m lightning_tas.score`: zero-cost proxies against real accuracies.

    recipe=vit_bench_pit bench=FILE      networks whose accuracies a file holds
    ckpt=RUN                             sub-networks of a trained supernet, measured on the validation split

Prints a table for every accuracy and writes scores.csv, correlations.csv, score.json, scatter.png and bars.png into
`output_dir/<recipe>/<run>/`. Scores stream into `scores-*.csv` there, and `run=NAME resume=auto` goes on with them.
Under torchrun or srun the processes share the networks.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_tas.commands import score_report, score_work
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.commands.console import say
from lightning_tas.commands.score_sizes import size_of
from lightning_tas.data.config import OF_A_NODE as DATA_OF_A_NODE
from lightning_tas.errors import Stopped, UserError
from lightning_tas.launch import group, log
from lightning_tas.launch.compare import compare, flat
from lightning_tas.launch.files import read_json, remove_temporaries, write_json, write_text
from lightning_tas.launch.loggers import RunLoggers, check_loggers
from lightning_tas.launch.run_folder import RunFolder, recipe_folder
from lightning_tas.launch.signals import outside_fit
from lightning_tas.plugins import trust_argument

RECORD, RESULT = "bench.json", "score.json"
OF_A_NODE = ("data.root", *(f"data.{key}" for key in DATA_OF_A_NODE))


def run(config: Config) -> None:
    """Score, or print what would be scored (`plan=true`). Raises UserError before anything is written."""
    if config.plan:
        if group.rank() == 0:
            plan(config)
        return
    group.join(config.trainer.accelerator)
    compare("launch", flat(asdict(config), leave_out=OF_A_NODE))
    check_loggers(config)
    job = score_work.prepare(config)
    compare("networks", {"networks": score_work.settings(config, job)["networks"]})
    folder = group.first(lambda: locate(config, job))
    group.barrier()  # no process has found a mistake
    main = group.rank() == 0
    made = folder.missing() if main else []
    if main:
        folder.create()
    try:
        with folder.locked() if main else nullcontext():
            _run_locked(config, job, folder, made)
    finally:
        folder.forget()


def _run_locked(config: Config, job: score_work.Job, folder: RunFolder, made: list[Path]) -> None:
    loggers = RunLoggers(config, folder)
    if group.rank() == 0:
        log.write_into(folder.path)
        _begin(config, job, folder)
    group.barrier()  # the folder is there
    try:
        with outside_fit():
            _work(config, job, folder, loggers)
        loggers.close()
    except (Exception, KeyboardInterrupt, SIGTERMException) as error:
        ending = group.settle(_told(error, folder))
        if made and isinstance(ending, UserError):
            folder.remove(made)  # a mistake that only the work itself could see leaves nothing half-written
        loggers.close(getattr(ending, "status", 1))
        if ending is error:
            raise
        raise ending from None


def _begin(config: Config, job: score_work.Job, folder: RunFolder) -> None:
    remove_temporaries(folder.path)
    decided = score_work.settings(config, job)
    record = folder.path / RECORD
    if record.exists():
        known = read_json(record, key="resume")
        different = [key for key, value in decided.items() if known.get(key) != value]
        if different:
            raise UserError(
                f"resume: {str(folder.path)!r} was begun with other settings: "
                + "; ".join(f"{key} {known.get(key)!r}, now {decided[key]!r}" for key in different)
                + "; give the same, or another run=NAME"
            )
    write_text(folder.config, to_yaml(config))
    write_json(record, decided)


def _work(config: Config, job: score_work.Job, folder: RunFolder, loggers: RunLoggers) -> None:
    say(f"run folder: {folder.path}")
    for line in score_work.lines(job):
        say(line)
    began = time.monotonic()
    bench = job.bench if job.net is None else score_work.inherited(config, job, folder.path)
    results = score_work.score(config, job, folder.path)
    group.barrier()
    if group.rank() == 0:
        report = score_report.Report.of(config, job, bench, results)
        say(report.text())
        report.write(folder.path, seconds=time.monotonic() - began)
        report.log(loggers, report.draw(folder.path), folder.path)
    say(f"written to {folder.path}")


def _told(error: BaseException, folder: RunFolder) -> BaseException:
    after = f"python -m lightning_tas.score resume={folder.path}{trust_argument()} continues it"
    if isinstance(error, KeyboardInterrupt):
        return Stopped(f"stopped by Ctrl-C; {after}", group.INTERRUPTED)
    if isinstance(error, SIGTERMException):
        return Stopped(f"stopped by a signal; {after}", group.TERMINATED)
    return error


def locate(config: Config, job: score_work.Job) -> RunFolder:
    """The run folder: a new one, or that of the scoring to continue."""
    if config.resume is not None and config.resume != "auto":
        folder = RunFolder(Path(config.resume))
        if not (folder.path / RECORD).is_file():
            raise UserError(f"resume: {config.resume!r} is no folder that score has written; valid: auto, or one")
        return folder
    folder = RunFolder.locate(config.output_dir, config.recipe, config.run, config.seed)
    if config.resume == "auto" and config.run is None:
        return _newest_unfinished(config, job) or folder
    if config.resume is None and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(
            f"run: {str(folder.path)!r} exists already; resume=auto continues it, or choose another run=NAME"
        )
    return folder


def _newest_unfinished(config: Config, job: score_work.Job) -> RunFolder | None:
    records = recipe_folder(config.output_dir, config.recipe).glob(f"*/{RECORD}")
    for path in sorted(records, key=lambda path: path.stat().st_mtime, reverse=True):
        if (path.parent / RESULT).exists():
            continue
        try:
            known = read_json(path, key="resume")
        except UserError as error:
            rank_zero_warn(f"{error}; that run is left out")
            continue
        if known == score_work.settings(config, job):
            return RunFolder(path.parent)
    return None


def plan(config: Config) -> None:
    """Print what would be scored; the time of one network of median size is measured, nothing is written."""
    check_loggers(config)
    job = score_work.prepare(config)
    for line in score_work.lines(job):
        say(line)
    if job.net is None:
        say(f"accuracies: {', '.join(job.bench.accuracies)}")
    walks = score_work.passes(config, job)
    say("timing the proxies on the smallest and on the median network ...")
    total = 0.0
    spent: dict[str, float] = {}
    smallest, median = score_work.typical(job)
    for one in [walk for walk in walks if walk.weights == score_work.INITIAL and walk.init == 0]:
        score_work.run_pass(config, job, one, None, [smallest])
        began = time.monotonic()
        scores = score_work.run_pass(config, job, one, None, [median])
        total += time.monotonic() - began
        spent |= {name: float(np.mean(scores.seconds(name))) for name in one.group.names}
    say(score_report.plan_table({name: (size_of(name, config.bench), spent[name]) for name in job.names}))
    rounds = len({(walk.weights, walk.init) for walk in walks})
    hours = total * rounds * len(job.bench) / 3600
    say(
        f"{len(job.bench)} networks x {rounds} draws of weights x {total:.1f} s (measured on the network of median "
        f"size) = about {hours:.1f} h on one process"
        + (", and the accuracies in the supernet" if job.net is not None else "")
    )
