"""Killed after the last checkpoint of a phase and before its end is on record: what is left of that moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightning_tas.commands.entry import main
from lightning_tas.launch.files import read_json, write_json

from .compare import compare
from .launched import fit

LEFT = (
    "phases/01-supernet/checkpoints/.final-ab_01xyz.ckpt",
    ".metrics-0a1b2c3d.csv",
    ".study-abcdefgh.json",
    ".accuracy-hgfedcba.png",
)


@pytest.mark.parametrize("final", [True, False])
def test_the_end_of_a_phase_is_the_same_again_and_nothing_is_left(
    final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = fit("run=a", "resume=auto", "data.batch_size=64", "train.ema=true", "train.ema_decay=0.9")[3:]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    monkeypatch.chdir(straight)
    assert main("fit", study) == 0
    shutil.copytree(straight, killed)
    folder = killed / "runs/quickstart/a"
    record = read_json(folder / "study.json")
    record["phases"][1].update(status="running", outputs={})
    record["phases"][2].update(status="pending", outputs={})
    write_json(folder / "study.json", record)
    for name in LEFT:
        (folder / name).write_text("half")
    if not final:
        (folder / "phases/01-supernet/checkpoints/final.ckpt").unlink()
    monkeypatch.chdir(killed)
    assert main("fit", study) == 0
    assert compare(straight, killed) == []
