"""A run of two processes looks like a run of one: one folder, one W&B run, one configuration, nothing said twice."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.launch.files import read_json, write_json

from .drill import COMBINATIONS, Combination, ranks, run_folder, start

# Bars redraw themselves; rules and blank lines are decoration.
BAR = ("it/s", "batch/s", "image/s", "?it", "%|", "\x1b")


def said(text: str) -> list[str]:
    """The lines of an output that say something."""
    lines = text.replace("\r", "\n").splitlines()
    return [line.strip() for line in lines if any(map(str.isalpha, line)) and not any(mark in line for mark in BAR)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["spawn-auto-0w", "nodes-zero2-0w"])
def test_two_processes_leave_one_of_everything(processes: Any, tmp_path: Path, name: str) -> None:
    extra = ("logger=wandb", "wandb.mode=offline", "trainer.max_epochs=1", "data.eval_batch_size=100")
    combination = replace(COMBINATIONS[name], extra=extra)
    job = start(processes, combination, tmp_path / "home", WANDB_MODE="offline")
    processes.wait(job, timeout=300)
    runs = tmp_path / "home" / "runs"
    assert [path.name for path in runs.iterdir()] == ["quickstart"]
    assert [path.name for path in (runs / "quickstart").iterdir()] == ["drill"]
    folder = run_folder(tmp_path / "home")
    assert len(list(folder.rglob("offline-run-*"))) == 1
    assert list(folder.rglob("*.wandb")) != []
    assert list(folder.glob("**/config.yaml")) == [folder / "config.yaml"]
    lines = [line for process in job for line in said(process.stdout) + said(process.stderr)]
    assert [line for line, count in Counter(lines).items() if count > 1] == [], "\n".join(lines)
    for process in job[1:]:
        assert said(process.stdout) == []
    if combination.launch == "spawn":
        measure_again(processes, combination, tmp_path / "home")


def measure_again(processes: Any, combination: Combination, home: Path) -> None:
    """Killed while it measured, the run has no fit left that would start its second process."""
    folder = run_folder(home)
    before = json.loads((folder / "result.json").read_text())["architectures"]
    study = read_json(folder / "study.json")
    assert study["phases"][-1]["name"] == "measure"
    study["phases"][-1].update(status="running", outputs={})
    write_json(folder / "study.json", study)
    (folder / "result.json").unlink()
    (again,) = start(processes, combination, home, WANDB_MODE="disabled")
    seen: set[int] = set()
    while again.status is None and len(seen) < 2:
        seen |= set(ranks(again))
        time.sleep(0.05)
    processes.wait([again], timeout=200)
    assert len(seen) == 2
    assert json.loads((folder / "result.json").read_text())["architectures"] == before
