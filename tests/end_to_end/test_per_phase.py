"""A study whose phases have settings of their own: what each writes, and what it starts from."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from lightning_tas.commands.entry import main
from lightning_tas.launch.results import find_checkpoint

from .conftest import result

STUDY = (
    "phases=[supernet,supernet,measure,retrain,retrain]",
    "sampler.name=uniform",
    "trainer.max_epochs=1",
    "per_phase.supernet-2={trainer: {max_epochs: 2}, data: {img_size: 12}}",
    "per_phase.retrain.train={from_checkpoint: supernet-2, lr: 1e-12, min_lr: 0, weight_decay: 0, warmup_epochs: 0}",
    "per_phase.retrain-2={data: {img_size: 16, batch_size: 32, num_workers: 0}}",
)


@pytest.mark.slow
def test_every_phase_runs_under_its_own_settings(fit, capsys):
    status, folder = fit("study", *STUDY)
    assert status == 0
    study = json.loads((folder / "study.json").read_text())
    names = ["supernet", "supernet-2", "measure", "retrain", "retrain-2"]
    assert [phase["name"] for phase in study["phases"]] == names
    trained = {phase["name"]: phase["outputs"] for phase in study["phases"] if phase["name"] != "measure"}
    # 256 images, of batches of 64 or 32
    assert {name: (out["epochs"], out["steps"]) for name, out in trained.items()} == {
        "supernet": (1, 4), "supernet-2": (2, 8), "retrain": (1, 4), "retrain-2": (1, 8),
    }  # fmt: skip
    with (folder / "metrics.csv").open() as file:
        assert list(dict.fromkeys(row["phase"] for row in csv.DictReader(file))) == [n for n in names if n != "measure"]
    nets = {
        name: torch.load(folder / out["checkpoint"], weights_only=True)["lightning_tas"]["model"]["img_size"]
        for name, out in trained.items()
    }
    assert {name: list(size) for name, size in nets.items()} == {
        "supernet": [8, 8], "supernet-2": [12, 12], "retrain": [8, 8], "retrain-2": [16, 16],
    }  # fmt: skip
    # The first retraining starts from the supernet and hardly moves: it measures what the supernet's weights did.
    phases = folder / "phases"
    before, after = (json.loads((phases / name / "result.json").read_text()) for name in ("02-measure", "03-retrain"))
    (alone,) = after["architectures"]
    inherited = next(entry for entry in before["architectures"] if entry["id"] == alone["id"])
    assert alone["metrics"]["top1"] == pytest.approx(inherited["metrics"]["top1"], abs=1e-9)
    assert result(folder)["training"]["batch_size"] == 32  # the run's result is that of its last phase
    # Resumed under other settings of a phase: refused; from a checkpoint of a repeated phase: goes on there.
    capsys.readouterr()
    assert fit("study", *STUDY, "resume=auto", "per_phase.retrain.trainer.max_epochs=2")[0] == 2
    assert "resume" in capsys.readouterr().err
    digest = result(folder)["checkpoint_sha256"]
    checkpoint = folder / "phases" / "01-supernet-2" / "checkpoints" / "epoch=0000-step=0000004.ckpt"
    assert main("fit", [f"resume={checkpoint}"]) == 0
    assert f"continuing {checkpoint}" in capsys.readouterr().out
    assert result(folder)["checkpoint_sha256"] == digest
    # What evaluates a run does it under the settings of the phase whose checkpoint that is.
    assert find_checkpoint(folder).parents[1].name == "04-retrain-2"
    assert main("evaluate", [f"ckpt={folder}"]) == 0
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["data"]["img_size"] == [16, 16]
    assert found["architectures"][0]["metrics"]["top1"] == result(folder)["architectures"][0]["metrics"]["top1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["phases=[supernet,supernet,search]", "per_phase={supernet: {data: {search_val: 0}}}"],
            "the phase 'supernet' was trained on ",
        ),
        (
            ["phases=[supernet]", "data.search_val=0", "search.strategy=null", "scoring.proxies=[snip]"],
            "holds no images",
        ),
    ],
)
def test_images_that_choose_are_looked_at_before_any_training(fit, tmp_path, capsys, given, message):
    """Of every phase: a later one with other held-out images would choose by what an earlier one was trained on."""
    status, run = fit("a", "sampler.name=uniform", "search.strategy=random", "search.score=accuracy", *given)
    assert status == 2 and message in capsys.readouterr().err and not run.exists()
