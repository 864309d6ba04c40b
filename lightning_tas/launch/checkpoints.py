"""When a run saves, what it keeps, and which checkpoint a resumed run goes on from.

A checkpoint is named after its place, `epoch=0003-step=0001234.ckpt`; the newest is the one with the highest step. It
is a file, or under DeepSpeed a folder, and appears under its name only when it is whole.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.strategies import DeepSpeedStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_tas.errors import UserError
from lightning_tas.launch.files import damage, writing
from lightning_tas.launch.run_folder import global_rank
from lightning_tas.launch.signals import FitSignals
from lightning_tas.training.sharded import consolidate, entries

if TYPE_CHECKING:
    from lightning_tas.commands.config import CheckpointConfig
    from lightning_tas.training.guard import StepGuard

NAME = re.compile(r"epoch=(\d+)-step=(\d+)\.ckpt")


class RunCheckpoints(Checkpoint):
    """Saves a phase of a run so that going on from any of its checkpoints is exact.

    Saved are: every `every_n_epochs`-th epoch and the last one, after its validation; every `every_n_steps` updates;
    and whatever step `module.guard` has agreed to save or stop at, over all processes, because of a signal. A step
    that ends an epoch is saved with the epoch: Lightning, resumed from before the validation, would leave it out.

    Args:
        folder: where the checkpoints of the phase lie; made when the fit starts.
        settings: `checkpoint.*`.
    """

    def __init__(self, folder: Path, settings: CheckpointConfig) -> None:
        settings.check()
        self.folder, self.settings = folder, settings
        self._signals = FitSignals()
        self._seen = 0  # updates at the end of the last batch
        self._saved = 0  # updates in the newest checkpoint
        self._owed = False  # a step checkpoint that the end of the epoch will bring
        self._stop = False  # and it stops there

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals from here on; make the folder, which is not made again where it vanishes later."""
        if trainer.is_global_zero:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
        _resume_by_epochs(trainer)
        self._signals.install(trainer, _guard(pl_module).requests)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin after the restored step, whose checkpoint is there."""
        self._signals.install(trainer, _guard(pl_module).requests)
        self._seen = self._saved = trainer.global_step
        if trainer.is_global_zero:
            clean(self.folder)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Save after an update: inside gradient accumulation a checkpoint would lose the gradients."""
        step = trainer.global_step
        if step == self._seen:
            return
        self._seen = step
        every = self.settings.every_n_steps
        agreed = _guard(pl_module).last
        if not (agreed.save or agreed.stop or (every and step % every == 0)):
            return
        if _epoch_ends(trainer):
            self._owed, self._stop = True, agreed.stop
            return
        self._save(trainer)
        if agreed.stop:
            self._signals.stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after the validation of the epoch; stop if a signal has asked for it meanwhile."""
        requests = _guard(pl_module).requests
        agree = trainer.strategy.reduce_boolean_decision
        save, stop = agree(requests.save, all=False), agree(requests.stop or self._stop, all=False)
        if save:
            requests.save = False
        due = (trainer.current_epoch + 1) % self.settings.every_n_epochs == 0
        if due or save or stop or self._owed or _training_ends(trainer):
            self._save(trainer)
        if stop:
            self._signals.stop(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the signals alone; on Ctrl-C let the processes that Lightning started end by themselves."""
        self._signals.remove()
        if isinstance(exception, KeyboardInterrupt):
            # They were interrupted too, or learn it from this one. Lightning would kill them, and then this process for
            # their status, which would be 137 instead of 130.
            getattr(trainer.strategy.launcher, "procs", []).clear()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the signals alone; a request to stop that came after the last step is obeyed now."""
        self._signals.remove()
        if stage == "fit" and self._signals.pending:
            raise SIGTERMException

    def _save(self, trainer: Trainer) -> None:
        self._owed = False
        step = trainer.global_step
        if step == self._saved:
            return
        path = self.folder / f"epoch={trainer.current_epoch:04d}-step={step:07d}.ckpt"
        failure = None
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except UserError as error:
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                raise  # the others have heard of it, and wait inside of DeepSpeed
            failure = error
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the others wait
        if trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
            raise failure or UserError(f"checkpoint: another process could not write {str(path)!r}")
        self._saved = step
        if trainer.is_global_zero:
            prune(self.folder, step, self.settings.keep_last)


def _resume_by_epochs(trainer: Trainer) -> None:
    """Make Lightning go on from the end of an epoch with `max_steps` as it does without.

    With `max_steps` it takes the finished epoch for one in its middle and counts another one without training it: later
    epochs have wrong numbers, and a run that has `max_epochs` too may end at once, as if it were finished.
    """
    if hasattr(trainer.fit_loop, "_iteration_based_training"):
        setattr(trainer.fit_loop, "_iteration_based_training", lambda: False)  # noqa: B010


def _guard(module: LightningModule) -> StepGuard:
    guard: Any = module.guard
    return cast("StepGuard", guard)


def _training_ends(trainer: Trainer) -> bool:
    """Whether the update just done is the last one, or the epoch at whose end we are."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs


