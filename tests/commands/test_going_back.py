"""`resume=CHECKPOINT`: checked before anything changes, and completed by the next start wherever it was killed."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.commands import fit
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config
from lightning_tas.commands.entry import main
from lightning_tas.data import TASDataModule
from lightning_tas.launch.checkpoints import named_checkpoint
from lightning_tas.launch.files import read_json
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.launch.study import FINISHED

PHASES = ["select", "supernet", "measure", "retrain"]
CHECKPOINTS = "phases/01-supernet/checkpoints"


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two trainings, with every checkpoint of both."""
    given = (f"phases=[{','.join(PHASES)}]", "checkpoint.every_n_steps=1", "checkpoint.keep_last=-1")
    folder = tmp_path_factory.mktemp("finished")
    assert main("fit", ["recipe=quickstart", "smoke=true", f"output_dir={folder}", "run=a", *given]) == 0
    return folder / "quickstart" / "a"


def named(run: Path) -> Path:
    return sorted((run / CHECKPOINTS).glob("epoch=*.ckpt"))[0]


def state(run: Path) -> tuple[list[str], list[Any]]:
    """Checkpoints and phases that are there, and what the study says."""
    files = sorted(str(path.relative_to(run)) for path in run.glob("phases/*/*/*"))
    record = read_json(run / "study.json")
    return files, [(phase["status"], bool(phase["outputs"])) for phase in record["phases"]] + [record.get("back_to")]


def start(run: Path, resume: str) -> None:
    """What `fit` does before its first phase."""
    config, data = settings(run)
    config = replace(config, resume=resume)
    fit._go_back(config, fit._study(config, RunFolder(run), write=True), data)


@functools.cache
def settings(run: Path) -> tuple[Config, TASDataModule]:
    """Of a run, and its data."""
    config = config_from("fit", [f"config={run}/config.yaml"])
    return config, fit._data(config)


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Dies instead of the `number`-th change of a name on the disk."""
    calls: list[str] = []

    def wrap(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            if len(calls) == number:
                raise Killed
            calls.append(name)
            return do(*args, **options)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir", "remove"):
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def test_killed_at_any_moment_the_next_start_completes_it(finished: Path, tmp_path: Path) -> None:
    expected = Path(shutil.copytree(finished, tmp_path / "expected"))
    before = state(expected)
    start(expected, str(named(expected)))
    after = state(expected)
    assert after[1] == [(FINISHED, True), *[("pending", False)] * 3, None]
    assert after[0] == [f"{CHECKPOINTS}/{named(expected).name}"] and len(before[0]) > 6
    number, seen = 0, set()
    while True:
        run = Path(shutil.copytree(finished, tmp_path / "killed"))
        try:
            with killed_at(number):
                start(run, str(named(run)))
            break
        except Killed:
            files, said = state(run)
            # Whatever is gone, the study does not say that it is there.
            assert (files, said) == before or said[:-1] == after[1][:-1], number
            seen.add(said[-1])
            start(run, "auto")
            assert state(run) in (before, after), number
            if said != before[1]:
                assert state(run) == after, number
        shutil.rmtree(run)
        number += 1
    assert number > 8 and len(seen) == 2


def test_nothing_changes_before_all_is_checked(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    flip: Callable[[Path], None],
) -> None:  # fmt: skip
    run = Path(shutil.copytree(finished, tmp_path / "a"))
    before = state(run)

    def refused(*argv: str) -> str:
        capsys.readouterr()
        assert main("fit", [f"resume={named(run)}", *argv]) == 2
        assert state(run) == before
        return capsys.readouterr().err.splitlines()[-1]

    assert "train.lr is 5.0, in the run " in refused("train.lr=5")
    with monkeypatch.context() as patch:  # as if started on two processes
        patch.setattr("lightning_tas.commands.build.world_size", lambda settings: 2)
        assert "start as many processes as before" in refused()
    with monkeypatch.context() as patch:
        patch.setattr("lightning_tas.data.module.TASDataModule.class_names", ["a", "b"])
        assert "the checkpoint was trained on 10 classes" in refused("data.class_names=compare")
    kept = named(run).read_bytes()
    flip(named(run))
    assert "is broken (the checksum of " in refused()
    named(run).write_bytes(kept)
    capsys.readouterr()
    assert main("fit", [f"resume={named(run)}", "plan=true"]) == 0
    assert state(run) == before
    told = capsys.readouterr().out.partition("phase 1/4")[0]
    assert f"goes back to {named(run)}, and deletes" in told
    gone = [line.split(" (")[0].strip() for line in told.splitlines() if line.startswith("  /") and "MB)" in line]
    start(run, str(named(run)))
    assert gone and not any(Path(path).exists() for path in gone)
    assert {path.name for path in map(Path, gone)} >= {"03-retrain", "final.ckpt"}


def test_a_later_one_than_where_it_goes_back_to_is_refused(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "a"))
    with pytest.raises(Killed), killed_at(1):
        start(run, str(named(run)))
    newest = sorted((run / "phases/03-retrain/checkpoints").glob("epoch=*.ckpt"))[-1]
    assert named_checkpoint(str(newest)) is not None
    with pytest.raises(ValueError, match=r"was told to forget: it goes back to .*; resume=.* completes that"):
        start(run, str(newest))
    start(run, str(run))
    assert state(run)[1][-1] is None and not newest.exists()


def test_back_into_a_retraining_its_network_is_still_known(finished: Path, tmp_path: Path) -> None:
    """It is the best that was measured, and `result.json` is of the retraining by then."""
    run = Path(shutil.copytree(finished, tmp_path / "quickstart" / "a"))
    before = [entry["arch"] for entry in read_json(run / "result.json")["architectures"]]
    first = sorted((run / "phases/03-retrain/checkpoints").glob("epoch=*.ckpt"))[0]
    start(run, str(first))
    assert read_json(run / "result.json") == read_json(run / "phases/02-measure/result.json")
    assert main("fit", [f"resume={run}"]) == 0
    assert [entry["arch"] for entry in read_json(run / "result.json")["architectures"]] == before
    start(run, str(named(run)))
    assert not (run / "result.json").exists(), "nothing is measured yet"
