"""`python -m lightning_tas.fit`: run the phases of a recipe, one after the other, resuming where a run stopped."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_tas.commands import per_phase
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.commands.console import say
from lightning_tas.data.config import OF_A_NODE as DATA_OF_A_NODE
from lightning_tas.errors import Stopped, UserError
from lightning_tas.launch import group, log
from lightning_tas.launch.checkpoints import named_checkpoint, phase_index
from lightning_tas.launch.compare import compare, flat
from lightning_tas.launch.files import remove_temporaries, write_json, write_text
from lightning_tas.launch.meeting import plain
from lightning_tas.launch.provenance import command as command_line
from lightning_tas.launch.run_folder import RunFolder, recipe_folder
from lightning_tas.launch.settings import Settings, decided, dotted
from lightning_tas.launch.signals import outside_fit
from lightning_tas.launch.study import FINISHED, Study, phase_labels, read_study
from lightning_tas.launch.trainer import check_trainer, world_size
from lightning_tas.plugins import trust_argument

if TYPE_CHECKING:
    from lightning_tas.commands.phases import Context
    from lightning_tas.data import TASDataModule

# What may differ between the nodes of a run.
OF_A_NODE = ("data.root", *(f"data.{key}" for key in DATA_OF_A_NODE))


def settings_of(config: Config) -> Settings:
    """What decides the result of a run."""
    defaults = dotted(decided(asdict(Config())))
    common = dotted(decided(asdict(config)))
    own = per_phase.configs(config) if config.per_phase else {}
    for label, settings in own.items():
        special = dotted(decided(asdict(settings)))
        special = {key: value for key, value in special.items() if value != common.get(key, defaults.get(key))}
        defaults |= {f"per_phase.{label}.{key}": common.get(key, defaults.get(key)) for key in special}
        common |= {f"per_phase.{label}.{key}": value for key, value in special.items()}
    return Settings(common, defaults)


def run(config: Config, command: str = "fit") -> None:
    """Run a study, or print its plan (`plan=true`). Raises UserError before anything is written.

    command: what the user typed, fit or search: it continues the run when this one is stopped.
    """
    from lightning_tas.callbacks.search_build import LATENCY
    from lightning_tas.commands import checks

    if config.plan:
        from lightning_tas.commands import going_back, plan

        if group.rank() == 0:
            if (named := named_checkpoint(config.resume)) is not None:
                going_back.show(config, _study(config, locate(config), write=False), named)
            plan.show(config)
        return
    for settings in per_phase.configs(config).values():
        check_trainer(settings.trainer, settings.train)
    group.join(config.trainer.accelerator)
    compare("launch", flat(asdict(config), leave_out=(*OF_A_NODE, per_phase.KEY)) | _flat_phases(config))
    folder = group.first(lambda: locate(config))
    checks.check_phases(config)
    data = _data(config)
    with warnings.catch_warnings(action="ignore"):  # the phases will warn
        checks.check_weights(config)
    checks.check_held_out(config, data)
    measured = checks.check_selection(config, data, folder.path)
    made = folder.missing()
    group.barrier()  # no process has found a mistake
    main = group.rank() == 0
    if main:
        folder.create()
        if measured is not None:
            write_json(folder.path / LATENCY, measured)
    try:
        with folder.locked() if main else nullcontext():
            if main and config.resume is None and folder.study.exists():
                raise _used(folder)  # by a run that was begun under the same name a moment ago
            _run_locked(config, folder, data, made if main else [], command)
    finally:
        folder.forget()


def _flat_phases(config: Config) -> dict[str, str]:
    """The settings of single phases, as `compare` takes them."""
    given = per_phase.dotted(config.per_phase)
    return flat({key: value for key, value in given.items() if key.partition(".")[2] not in OF_A_NODE}, "per_phase.")


def _data(config: Config) -> TASDataModule:
    """The data of the first phase, those of all opened: a missing data set ends the command with nothing written."""
    from lightning_tas.commands import build, checks

    first = data = None
    for settings in per_phase.configs(config).values():
        data, trainer = build.data(settings, data), settings.trainer
        first = first or data
        if checks.needs_data(config):
            data.load()
            data.check_batches(world_size(trainer), trainer.limit_train_batches, trainer.limit_val_batches)
    assert first is not None
    return first


def _run_locked(config: Config, folder: RunFolder, data: TASDataModule, made: list[Path], command: str) -> None:
    """Run the phases; on a user's mistake, remove the folders just `made` unless they hold work."""
    from lightning_tas.commands import phases

    if group.rank() == 0:
        remove_temporaries(folder.path)
        log.write_into(folder.path)
        log.note(command_line())
    if group.rank() == 0 and not folder.study.exists():
        write_text(folder.config, to_yaml(config))  # first: whatever has a study can be resumed from its configuration
    study = group.first(lambda: _study(config, folder, write=group.rank() == 0))
    study.write = group.rank() == 0
    _go_back(config, study, data)
    context = phases.Context(config, folder, study, data_module=data)
    say(f"run folder: {folder.path}" + (" (all phases are finished)" if study.finished else ""))
    try:
        with outside_fit():  # within, `RunCheckpoints` handles the signals of each fit
            _run_phases(context)
        say(f"written to {folder.path}")  # again, below the progress bars
        context.loggers.close()
    except (Exception, KeyboardInterrupt, SIGTERMException) as error:
        ending = group.settle(_told(error, folder, command))
        if made and isinstance(ending, UserError):
            folder.remove(made)  # a mistake that only a phase could see leaves nothing half-written
        context.loggers.close(getattr(ending, "status", 1))
        if ending is error:
            raise
        raise ending from None