def _epoch_ends(trainer: Trainer) -> bool:
    """Whether the batch just done is followed by the end of its epoch, or of training."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


def saved(folder: Path) -> list[tuple[int, Path]]:
    """Updates and path of every checkpoint in `folder`, newest first; `final.ckpt` and hidden files are none."""
    found = [(match, path) for path in folder.glob("*.ckpt") if (match := NAME.fullmatch(path.name))]
    return sorted(((int(match[2]), path) for match, path in found), reverse=True)


def of_step(folder: Path, step: int) -> Path | None:
    """The checkpoint of `step` updates in `folder`."""
    return next((path for at, path in saved(folder) if at == step), None)


def hand_on(checkpoint: Path, file: Path) -> None:
    """Make a checkpoint `file` too: a second name for the same bytes, or one ordinary file of a DeepSpeed folder.

    Raises:
        UserError: it cannot be written.
    """
    if checkpoint.is_dir():
        consolidate(checkpoint, file)
        return
    hidden = file.with_name(f".{file.name}.partial")
    hidden.unlink(missing_ok=True)
    with writing(file):
        try:
            os.link(checkpoint, hidden)
        except OSError:  # a file system without
            shutil.copyfile(checkpoint, hidden)
        os.replace(hidden, file)


def named_checkpoint(resume: str | None) -> Path | None:
    """The checkpoint of a phase that `resume=` names; None where it says auto or names a run.

    Raises:
        UserError: it is something else inside a run, `final.ckpt` for example, from which nothing can go on.
    """
    if resume is None or resume == "auto" or (Path(resume) / "study.json").exists():
        return None
    path = Path(resume).resolve()
    place = re.fullmatch(r"phases/\d+-[\w-]+/checkpoints", "/".join(path.parts[-4:-1]))
    if NAME.fullmatch(path.name) and place and (path.parents[3] / "study.json").exists() and path.exists():
        return path
    raise UserError(
        f"resume: {resume!r} is not a checkpoint to go on from; valid: auto, a run folder, or one of its "
        "phases/NN-name/checkpoints/epoch=....-step=.......ckpt"
    )


def later(path: Path) -> list[Path]:
    """What came after a named checkpoint in its run: later ones of its phase, its end, later phases, their results."""
    after = [one for step, one in saved(path.parent) if step > _step_in(path)]
    final = path.with_name("final.ckpt")
    numbered = [(folder.name.partition("-")[0], folder) for folder in path.parents[2].iterdir()]
    phases = [folder for number, folder in numbered if number.isdigit() and int(number) > phase_index(path)]
    patterns = [] if result_before(path) else ["result.json", "accuracy.png"]
    if any(folder.name.partition("-")[2] == "search" for folder in phases):
        patterns += ["search.json", "search.csv", "search.png"]
    found = [file for pattern in patterns for file in path.parents[3].glob(pattern)]
    return [*sorted(after), *([final] if final.exists() else []), *sorted(phases), *sorted(found)]


def result_before(path: Path) -> Path | None:
    """The `result.json` that the last phase before that of a checkpoint wrote into its folder; None where none did."""
    own = path.parents[2].glob("*/result.json")
    before = [file for file in own if int(file.parent.name.partition("-")[0]) < phase_index(path)]
    return max(before, default=None)


def delete(paths: Sequence[Path]) -> None:
    """Delete files and folders.

    Raises:
        UserError: the system refuses.
    """
    for path in paths:
        with writing(path, "resume"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def written(path: Path) -> dict[str, Any]:
    """The entries of a checkpoint that is whole, tensors not read; of a DeepSpeed folder those of its first process.

    Raises:
        UserError: it is broken.
    """
    reason = flaw(path, _step_in(path))
    if reason is not None:
        raise UserError(f"resume: {str(path)!r} is broken ({reason})")
    return _entries(path)


def phase_index(path: Path) -> int:
    """Place, in its run, of the phase that a named checkpoint belongs to: `phases/NN-name/checkpoints/...`."""
    return int(path.parents[1].name.partition("-")[0])


def _step_in(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[2])


def prune(folder: Path, step: int, keep: int) -> None:
    """Keep the `keep` newest checkpoints up to `step`, the one just written (-1: all).

    Later ones were left behind when the run was continued from an earlier checkpoint, or found broken.
    """
    past = [entry for entry in saved(folder) if entry[0] <= step]
    later = [entry for entry in saved(folder) if entry[0] > step]
    for _, path in [*later, *(past[keep:] if keep > 0 else [])]:
        # Hidden first: killed in the middle, a folder must not look like a checkpoint.
        hidden = path.with_name(f".old-{path.name}")
        os.replace(path, hidden)
        _delete(hidden)


def clean(folder: Path) -> None:
    """Delete what a killed process left half written or half deleted; the run's lock keeps other writers away."""
    for path in folder.glob(".*"):
        _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def newest_whole(folder: Path, key: str = "resume") -> tuple[Path | None, int]:
    """The newest checkpoint of `folder` that is whole, and its number of updates; (None, 0) if there is none at all.

    Everything is read and compared with its checksums, which torch does not do: on several processes let one call
    this and tell the others.

    Raises:
        UserError: there are checkpoints and all are broken.
    """
    found = saved(folder)
    for step, path in found:
        reason = flaw(path, step)
        if reason is None:
            return path, step
        if global_rank() == 0:  # processes that Lightning started each look for themselves
            warnings.warn(f"{key}: {path} is broken and left out ({reason})", stacklevel=2)
    if found:
        raise UserError(f"{key}: all checkpoints in {str(folder)!r} are broken; remove them to start the phase again")
    return None, 0


