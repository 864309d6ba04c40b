"""A disk that is full at some moment of a run: one message, status 2, and everything written before is still there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.analysis.plots import accuracy_over_params, save_figure
from lightning_tas.errors import UserError
from lightning_tas.launch.files import write_json, write_text
from lightning_tas.launch.metrics import CsvRows

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


def test_checkpoints_outlive_the_run_that_could_not_write_one(
    fit: Callable[..., tuple[int, Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, calls = torch.save, []

    def fills_up(content: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise FULL
        save(content, target)

    monkeypatch.setattr("lightning_tas.launch.checkpoint_io.torch.save", fills_up)
    # No phase before it: as AutoFormer's recipes, where all of weeks of training is one unfinished phase.
    study = ("phases=[supernet,measure]", "sampler.name=uniform", "data.batch_size=64", "resume=auto")
    status, folder = fit("run", *study)
    assert status == 2
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in folder.glob("phases/*/checkpoints/*")] == ["epoch=0000-step=0000004.ckpt"]
    monkeypatch.setattr("lightning_tas.launch.checkpoint_io.torch.save", save)
    assert fit("run", *study)[0] == 0
    assert "step 4" in capsys.readouterr().out
