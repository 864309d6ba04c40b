"""`resume=CHECKPOINT`: a run goes back to one of its checkpoints, and what came after it is deleted and done again.

All is checked first; then `study.json` says where the run goes back to; then the rest is deleted. A process that is
killed in between leaves a study that says so, and the next start of the run completes the deletion.
"""

from __future__ import annotations

from pathlib import Path

from lightning_tas.commands import build, per_phase
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.data import TASDataModule
from lightning_tas.errors import UserError
from lightning_tas.launch import checkpoints
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.launch.strategies import unused_semantics
from lightning_tas.launch.study import Study, phase_labels
from lightning_tas.training.module import check_continued

_KINDS = {"supernet": "supernet", "retrain": "network"}


def check(config: Config, study: Study, named: Path, known: TASDataModule | None = None) -> None:
    """Refuse a checkpoint that this run, on so many processes and with these data, cannot go on from.

    known: data that are open already.

    Raises:
        UserError: with the reason; everything is untouched then.
    """
    index, labels = checkpoints.phase_index(named), phase_labels(config.phases)
    label = dict(enumerate(labels)).get(index)
    if label is None or named.parents[1].name != f"{index:02d}-{label}":
        raise UserError(f"resume: {config.resume!r} is of no phase of this run; they are {labels}")
    before = study.back_to
    if before is not None and _place(named) > _place(before):
        raise UserError(
            f"resume: {config.resume!r} is of what this run was told to forget: it goes back to {str(before)!r}; "
            f"resume={study.path.parent} completes that"
        )
    written = checkpoints.written(named)
    settings = per_phase.configs(config)[label]
    kind, unused = _KINDS[per_phase.kind(label)], unused_semantics(settings.train, settings.trainer.strategy)
    check_continued(written, kind, unused, build.global_batch(settings))
    data = build.data(settings, known)
    trained_on = written.get(type(data).__qualname__)
    if trained_on is not None:
        data.load_state_dict(trained_on)


def delete(study: Study) -> None:
    """Delete what came after the checkpoint that the study goes back to, as far as it is still there.

    `result.json` is again that of the phase that measured before, from which a retraining takes its network.
    """
    assert study.back_to is not None
    before = checkpoints.result_before(study.back_to)
    if before is not None:
        write_json(study.path.with_name(before.name), read_json(before))
    checkpoints.delete(checkpoints.later(study.back_to))


def show(config: Config, study: Study, named: Path) -> None:
    """Say what going back would delete (`plan=true`); errors as of `check`."""
    check(config, study, named)
    say(f"resume: goes back to {named}, and deletes what its run did after it:")
    for path in checkpoints.later(named):
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        say(f"  {path} ({sum(file.stat().st_size for file in files) / 1e6:.1f} MB)")


def _place(checkpoint: Path) -> tuple[int, str]:
    """Phase and step of a checkpoint; the step has leading zeros."""
    return checkpoints.phase_index(checkpoint), checkpoint.name.partition("step=")[2]
