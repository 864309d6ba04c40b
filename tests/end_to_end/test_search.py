"""Searches whole: in a study, as a command, on several processes, killed and resumed, on W&B, and what is refused."""

from __future__ import annotations

import csv
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.callbacks.search_job import SearchJob
from lightning_tas.callbacks.search_record import STATE
from lightning_tas.commands.entry import main
from lightning_tas.launch.results import comparable
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.schedule import WarmupCosine, plan

from ..cluster.launched import start
from ..launch.wandb_records import attempts
from .conftest import arguments, result

Fit = Callable[..., tuple[int, Path]]
SEARCH = (
    "phases=[supernet,measure]",
    "sampler.name=uniform",
    "search.strategy=evolution",
    "search.options={population: 4, top: 2, generations: 2, crossovers: 2, mutations: 2}",
    "limits.params=[null,20k]",
)
TRAINING_FREE = (
    "phases=[search]",
    "search.score=dss_pp",
    "search.strategy=random",
    "search.options={networks: 30}",
    "search.batch_size=4",
)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_study_with_evolution_at_its_end(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched on held-out images, measured on the test set, shown on W&B, taken on by every other command."""
    monkeypatch.setenv("HOME", str(tmp_path))
    status, run = fit("a", *SEARCH, "logger=wandb", "wandb.mode=offline", "search.racing=false", "search.top=2")
    assert status == 0
    found = json.loads((run / "search.json").read_text())
    labels = [entry["label"] for entry in result(run)["architectures"]]
    assert labels == ["best", "best-2", "smallest", "middle", "largest"]
    assert [entry["arch"] for entry in result(run)["architectures"][:2]] == [e["arch"] for e in found["networks"]]
    assert all(entry["params"] <= 20_000 for entry in found["networks"])
    assert result(run)["limits"] == {"params": [None, 20_000]}
    assert {row["accuracy.images"] for row in rows(run / "search.csv")} == {"144.0"}  # held out; the test set has 360
    assert found["evaluations"] == 12 == len(rows(run / "search.csv")) and (run / "search.png").exists()

    (attempt,) = attempts(run)
    shown = [row for row in attempt.rows if "search/acceptance" in row]
    assert [row["search/step"] for row in shown] == [0, 1, 2]
    assert [row["search/best"] for row in shown] == [row["best"] for row in found["generations"]]
    summary = {key: value for update in attempt.of("summary") for key, value in update["update"].items()}
    assert summary["search/best/id"] == found["networks"][0]["id"]
    media = {path.name.partition("_")[0] for path in attempt.folder.rglob("media/*/search/*")}
    assert {"networks", "generations", "picture"} <= media

    # The winner by its label; and another search on the same supernet.
    assert main("evaluate", [f"ckpt={run}", "arch=best"]) == 0
    assert main("export", [f"ckpt={run}", "arch=best", f"output_dir={tmp_path / 'exported'}"]) == 0
    again = [f"ckpt={run}", "search.strategy=random", "search.options={networks: 5}", "run=b"]
    assert main("search", [*again, f"output_dir={tmp_path / 'runs'}", "logger=csv"]) == 0
    other = result(tmp_path / "runs" / "quickstart" / "b")
    assert other["checkpoint_sha256"] == result(run)["checkpoint_sha256"]
    assert [entry["label"] for entry in other["architectures"]] == ["best", "best-2"]  # search.top is the run's


@pytest.mark.slow
def test_search_then_retrain_the_winner(fit: Fit) -> None:
    status, run = fit("a", *TRAINING_FREE, "phases=[search,retrain]", "trainer.max_epochs=1", "limits.params=[15k,25k]")
    assert status == 0
    (winner,) = json.loads((run / "search.json").read_text())["networks"]
    (trained,) = result(run)["architectures"]
    assert trained["arch"] == winner["arch"] and trained["metrics"]["samples"] == 360
    assert 15_000 <= trained["params"] <= 25_000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_search_resumes_to_the_same_result(processes: Any, tmp_path: Path, number: int) -> None:
    search = (*TRAINING_FREE, "search.strategy=blockwise", "search.options={population: 10, generations: 30}")
    space = "space={name: tiny, embed_dim: [16, 32], depth: [3, 4], num_heads: [1, 2], mlp_ratio: [1, 2]}"
    assert main("search", arguments(tmp_path, "whole", *search, space)) == 0
    argv = ("python", "-m", "lightning_tas.search", *arguments(tmp_path, "cut", *search, space))
    process = processes.command(*argv, fork=True)
    folder, end = tmp_path / "runs" / "quickstart" / "cut", time.monotonic() + 60
    while not (folder / STATE).exists():
        assert process.status is None and time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.3)
    process.send(number)
    ends: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130}
    assert processes.wait([process], timeout=60, check=False) == [ends.get(number, -number)]
    assert "Traceback" not in process.stderr
    assert not (folder / "search.json").exists()
    assert main("search", [f"resume={folder}"]) == 0
    whole = tmp_path / "runs" / "quickstart" / "whole"
    assert (folder / "search.csv").read_bytes() == (whole / "search.csv").read_bytes()
    assert (folder / "search.json").read_bytes() == (whole / "search.json").read_bytes()
    one, two = (comparable(result(path)) for path in (whole, folder))
    assert {**one, "command": None} == {**two, "command": None}


@pytest.mark.slow
def test_two_processes_search_as_one(fit: Fit, processes: Any, tmp_path: Path) -> None:
    """By proxies and by raced accuracy; and limits that nothing meets end both with one message."""
    status, run = fit("trained", "trainer.max_epochs=1", "phases=[supernet]", "sampler.name=uniform")
    assert status == 0
    calls = {
        "proxy": arguments(tmp_path, "NAME", *TRAINING_FREE),
        "accuracy": [
            f"ckpt={run}", "search.strategy=evolution", "search.racing_top=2", "run=NAME-accuracy",
            "search.options={population: 4, top: 2, generations: 2, crossovers: 2, mutations: 2}",
            f"output_dir={tmp_path / 'runs'}",
        ],
    }  # fmt: skip
    for kind, call in calls.items():
        assert main("search", [word.replace("NAME", "one") for word in call]) == 0
        argv = ["python", "-m", "lightning_tas.search", *(word.replace("NAME", "two") for word in call)]
        processes.wait(start(processes, [argv] * 2, per_node=2), timeout=200)
        suffix = "-accuracy" if kind == "accuracy" else ""
        one, two = (tmp_path / "runs" / "quickstart" / f"{name}{suffix}" for name in ("one", "two"))
        for file in ("search.csv", "search.json"):
            assert (one / file).read_bytes() == (two / file).read_bytes()
    argv = ["python", "-m", "lightning_tas.search", *arguments(tmp_path, "x", *TRAINING_FREE, "limits.params=[1,2]")]
    began = time.monotonic()
    both = start(processes, [argv] * 2, per_node=2)
    assert processes.wait(both, timeout=100, check=False) == [2, 2]
    assert (
        "limits.params: no network of 'tiny' has params from 1 to 2. The space reaches params from 7,018 to 46,442"
        in both[0].stderr
    )
    assert both[1].stderr == "" and time.monotonic() - began < 60 and not (tmp_path / "runs/quickstart/x").exists()


@pytest.mark.parametrize("name", ["search", "fit"])
def test_a_stopped_search_names_the_command_that_was_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that command, as it stands in the message, continues the run."""
    with monkeypatch.context() as patch:
        patch.setattr(SearchJob, "_generation", stopped_in_the_second(SearchJob._generation))
        assert main(name, arguments(tmp_path, "a", *TRAINING_FREE, "search.options={networks: 20, batch: 5}")) == 130
    folder = tmp_path / "runs" / "quickstart" / "a"
    said = capsys.readouterr().err
    assert (
        said
        == f"lightning_tas.{name}: stopped by Ctrl-C; python -m lightning_tas.{name} resume={folder} continues it\n"
    )
    assert (folder / STATE).exists() and not (folder / "search.json").exists()
    assert main(name, [word for word in said.split() if word.startswith("resume=")]) == 0
    assert len(rows(folder / "search.csv")) == 20 == json.loads((folder / "search.json").read_text())["evaluations"]


def stopped_in_the_second(generation: Callable[..., None]) -> Callable[..., None]:
    """A generation of a search that Ctrl-C ends when the first one is done."""

    def one(job: SearchJob, bar: Any) -> None:
        if job.strategy.stats:
            raise KeyboardInterrupt
        generation(job, bar)

    return one


def test_searches_inside_training_are_told_apart(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    """Each begins on a line of its own below the bar, with its epoch; rows of metrics.csv keep all of them."""
    search = ("search.strategy=random", "search.options={networks: 3}", "search.score=snip", "search.batch_size=2")
    inside = ("phases=[supernet]", "sampler.name=uniform", "trainer.limit_train_batches=2", *search)
    status, run = fit("each", *inside, "search.when=every_n_epochs")
    lines = capsys.readouterr().out.split("\n")
    assert status == 0
    for epoch in range(2):
        at = lines.index(f"search after epoch {epoch}:")
        assert lines[at + 1].split()[:2] == ["generation", "evaluations"]
    found = [row for row in rows(run / "metrics.csv") if row["search/best"]]
    assert [row["epoch"] for row in found] == ["0", "1"]
    assert float(found[-1]["search/best"]) == json.loads((run / "search.json").read_text())["networks"][0]["score"]
    status, _ = fit("first", *inside, "search.when=fit_start", "trainer.max_epochs=1")
    assert status == 0 and "search before training:" in capsys.readouterr().out.split("\n")


def test_limits_that_nothing_meets_end_in_seconds(fit: Fit, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    began = time.monotonic()
    status, run = fit("a", *TRAINING_FREE, "limits.params=[20k,1M]", "limits.macs=[null,100k]")
    err = capsys.readouterr().err
    assert status == 2 and time.monotonic() - began < 10 and not run.exists()
    assert (
        "limits.params" in err
        and "limits.macs" in err
        and "The space reaches params from 7,018 to 46,442 and macs" in err
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["phases=[search]"], "search.strategy: the phase 'search' needs one"),
        ([*TRAINING_FREE, "search.score=accuracy"], "search.score: 'accuracy' is of trained weights: give ckpt=RUN"),
        ([*SEARCH, "data.search_val=0"], "data.search_val: 0 holds no images out"),
        ([*TRAINING_FREE, "search.score=trained", "data.search_val=0"], "data.search_val: 0 holds no images out"),
        (
            [*SEARCH, "limits.latency=[null,0.0001]", "limits.latency_repeats=2", "limits.latency_error=100"],
            "limits.latency",
        ),
        ([*SEARCH, "search.score=trained"], "search.score: 'trained' trains networks of its own"),
        ([*TRAINING_FREE, "phases=[search,supernet]"], "phases run in the order"),
    ],
)
def test_refusals(fit: Fit, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str) -> None:
    status, run = fit("a", *overrides)
    assert status == 2 and message in capsys.readouterr().err and not run.exists()


@pytest.mark.slow
def test_tiny_spaces_are_exhausted(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    """Each network once, then the end, and it is said; also where there is only one."""
    one = "space={name: one, embed_dim: [16], depth: [1], num_heads: [1], mlp_ratio: [1]}"
    for name, space, size in (("tiny", "", 40), ("one", one, 1)):
        for strategy in ("random", "blockwise", "evolution"):
            overrides = [
                *TRAINING_FREE,
                f"search.strategy={strategy}",
                "search.options=null",
                *([space] if space else []),
            ]
            status, run = fit(f"{name}-{strategy}", *overrides)
            assert status == 0
            ids = [row["id"] for row in rows(run / "search.csv")]
            assert len(ids) == len(set(ids)) == size
            assert f"exhausted: all {size} networks within the limits are evaluated" in capsys.readouterr().out


@pytest.mark.slow
def test_networks_may_be_judged_by_training_them(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the schedule that a training of this length has: 3 epochs of 4 steps warm up for 0.6 epochs."""
    rates: list[list[float]] = []

    def spy(train: TrainConfig, peak: float, total_steps: int, steps_per_epoch: int) -> WarmupCosine:
        curve = plan(train, peak, total_steps, steps_per_epoch)
        rates.append([curve.lr(step) / peak for step in range(total_steps)])
        return curve

    monkeypatch.setattr("lightning_tas.training.module.plan", spy)
    overrides = (
        "search.score=trained",
        "search.train_epochs=3",
        "train.warmup_epochs=20",
        "data.batch_size=32",
        "search.strategy=random",
        "search.options={networks: 2}",
        "data.train_subset=128",
    )
    status, run = fit("a", *TRAINING_FREE, *overrides)
    assert status == 0
    scored = rows(run / "search.csv")
    assert [row["trained.images"] for row in scored] == ["144.0"] * 2
    assert len(rates) == 2 and rates[0] == rates[1] and len(rates[0]) == 12
    assert rates[0][:5] == pytest.approx([0, 0.417, 0.833, 0.854, 0.75], abs=0.003) and rates[0][-1] < 0.03
    best = max(scored, key=lambda row: float(row["trained"]))
    assert result(run)["architectures"][0]["id"] == best["id"]
