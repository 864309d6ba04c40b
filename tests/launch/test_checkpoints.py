"""When checkpoints are written, what is kept, and that a broken one is never gone on from."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_tas.commands.config import CheckpointConfig
from lightning_tas.errors import UserError
from lightning_tas.launch.checkpoints import (
    RunCheckpoints,
    later,
    named_checkpoint,
    newest_whole,
    written,
)
from lightning_tas.launch.results import find_checkpoint

sys.path.append(str(Path(__file__).parent))
from tiny import Module, fit, names, prepare

Flip = Callable[[Path], None]


class Killed(RuntimeError):
    pass


class Kill(pl.Callback):
    """Dies in the named hook of update `step`."""

    def __init__(self, hook: str, step: int) -> None:
        setattr(self, hook, self._die)
        self.step = step

    def _die(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def at(epoch: int, step: int) -> str:
    return f"epoch={epoch:04d}-step={step:07d}.ckpt"


# --- when -------------------------------------------------------------------------------------------------------------


def test_epochs_and_steps_are_saved_once_and_the_newest_kept(tmp_path: Path) -> None:
    fit(tmp_path / "few", every_n_steps=3, keep_last=2)
    assert names(tmp_path / "few") == [at(2, 9), at(2, 12)]
    fit(tmp_path / "all", every_n_steps=2, every_n_epochs=2, keep_last=-1)
    # Updates 4, 8 and 12 end epochs; the last epoch is saved although it is not the second of two.
    assert names(tmp_path / "all") == [at(0, 2), at(0, 4), at(1, 6), at(1, 8), at(2, 10), at(2, 12)]
    fit(tmp_path / "epochs", every_n_epochs=2, keep_last=-1)
    assert names(tmp_path / "epochs") == [at(1, 8), at(2, 12)]
    fit(tmp_path / "steps", max_steps=6, every_n_steps=6, max_epochs=-1, keep_last=-1)
    assert names(tmp_path / "steps") == [at(0, 4), at(1, 6)]


def test_an_accumulated_step_is_saved_when_it_is_complete(tmp_path: Path) -> None:
    class Spy(pl.Callback):
        def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            seen.append((trainer.global_step, progress.ready))

    seen: list[tuple[int, int]] = []
    fit(tmp_path, Spy(), accumulate_grad_batches=3, every_n_steps=1, keep_last=-1, max_epochs=1)
    # Batches 1 to 3 make the first update; batch 4 ends the epoch and makes the second one.
    assert seen == [(1, 3), (2, 4)]


@pytest.mark.parametrize(
    "limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 12}, {"max_epochs": 3, "max_steps": 11}]
)
def test_going_on_from_any_checkpoint_is_exact(tmp_path: Path, limits: dict[str, int]) -> None:
    """By epochs and by `max_steps`; with `max_steps` Lightning itself counts an epoch too many from an epoch's end."""
    whole = fit(tmp_path / "whole", every_n_steps=1, keep_last=-1, **limits)[1]
    end = max(whole.seen) + 1
    assert whole.validated == [step for step in (4, 8, 12) if step <= end]
    for step in (3, 4, 5, 8, end):
        resumed = fit(tmp_path / "rest", resume=tmp_path / "whole" / at((step - 1) // 4, step), **limits)[1]
        assert resumed.seen == {key: value for key, value in whole.seen.items() if key >= step}, step
        assert resumed.validated == [n for n in whole.validated if n > step]
        for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(a, b), step


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end", "on_train_batch_end"])
def test_killed_around_the_validation_the_epoch_is_measured_once(tmp_path: Path, hook: str) -> None:
    with pytest.raises(Killed):
        fit(tmp_path, Kill(hook, 8), every_n_steps=2)
    newest, step = newest_whole(tmp_path)
    assert step == 6
    assert fit(tmp_path, resume=newest)[1].validated == [8, 12]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_an_older_one_goes_only_when_the_next_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., Any] = torch.save

    def full(content: Any, file: Any) -> None:
        write(content, file)
        if content["global_step"] == 9:
            file.truncate(1000)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"step=0000009.ckpt' cannot be written .No space left"):
        fit(tmp_path, every_n_steps=3, keep_last=1)
    assert names(tmp_path) == [at(1, 8)]
    assert newest_whole(tmp_path) == (tmp_path / at(1, 8), 8)


