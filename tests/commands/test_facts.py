"""What a training phase amounts to follows from the whole configuration, on any number of processes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_tas.commands import build
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.entry import main
from lightning_tas.commands.facts import Facts, facts

STUDY = (
    "recipe=quickstart", "data.batch_size=24", "data.train_subset=500", "data.repeated_aug=3", "train.lr=0.001",
    "train.lr_batch=96", "trainer.max_epochs=3", "trainer.accumulate_grad_batches=2", "trainer.accelerator=cpu",
)  # fmt: skip


def arguments(*overrides: str) -> list[str]:
    """The command line; `overrides` replace what STUDY says."""
    given = dict(item.split("=", 1) for item in (*STUDY, *overrides))
    return [f"{key}={value}" for key, value in given.items()]


def found(*overrides: str) -> Facts:
    config = config_from("fit", arguments(*overrides))
    return facts(config, build.data(config))


def test_two_processes_halve_the_epoch_and_double_batch_and_rate() -> None:
    one, two = found("trainer.devices=1"), found("trainer.devices=2")
    assert (one.global_batch, two.global_batch) == (48, 96)
    assert (one.peak_lr, two.peak_lr) == pytest.approx((0.0005, 0.001))
    assert one.images_per_epoch >= two.images_per_epoch > one.images_per_epoch - 48
    assert one.repeats == two.repeats == 3
    assert (one.steps, two.steps) == (3 * one.steps_per_epoch, 3 * two.steps_per_epoch)
    # The same global batch in another way is the same training.
    halves = found("trainer.devices=2", "data.batch_size=12")
    same = ("global_batch", "peak_lr", "images_per_epoch", "steps_per_epoch", "steps")
    assert [getattr(halves, key) for key in same] == [getattr(one, key) for key in same]


def test_nodes_and_launchers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = found("trainer.devices=2", "trainer.num_nodes=2")
    assert expected.processes == 4 and expected.global_batch == 192
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    assert found() == expected


def test_the_meaning_of_unused_parameters_is_among_them() -> None:
    assert found("trainer.devices=1").unused == "skip"
    assert found("trainer.devices=1", "train.unused=zero").unused == "zero"
    zero = found("trainer.devices=1", "trainer.strategy=deepspeed_stage_2")
    assert zero.unused == "zero" and "unused parameters: zero" in str(zero)


def test_limits_shorten_the_epoch() -> None:
    whole = found("trainer.devices=1")
    assert found("trainer.devices=1", "trainer.limit_train_batches=5").steps_per_epoch == 3
    half = found("trainer.devices=1", "trainer.limit_train_batches=0.5")
    assert half.images_per_epoch < whole.images_per_epoch
    assert found("trainer.devices=1", "trainer.max_steps=4") == replace(whole, steps=4)


@pytest.mark.slow
def test_they_are_what_lightning_then_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps, epochs and rate of the run itself, and the copy in its result."""
    small = ["phases=[supernet,measure]", "sampler.name=uniform", "train.warmup_epochs=0", "trainer.devices=1"]
    tiny = "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}"
    expected = found(*small, tiny)
    monkeypatch.chdir(tmp_path)
    assert main("fit", arguments(*small, tiny, "run=a", "trainer.log_every_n_steps=1")) == 0
    record = json.loads((tmp_path / "runs/quickstart/a/result.json").read_text())
    assert record["training"] == expected.to_dict() and record["steps"] == expected.steps
    with (tmp_path / "runs/quickstart/a/metrics.csv").open() as file:
        rates = [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]
    assert len(rates) == expected.steps and max(rates) == pytest.approx(expected.peak_lr, rel=1e-6)


def test_a_plan_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    uniform = ["phases=[supernet,measure]", "sampler.name=uniform"]
    assert main("fit", arguments(*uniform, "trainer.devices=2", "plan=true")) == 0
    rows = dict(line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    two = found("trainer.devices=2")
    assert rows["processes"] == "2" and rows["global batch [images]"] == "96"
    assert rows["steps"] == f"{two.steps:,}" and rows["unused parameters"] == "skip"
