"""A whole study on two processes, killed and resumed, as W&B shows it: every promised metric, one run."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.launch.wandb_logger import FLUSH_SECONDS

from .wandb_records import Attempt, attempts

CLOSED = "http://127.0.0.1:9"
STUDY = (
    "recipe=quickstart",
    "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}",
    "select.margin=0.02", "select.batch_size=4", "data.train_subset=256", "train.warmup_epochs=1",
    "trainer.max_epochs=3", "trainer.log_every_n_steps=1", "trainer.devices=2", "trainer.accelerator=cpu",
    "checkpoint.every_n_steps=1", "data.batch_size=16", "logger=[csv, wandb]", "run=a", "resume=auto",
)  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def kill(process: Any) -> None:
    """SIGKILL everything, W&B's service too, once that has had the time to write down what was logged."""
    for pid in [process.pid, *process.descendants()]:
        with contextlib.suppress(OSError):
            if b"wandb-core" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGSTOP)
    time.sleep(FLUSH_SECONDS + 2)
    process.kill()


@pytest.mark.slow
def test_a_killed_and_resumed_study_is_one_run(processes: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = ("python", "-m", "lightning_tas.fit", *STUDY, f"output_dir={tmp_path / 'runs'}")
    env = {"HOME": str(home), "WANDB_BASE_URL": CLOSED, "WANDB_MODE": "online"}
    folder = tmp_path / "runs" / "quickstart" / "a"

    first = processes.command(*command, env=env)
    end = time.monotonic() + 300
    while not (folder / "metrics.csv").exists() or len(rows(folder / "metrics.csv")) < 4:
        assert time.monotonic() < end and first.status is None, first.report()
        time.sleep(0.05)
    kill(first)
    seen = len(rows(folder / "metrics.csv"))
    second = processes.command(*command, env=env)
    processes.wait([second], timeout=300)

    for process in (first, second):
        said = process.stdout + process.stderr
        assert said.count("does not answer") == 1, said
        assert "wandb:" not in said.replace(f"wandb: {CLOSED} does not answer", ""), "nothing else of W&B's own"
    assert [path.name for path in (tmp_path / "runs" / "quickstart").iterdir()] == ["a"]
    found = attempts(folder)
    assert len(found) == 2, "two processes, one folder for each attempt"
    assert len({attempt.run["run_id"] for attempt in found}) == 1
    check_training(folder, found, seen)
    check_rest(folder, found)
    assert not list(home.rglob("artifacts")), "what W&B needs for a sync lies in the run folder"


def check_training(folder: Path, found: list[Attempt], seen: int) -> None:
    """Everything per step, on axes that go on."""
    metrics = rows(folder / "metrics.csv")
    logged = [row for row in metrics if row["train/loss"]]
    total = json.loads((folder / "study.json").read_text())["phases"][1]["outputs"]["steps"]
    assert [int(row["step"]) for row in logged] == list(range(total))
    keys = ("train/loss", "train/lr", "train/params", "train/grad_norm")
    resumed = found[1].column("train/step")
    assert 0 < resumed[0] <= seen and resumed == list(range(resumed[0], total))
    assert found[0].column("train/step") == list(range(len(found[0].column("train/step"))))
    for attempt in found:
        steps = [row for row in attempt.rows if "train/step" in row]
        for row in steps:
            expected = logged[row["train/step"]]
            assert {key: row[key] for key in keys} == {key: float(expected[key]) for key in keys}
            assert row["phase"] == "supernet"
        speeds = [row for row in attempt.rows if "system/step" in row]
        assert len(speeds) >= len(steps) > 0
        for key in ("images_per_second", "data_wait_percent", "peak_memory_gib"):
            assert all(row[f"system/{key}"] >= 0 for row in speeds)
    counters = [row["_step"] for attempt in found for row in attempt.rows]
    assert counters == sorted(set(counters))


def check_rest(folder: Path, found: list[Attempt]) -> None:
    """Selection, validation, results."""
    result = json.loads((folder / "result.json").read_text())["architectures"]
    labels = [network["label"] for network in result]
    first, second = found
    chosen = next(row for row in first.rows if "select/preferred.path" in row)
    assert [line["network"] for line in first.table(chosen, "select/preferred")] == labels
    assert "select/allocation.path" in chosen
    assert len(first.artifacts("selection")) == 1 and len(second.artifacts("result")) == 1
    validated = [row for row in second.rows if "val/networks_table.path" in row][-1]
    lines = second.table(validated, "val/networks_table")
    assert [(line["network"], line["params"]) for line in lines] == [(n["label"], n["params"]) for n in result]
    assert [line["top1"] for line in lines] == [validated[f"val/{label}/top1"] for label in labels]
    assert {"val/networks", "result/networks"} <= set(second.charts)
    final = next(row for row in second.rows if "result/networks_table.path" in row)
    lines = second.table(final, "result/networks_table")
    assert [(n["label"], n["macs"], n["metrics"]["top1"]) for n in result] == [
        (line["network"], line["macs"], line["top1"]) for line in lines
    ]
    assert second.config["sampler"]["name"] == "balanced"
