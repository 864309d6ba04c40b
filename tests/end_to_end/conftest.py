"""A study small enough to run whole in a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.commands.entry import main

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "recipe=quickstart",
    "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}",
    "select.margin=0.02",
    "select.batch_size=4",
    "data.train_subset=256",
    "train.warmup_epochs=1",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Run `fit` in this process: `fit("run", "key=value", ...)` gives (exit status, run folder)."""

    def run(name: str, *overrides: str) -> tuple[int, Path]:
        status = main("fit", arguments(tmp_path, name, *overrides))
        return status, tmp_path / "runs" / "quickstart" / name

    return run


def arguments(tmp_path: Path, name: str, *overrides: str) -> list[str]:
    """The command line of a tiny study; `overrides` replace what TINY says."""
    given = dict(item.split("=", 1) for item in (*TINY, f"output_dir={tmp_path / 'runs'}", f"run={name}", *overrides))
    return [f"{key}={value}" for key, value in given.items()]


def command(*arguments: str, cwd: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m lightning_tas.<command>` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def result(folder: Path) -> dict[str, Any]:
    """The run's result.json."""
    record: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return record
