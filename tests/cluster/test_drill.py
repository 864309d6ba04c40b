"""Two torchrun nodes, one killed in the middle of training, both started again: bit for bit the run nobody killed.

A small form of `benchmarks/kill_drill.py`. The uninterrupted runs and the continued ones go through one pair of agents
each (see `preloaded.py`); every kill is of agents of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .compare import check_whole, compare, differences
from .drill import COMBINATIONS, Combination, Kill, kill_run, run_folder
from .progress import Progress

STRATEGIES = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
# Which node dies, at which step, how long after it: far from one another, before and after an epoch's end.
KILLS = (
    Kill("step", "one first", (0.3, 0.1, 0.0)),
    Kill("step", "one first", (0.5, 0.9, 0.9)),
    Kill("step", "one first", (0.7, 0.3, 0.0)),
    Kill("step", "one first", (0.4, 0.6, 0.9)),
)


def run_all(processes: Any, homes: dict[str, Path], file: Path) -> str:
    """Run (or continue) the study of each strategy in its home, as two nodes; what rank 0 printed."""
    free_port = sys.modules[type(processes).__module__].free_port
    studies = [
        {"home": str(home), "arguments": nodes(strategy).arguments(), "port": free_port()}
        for strategy, home in homes.items()
    ]
    for home in homes.values():
        home.mkdir(exist_ok=True)
    file.write_text(json.dumps(studies))
    job = processes.torchrun(Path(__file__).with_name("preloaded.py"), file)
    processes.wait(job, timeout=400)
    printed: str = job[0].stdout
    return printed


def nodes(strategy: str) -> Combination:
    """Two nodes without data workers."""
    return replace(COMBINATIONS["nodes-ddp-0w"], strategy=strategy)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_node_costs_nothing_but_time(processes: Any, tmp_path: Path) -> None:
    straight = {strategy: tmp_path / f"straight-{strategy}" for strategy in STRATEGIES}
    run_all(processes, straight, tmp_path / "straight.json")
    killed = {strategy: tmp_path / f"killed-{strategy}" for strategy in STRATEGIES}
    for (strategy, home), kill in zip(killed.items(), KILLS, strict=True):
        kill_run(processes, nodes(strategy), kill, home, seconds=0.0)
        progress = Progress(run_folder(home))
        assert progress.running == "supernet" and progress.step > 0, progress.doing()
    printed = run_all(processes, killed, tmp_path / "killed.json")
    assert printed.count("supernet: continuing ") == len(STRATEGIES), printed
    found = {strategy: compare(straight[strategy], killed[strategy]) for strategy in STRATEGIES}
    assert not any(found.values()), found
    for home in straight.values():
        check_whole(home)


def test_differences_are_found_to_the_last_bit() -> None:
    import torch

    a = {"x": [torch.tensor([1.0, float("nan"), 0.0]), 1.5, float("nan")], "y": {"n": 1}}
    assert not list(differences(a, {"x": [a["x"][0].clone(), 1.5, float("nan")], "y": {"n": 1}}))  # type: ignore[index]
    others = [
        {"x": [torch.tensor([1.0, float("nan"), -0.0]), 1.5, float("nan")], "y": {"n": 1}},
        {"x": [torch.tensor([1.0, float("nan"), 0.0]), 1.5 + 2**-52, float("nan")], "y": {"n": 1}},
        {"x": [torch.tensor([1.0, float("nan"), 0.0]), 1.5], "y": {"n": 1}},
        {"x": a["x"], "y": {"n": 2}},
        {"x": a["x"], "y": {"n": 1.0}},
        {"x": a["x"], "y": {"n": 1, "m": 0}},
        {"x": a["x"]},
    ]
    for other in others:
        assert len(list(differences(a, other))) == 1, other