def _study(config: Config, folder: RunFolder, write: bool) -> Study:
    return Study(folder.study, phase_labels(config.phases), settings_of(config), write)


def _go_back(config: Config, study: Study, data: TASDataModule) -> None:
    """Where `resume=` names a checkpoint, forget what came after it; also what an earlier process did not finish."""
    from lightning_tas.commands import going_back

    named = named_checkpoint(config.resume)
    if named is not None:
        group.first(lambda: going_back.check(config, study, named, data) if group.rank() == 0 else None)
        study.go_back(phase_index(named), str(named.relative_to(study.path.resolve().parent)))
    if study.back_to is not None:
        group.first(lambda: going_back.delete(study) if group.rank() == 0 else None)
        study.went_back()


def _told(error: BaseException, folder: RunFolder, command: str) -> BaseException:
    """What a run ends with: signals and lost processes say how it goes on, everything else is `error` itself."""
    after = f"python -m lightning_tas.{command} resume={folder.path}{trust_argument()} continues it"
    if isinstance(error, KeyboardInterrupt):
        return Stopped(f"stopped by Ctrl-C; {after}", group.INTERRUPTED)
    if isinstance(error, SIGTERMException):
        return Stopped(f"stopped by a signal; {after}", group.TERMINATED)
    if group.is_lost(error):
        return Stopped(f"lost another process of this run ({plain(error)}); {after}", 1)
    return error


def _run_phases(context: Context) -> None:
    """Run every phase that is not finished."""
    from lightning_tas.commands.phases import PHASES

    labels, study = phase_labels(context.recipe.phases), context.study
    for index, label in enumerate(labels):
        if study.status(index) == FINISHED:
            continue
        context.index = index
        study.start(index)
        say(f"phase {index + 1}/{len(labels)}: {label}")
        # Where only rank 0 has something to do (the selection), the others wait here for it, or for its error.
        study.finish(index, group.broadcast(PHASES[per_phase.kind(label)](context)))
        group.barrier()


def locate(config: Config) -> RunFolder:
    """The run folder: a new one, or that of the run to continue."""
    begun = RunFolder.begun()
    if begun is not None:
        return begun
    if config.resume is not None and config.resume != "auto":
        return RunFolder(_run_of(Path(config.resume)))
    folder = RunFolder.locate(config.output_dir, config.recipe, config.run, config.seed)
    if config.resume == "auto" and config.run is None and not folder.study.exists():
        unfinished = newest_unfinished(config)
        if unfinished is not None:
            return unfinished
    used = folder.path.is_dir() and any(folder.path.iterdir())
    # Processes that were started by hand (Lightning's variables, no launcher) come here one by one: what the later ones
    # find was made by rank 0 a moment ago.
    if config.resume is None and used and group.rank() == 0:
        raise _used(folder)
    return folder


def _used(folder: RunFolder) -> UserError:
    return UserError(f"run: {str(folder.path)!r} exists already; resume=auto continues it, or choose another run=NAME")


def newest_unfinished(config: Config) -> RunFolder | None:
    """The newest run of this recipe with the same configuration that has an unfinished phase."""
    settings = settings_of(config)
    folder = recipe_folder(config.output_dir, config.recipe)
    studies = sorted(folder.glob("*/study.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in studies:
        try:
            record = read_study(path)
            different = settings.differing(record, path.with_name("config.yaml"))
        except UserError as error:
            rank_zero_warn(f"{error}; that run is left out")
            continue
        if not different and any(phase["status"] != FINISHED for phase in record["phases"]):
            return RunFolder(path.parent)
    return None


def _run_of(path: Path) -> Path:
    """The run folder that holds `path` (the folder itself, or a checkpoint inside it)."""
    for folder in (path, *path.parents):
        if (folder / "study.json").exists():
            return folder
    raise UserError(
        f"resume: {str(path)!r} is not inside a run folder; valid: auto, a run folder, or a checkpoint of one"
    )