def handed_on(final: Path, key: str = "ckpt") -> Path:
    """What a phase handed on: `final`, or where that is damaged the last checkpoint beside it, which holds the same.

    Raises:
        UserError: that is damaged, too; it names the newest whole one, from which the phase can be done again.
    """
    reason = flaw(final)
    if reason is None:
        return final
    found = saved(final.parent)
    whole = next((path for step, path in found if flaw(path, step) is None), None)
    if whole is None or whole != found[0][1]:
        advice = "" if whole is None else f"; resume={whole} does the rest of its phase again"
        raise UserError(f"{key}: {str(final)!r} is damaged: {reason}{advice}")
    if global_rank() == 0:
        warnings.warn(f"{key}: {final} is damaged ({reason}); {whole.name} beside it holds the same", stacklevel=2)
    return whole


def flaw(path: Path, step: int | None = None) -> str | None:
    """What is wrong with a checkpoint, None if nothing is: unreadable, another checksum, another `step` inside."""
    try:
        for file in sorted(path.rglob("*.pt")) if path.is_dir() else [path]:
            if (bad := damage(file)) is not None:
                return bad
        inside = int(_entries(path)["global_step"])
    except Exception as error:  # torch.load raises many kinds for a broken file
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return None if step is None or inside == step else f"it holds step {inside}"


def _entries(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return entries(path)
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return found