def test_the_next_start_tidies_up_what_was_left_half_written(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    (tmp_path / ".epoch=0001-step=0000008-x1.ckpt").write_bytes(b"half")
    (tmp_path / f".{at(1, 8)}.partial" / "checkpoint").mkdir(parents=True)
    (tmp_path / "final.ckpt").write_bytes(b"not ours to judge")
    fit(tmp_path, resume=newest_whole(tmp_path)[0], max_epochs=2)
    assert names(tmp_path) == [at(0, 4), at(1, 8), "final.ckpt"]


def test_going_on_from_an_earlier_one_leaves_the_later_ones_behind(tmp_path: Path) -> None:
    fit(tmp_path, every_n_steps=2, keep_last=3)
    assert names(tmp_path) == [at(1, 8), at(2, 10), at(2, 12)]
    fit(tmp_path, resume=tmp_path / at(1, 8), keep_last=3, max_steps=9)
    assert names(tmp_path) == [at(1, 8), at(2, 9)]


def test_settings_that_cannot_be_done() -> None:
    for key, value in (("every_n_epochs", 0), ("every_n_steps", 0), ("keep_last", 0), ("keep_last", -2)):
        with pytest.raises(UserError, match=rf"checkpoint\.{key}: {value} is not valid; valid:"):
            CheckpointConfig(**{key: value}).check()
    CheckpointConfig(every_n_steps=None, keep_last=-1).check()


# --- broken ones ------------------------------------------------------------------------------------------------------


BREAK: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-300]),
    "half": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "empty": lambda path: path.write_bytes(b""),
    "of another step": lambda path: shutil.copy(path.parent / at(0, 2), path),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fit(folder, every_n_steps=2, keep_last=-1, max_epochs=1)
    return folder


@pytest.mark.parametrize("how", [*BREAK, "flipped"])
def test_a_broken_one_is_skipped_with_one_warning(saved: Path, tmp_path: Path, flip: Flip, how: str) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    assert newest_whole(folder) == (folder / at(0, 4), 4)
    BREAK.get(how, flip)(folder / at(0, 4))
    if how == "flipped":  # torch notices nothing
        assert torch.load(folder / at(0, 4), weights_only=True)["global_step"] == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert newest_whole(folder) == (folder / at(0, 2), 2)
    assert [str(warning.message).split(" (")[0] for warning in caught] == [
        f"resume: {folder / at(0, 4)} is broken and left out"
    ]
    (folder / at(0, 2)).write_bytes(b"")
    with warnings.catch_warnings(), pytest.raises(UserError, match=r"all checkpoints in .* are broken; remove them"):
        warnings.simplefilter("ignore")
        newest_whole(folder)


def test_no_checkpoint_is_no_mistake(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) == newest_whole(tmp_path / "missing") == (None, 0)
    (tmp_path / "final.ckpt").write_bytes(b"")
    assert newest_whole(tmp_path) == (None, 0)


def test_ckpt_of_a_stopped_run_is_its_newest_whole_one(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "phases" / "00-supernet" / "checkpoints"))
    assert find_checkpoint(tmp_path) == folder / at(0, 4)
    (folder / at(0, 4)).write_bytes(b"")
    with pytest.warns(UserWarning, match="ckpt: .* is broken and left out"):
        assert find_checkpoint(tmp_path) == folder / at(0, 2)
    assert find_checkpoint(folder / at(0, 2)) == folder / at(0, 2)
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(tmp_path / "missing")
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_checkpoint(folder / "..")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run whose second phase has checkpoints, and whose third one has begun."""
    shutil.copytree(saved, tmp_path / "phases" / "01-supernet" / "checkpoints")
    shutil.copytree(saved, tmp_path / "phases" / "03-retrain" / "checkpoints")
    (tmp_path / "study.json").write_text("{}")
    return tmp_path


def test_what_resume_names(run: Path) -> None:
    folder = run / "phases" / "01-supernet" / "checkpoints"
    assert named_checkpoint(None) is named_checkpoint("auto") is named_checkpoint(str(run)) is None
    assert named_checkpoint(str(folder / at(0, 2))) == (folder / at(0, 2)).resolve()
    elsewhere = (run / at(0, 2), folder.parent / at(0, 2))  # whole, but not where this run would look for them
    for path in elsewhere:
        shutil.copy(folder / at(0, 2), path)
    for wrong in (folder / "final.ckpt", folder / at(0, 3), folder, *elsewhere):
        with pytest.raises(UserError, match=rf"{wrong.name}' is not a checkpoint to go on from"):
            named_checkpoint(str(wrong))


def test_what_came_after_a_named_one(run: Path, flip: Flip) -> None:
    folder = run / "phases" / "01-supernet" / "checkpoints"
    (folder / "final.ckpt").write_bytes(b"")
    found = later(folder / at(0, 2))
    assert found == [folder / at(0, 4), folder / "final.ckpt", run / "phases" / "03-retrain"]
    assert written(folder / at(0, 2))["global_step"] == 2
    flip(folder / at(0, 2))
    with pytest.raises(UserError, match=r"step=0000002.ckpt' is broken \("):
        written(folder / at(0, 2))


def test_lightning_knows_it_as_its_checkpoint_callback(tmp_path: Path) -> None:
    _, trainer, _ = prepare(tmp_path)
    assert isinstance(trainer.checkpoint_callback, RunCheckpoints) and len(trainer.checkpoint_callbacks) == 1
    assert isinstance(Module(), pl.LightningModule)
