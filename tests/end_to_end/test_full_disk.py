"""A disk that is full at some moment of a run: one message, status 2, and everything written before is still there."""

from __future__ import annotations

import contextlib
import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.analysis.plots import accuracy_over_params, save_figure
from lightning_tas.callbacks import search_record
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json, read_torch, write_json, write_text
from lightning_tas.launch.metrics import CsvRows
from lightning_tas.launch.run_folder import RunFolder

Fit = Callable[..., tuple[int, Path]]
FULL = OSError(errno.ENOSPC, "No space left on device")


def _full(*_: Any, **__: Any) -> None:
    raise FULL


def _append(path: Path) -> None:
    CsvRows(path, "supernet", None).add({"train/loss": 1.0}, 0, 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "new"),
        lambda path: write_json(path, {}),
        lambda path: save_figure(accuracy_over_params(["a"], [1], {"s": [1.0]}, 1), path.with_suffix(".png")),
        lambda path: _append(path),
    ],
)
def test_every_writer_names_the_file_that_it_could_not_write(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "file.csv", "phase,epoch,step,train/loss\nsupernet,0,0,2.0\n")
    monkeypatch.setattr("lightning_tas.launch.files.os.fsync", _full)
    monkeypatch.setattr("lightning_tas.launch.files.os.replace", _full)
    with pytest.raises(UserError, match=r"file\.\w+' cannot be written \(No space left"):
        write(tmp_path / "file.csv")
    assert (tmp_path / "file.csv").read_text() == "phase,epoch,step,train/loss\nsupernet,0,0,2.0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file.csv"]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write more into one file, as it does under `ulimit -f` (Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# No phase before it: as AutoFormer's recipes, where all of weeks of training is one unfinished phase.
STUDY = ("phases=[supernet,measure]", "sampler.name=uniform", "data.batch_size=64", "resume=auto")


def test_a_run_that_could_not_write_a_checkpoint_keeps_what_it_has(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(20_000):
        status, folder = fit("run", *STUDY)
    assert status == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("epoch=0000-step=0000004.ckpt' cannot be written (File too large)") and "checkpoint: " in said
    kept = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "study.json", "metrics.csv"} <= kept, "the first phase had begun"
    save, calls = torch.save, []

    def fills_up(content: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise FULL
        save(content, target)

    monkeypatch.setattr(torch, "save", fills_up)
    assert fit("run", *STUDY)[0] == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert [path.name for path in folder.glob("phases/*/checkpoints/*")] == ["epoch=0000-step=0000004.ckpt"]
    monkeypatch.setattr(torch, "save", save)
    assert fit("run", *STUDY)[0] == 0
    assert "step 4" in capsys.readouterr().out


def search(folder: Path, name: str) -> tuple[int, Path]:
    given = ("recipe=t_razor_tiny", "smoke=true", f"output_dir={folder}", f"run={name}", "resume=auto")
    status = main("search", [*given, "search.strategy=evolution", "search.score=params", SMALL])
    return status, folder / "t_razor_tiny" / name


SMALL = "search.options={population: 4, generations: 3, crossovers: 2, mutations: 2, top: 3}"


@pytest.mark.parametrize("how", ["full", "gone"])
def test_a_search_that_cannot_write_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """On a full disk it goes on later from the state before; where its folder is gone, no part of it comes back."""
    save, calls = torch.save, []

    def fails(content: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2 and how == "full":
            target.write(b"half")
            try:
                raise FULL
            except OSError:  # as torch's writer ends
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904
        save(content, target)

    def gone(*arguments: Any) -> None:
        if how == "gone":
            shutil.rmtree(tmp_path / "t_razor_tiny" / "run")
        save_state(*arguments)

    save_state = search_record.save_state
    monkeypatch.setattr(search_record, "save_state", gone)
    monkeypatch.setattr(search_record, "save_figure", lambda *_: None)
    monkeypatch.setattr(torch, "save", fails)
    status, folder = search(tmp_path, "run")
    assert status == 2
    err = capsys.readouterr().err
    reason = {"full": "No space left on device", "gone": "its folder does not exist"}[how]
    assert err.splitlines()[-1].endswith(f"search-state.pt' cannot be written ({reason})")
    assert "Traceback" not in err and "disk full" not in err
    if how == "gone":
        assert not folder.exists()
        return
    kept = read_torch(folder / search_record.STATE)["strategy"]
    monkeypatch.setattr(torch, "save", save)
    assert search(tmp_path, "run")[0] == 0
    assert search(tmp_path, "straight")[0] == 0
    found, straight = (read_json(tmp_path / "t_razor_tiny" / name / "search.json") for name in ("run", "straight"))
    assert found == straight and kept


def test_only_a_folder_without_work_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "recipe" / "a")
    made = folder.missing()
    folder.create()
    (folder.path / "phases" / "00-supernet" / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "study.json"):
        (folder.path / name).write_text("")
    for work in ("search-state.pt", "metrics.csv", "phases/00-supernet/checkpoints/.half.ckpt", "wandb"):
        path = folder.path / work
        path.write_text("")
        before = sorted(folder.path.rglob("*"))
        folder.remove(made)
        assert sorted(folder.path.rglob("*")) == before, work
        path.unlink()
    folder.remove(made[:1])
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "recipe"]
    folder.create()
    (tmp_path / "runs" / "recipe" / "b").mkdir()
    folder.remove(made)
    assert (tmp_path / "runs" / "recipe" / "b").is_dir() and not folder.path.exists()
