"""`fit` from end to end: what it writes, that it repeats itself, that it resumes, and how it refuses."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import time
import warnings

import pytest
import torch

from lightning_tas.architecture import Architecture
from lightning_tas.commands.entry import main
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.launch.results import comparable
from lightning_tas.launch.run_folder import RUN_VARIABLE
from lightning_tas.search import Selection
from lightning_tas.training.checkpoint import load_supernet
from lightning_tas.training.supernet_module import SupernetModule

from .conftest import arguments, result

OWN_SAMPLER = """
from lightning_tas.samplers import Uniform, register

@register("late")
class Late(Uniform):
    def __init__(self, config, source, seed):
        super().__init__(source, seed)

    def __call__(self, step):
        return super().__call__(step + 1000)
"""


@pytest.fixture
def whole(fit):
    """A finished run."""
    status, folder = fit("whole")
    assert status == 0
    return folder


def test_a_study_writes_the_promised_folder(whole, capsys):
    names = {path.name for path in whole.iterdir()}
    assert names == {
        "config.yaml", "study.json", "metrics.csv", "system.csv", "selection.json", "result.json", "allocation.png",
        "accuracy.png", "phases", "log.txt",
    }  # fmt: skip
    record = result(whole)
    for key in ("seed", "limits", "checkpoint_sha256", "versions", "command", "timing", "host", "run", "git"):
        assert key in record
    selection = Selection.from_dict(json.loads((whole / "selection.json").read_text()))
    assert [Architecture.from_dict(entry["arch"]) for entry in record["architectures"]] == list(selection.archs)
    for entry in record["architectures"]:
        assert 0 <= entry["metrics"]["top1"] <= entry["metrics"]["top5"] <= 100
        assert entry["metrics"]["samples"] == 360
    study = json.loads((whole / "study.json").read_text())
    assert [phase["status"] for phase in study["phases"]] == ["finished"] * 3


@pytest.mark.parametrize(
    ("name", "source"), [("sandwich", "null"), ("uniform", "space"), ("e2e_own:Late", "candidates")]
)
def test_what_is_trained_is_said_everywhere(fit, capsys, monkeypatch, tmp_path, name, source):
    """The candidates by every sampler, unless the whole space is asked for: in steps, checkpoint, result and table."""
    trained: set[Architecture] = set()
    draw = SupernetModule.architectures

    def spy(self, step):
        trained.update(draw(self, step))
        return draw(self, step)

    monkeypatch.setattr(SupernetModule, "architectures", spy)
    (tmp_path / "e2e_own.py").write_text(OWN_SAMPLER)
    monkeypatch.syspath_prepend(tmp_path)
    given = [f"sampler.name={name}", f"sampler.source={source}", "select.cut_supernet=true", "data.batch_size=16"]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        status, folder = fit("run", *given, "trainer.max_epochs=1", "data.eval_batch_size=512")
        assert status == main("evaluate", [f"ckpt={folder}", *(["trust=true"] if ":" in name else [])]) == 0
    record, loaded = result(folder), load_supernet(folder / "phases" / "01-supernet" / "checkpoints" / "final.ckpt")
    chosen = {Architecture.from_dict(entry["arch"]) for entry in record["architectures"]}
    assert chosen == {c.arch for c in loaded.candidates} == set(loaded.report.values())
    whole = source == "space"
    assert loaded.trained is not None and (loaded.trained.sampler, loaded.trained.reduce) == (name, "mean")
    assert loaded.trained.source == ("space" if whole else "candidates")
    assert loaded.trained.networks == (loaded.net.space.size() if whole else len(chosen))
    assert record["trained"] == loaded.trained.to_dict()
    assert capsys.readouterr().out.count(f"trained: {loaded.trained}") == 2
    # 16 steps: of the candidates all have had a turn.
    assert len(chosen) < 16 and (trained - chosen if whole else trained == chosen)
    told = [str(one.message) for one in heard if "not what is trained" in str(one.message)]
    assert len(told) == (3 if whole else 0)  # when training starts, and below each table


def test_a_finished_run_leaves_no_name_for_what_is_started_later(whole):
    assert RUN_VARIABLE not in os.environ


def test_metrics_hold_every_preferred_network_each_epoch(whole):
    with (whole / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    labels = [entry["label"] for entry in result(whole)["architectures"]]
    for label in labels:
        values = [row for row in rows if row[f"val/{label}/top1"]]
        assert [row["epoch"] for row in values] == ["0", "1"]
    assert {"train/loss", "train/lr", "train/params"} <= set(rows[0])


def test_every_file_loads_without_pickle(whole):
    checkpoints = list(whole.glob("phases/*/checkpoints/*.ckpt"))
    assert checkpoints
    for path in checkpoints:
        assert "state_dict" in torch.load(path, weights_only=True)


@pytest.mark.slow
def test_the_same_seed_repeats_and_another_does_not(fit, whole):
    status, again = fit("again")
    assert status == 0
    assert comparable(result(again)) | {"command": ""} == comparable(result(whole)) | {"command": ""}
    status, other = fit("other", "seed=1")
    assert result(other)["checkpoint_sha256"] != result(whole)["checkpoint_sha256"]


@pytest.mark.slow
def test_config_yaml_repeats_a_run(fit, whole, tmp_path):
    assert main("fit", [f"config={whole / 'config.yaml'}", "run=repeated"]) == 0
    repeated = whole.parent / "repeated"
    assert result(repeated)["checkpoint_sha256"] == result(whole)["checkpoint_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_resumes_to_the_same_result(fit, tmp_path, processes, workers):
    extra = ["trainer.max_epochs=4", f"data.num_workers={workers}", "train.ema=true", "checkpoint.every_n_steps=1"]
    status, straight = fit("straight", *extra)
    assert status == 0
    killed = tmp_path / "runs" / "quickstart" / "killed"
    process = processes.command("python", "-m", "lightning_tas.fit", *arguments(tmp_path, "killed", *extra), fork=True)
    while process.status is None and not list(killed.glob("phases/*/checkpoints/*step=*06.ckpt")):
        time.sleep(0.02)
    process.kill()
    assert not (killed / "result.json").exists(), "killed too late to test anything"
    status, resumed = fit("killed", *extra, "resume=auto")
    assert status == 0
    assert result(resumed)["checkpoint_sha256"] == result(straight)["checkpoint_sha256"]
    assert [e["metrics"] for e in result(resumed)["architectures"]] == [
        e["metrics"] for e in result(straight)["architectures"]
    ]
    assert (resumed / "metrics.csv").read_text() == (straight / "metrics.csv").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_it_goes_on(fit, tmp_path, processes, sent, status):
    extra = ["trainer.max_epochs=4", "checkpoint.every_n_steps=3"]
    code, straight = fit("straight", *extra)
    assert code == 0
    folder = tmp_path / "runs" / "quickstart" / "stopped"
    process = processes.command("python", "-m", "lightning_tas.fit", *arguments(tmp_path, "stopped", *extra), fork=True)
    while process.status is None and not list(folder.glob("phases/*/checkpoints/*step=*06.ckpt")):
        time.sleep(0.02)
    process.send(sent)
    assert processes.wait([process], timeout=60, check=False) == [status]
    err = process.stderr
    by = "Ctrl-C" if sent == signal.SIGINT else "a signal"
    assert err.rstrip().endswith(f"stopped by {by}; python -m lightning_tas.fit resume={folder} continues it")
    assert "Traceback" not in err
    assert main("fit", [f"resume={folder}"]) == 0
    assert result(folder)["checkpoint_sha256"] == result(straight)["checkpoint_sha256"]
    assert (folder / "metrics.csv").read_text() == (straight / "metrics.csv").read_text()


@pytest.mark.slow
def test_a_phase_without_a_checkpoint_starts_again_in_metrics_too(fit, whole):
    """Killed before the first checkpoint: nothing of the first attempt may stay in metrics.csv."""
    expected = (whole / "metrics.csv").read_text()
    study = read_json(whole / "study.json")
    for phase in study["phases"][1:]:
        phase.update(status="running", outputs={})
    write_json(whole / "study.json", study)
    for checkpoint in whole.glob("phases/*/checkpoints/*.ckpt"):
        checkpoint.unlink()
    assert fit("whole", "resume=auto")[0] == 0
    assert (whole / "metrics.csv").read_text() == expected


@pytest.mark.slow
def test_retrain_takes_a_result_and_nothing_else(fit, whole, tmp_path):
    label = result(whole)["architectures"][0]["label"]
    status, alone = fit("alone", "phases=[retrain]", f"arch={whole / 'result.json'}@{label}")
    assert status == 0
    assert result(alone)["architectures"][0]["arch"] == result(whole)["architectures"][0]["arch"]
    # From inherited weights, one step of nearly nothing away: the accuracy of the supernet's sub-network stays.
    inherited = [f"ckpt={whole}", "train.lr=1e-12", "train.min_lr=0", "train.warmup_epochs=0", "train.weight_decay=0"]
    status, tuned = fit("tuned", "phases=[retrain]", f"arch={whole / 'result.json'}@{label}", *inherited)
    assert status == 0
    before, after = (result(f)["architectures"][0]["metrics"] for f in (whole, tuned))
    assert after["top1"] == before["top1"]
    assert main("fit", ["recipe=retrain", "arch=nowhere.json", f"output_dir={tmp_path}"]) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["select.low=50"], "the space reaches"),
        (["select.low=0.03", "select.high=0.03"], r"select\.low, select\.high"),
        (["data.name=cifar10", "data.root=/nowhere"], "/nowhere"),
        (["phases=[supernet]"], "phases needs 'select'"),
        (["phases=[measure]"], "ckpt"),
        (["phases=[retrain]"], "arch"),
        (["phases=[retrain]", "arch={embed_dim: 16, num_heads: [1]}"], "arch|mlp_ratio"),
        (["data.batch_size=100000"], "data.batch_size"),
        (["resume=/nowhere"], "resume"),
    ],
)
def test_mistakes_end_with_status_2_one_message_and_nothing_written(fit, tmp_path, capsys, overrides, message):
    status, _ = fit("bad", *overrides)
    captured = capsys.readouterr()
    assert status == 2
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert re.search(message, captured.err), captured.err
    assert not (tmp_path / "runs").exists()


def test_a_used_folder_is_refused_and_kept(fit, whole, capsys):
    before = (whole / "result.json").read_bytes()
    status, _ = fit("whole")
    assert status == 2
    assert "resume=auto" in capsys.readouterr().err
    assert (whole / "result.json").read_bytes() == before


def test_resuming_under_another_recipe_is_refused(fit, whole, capsys):
    status, _ = fit("whole", "resume=auto", "train.lr=1")
    assert status == 2
    assert "study.json was begun with other settings: train.lr is 1.0, in the run 0." in capsys.readouterr().err


def test_plan_prints_and_writes_nothing(fit, tmp_path, capsys):
    status, _ = fit("planned", "plan=true")
    printed = capsys.readouterr().out
    assert status == 0
    for words in ("architectures", "preferred", "sampler balanced", "warm-up", "steps", "MACs", "memory"):
        assert words in printed
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["trainer.accelerator=tpu", "trainer.devices=[7]"])
def test_what_lightning_refuses_is_refused_before_anything_is_written(fit, tmp_path, capsys, override):
    extra = ["trainer.accelerator=gpu"] if "devices" in override else []
    if torch.cuda.is_available():
        pytest.skip("this machine may have what the test takes away")
    status, _ = fit("bad", override, *extra)
    captured = capsys.readouterr()
    assert (status, len(captured.err.strip().splitlines())) == (2, 1), captured.err
    assert captured.err.startswith("lightning_tas.fit: trainer")
    assert not (tmp_path / "runs").exists()


def test_a_diverged_run_still_ends_with_a_result(fit, recwarn):
    status, folder = fit("diverged", "train.lr=1e30", "train.warmup_epochs=0")
    assert status == 0
    assert any("not finite" in str(warning.message) for warning in recwarn)
    assert any(entry["metrics"]["loss"] is None for entry in result(folder)["architectures"])


@pytest.mark.parametrize("asked", ["true", "warn"])
def test_deterministic_operations_hold_for_all_phases_and_no_longer(fit, monkeypatch, asked):
    seen: list[tuple[bool, bool, str | None]] = []

    def spy(*_: object) -> None:
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), warn, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(SupernetModule, "on_train_batch_end", spy)
    monkeypatch.setattr("lightning_tas.commands.phases.say", spy)  # select and measure print
    spans = [
        "phases=[supernet,measure]",
        "sampler.name=uniform",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=1",
    ]
    assert fit("run", f"trainer.deterministic={asked}", *spans)[0] == 0
    assert len(seen) > 4 and set(seen) == {(True, asked == "warn", ":4096:8")}
    seen.clear()
    spy()
    assert seen == [(False, False, None)]


def test_a_phase_whose_every_step_is_left_out_is_not_measured(fit, capsys, monkeypatch):
    """Fewer steps than `train.max_bad_steps`, none of them sound: the weights are the initial ones."""
    criterion = SupernetModule.criterion
    monkeypatch.setattr(SupernetModule, "criterion", lambda *given: criterion(*given) * float("nan"))
    status, folder = fit("nothing", "trainer.max_epochs=1")
    assert status == 3 and not (folder / "result.json").exists()
    assert (
        "supernet: nothing was trained: the loss or the gradient was not finite in any of 4" in capsys.readouterr().err
    )


def test_a_run_goes_on_with_other_workers_and_checkpoints(fit, whole, capsys):
    """What cannot change a result may differ on resume: here everything is finished, so nothing is done again."""
    before = (whole / "result.json").read_bytes()
    status, _ = fit("whole", "resume=auto", "data.num_workers=2", "checkpoint.keep_last=3")
    assert status == 0
    assert (whole / "result.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_named_checkpoint_of_a_finished_phase_redoes_what_came_after(fit, tmp_path, processes, capsys):
    """A run of two trainings goes back into the first one, is killed again, and still ends as if nothing had been."""
    extra = [
        "phases=[select,supernet,measure,retrain]", "train.ema=true", "checkpoint.every_n_steps=1",
        "checkpoint.keep_last=-1",
    ]  # fmt: skip
    status, straight = fit("straight", *extra)
    assert status == 0
    status, again = fit("again", *extra)
    checkpoints = again / "phases" / "01-supernet" / "checkpoints"
    first, second, *_ = sorted(checkpoints.glob("epoch=*.ckpt"))
    assert main("fit", [f"resume={second}"]) == 0  # the run's own configuration
    assert f"continuing {second}" in capsys.readouterr().out
    same_run(again, straight)
    # Killed after it went back: the automatic resume must not find what was there before.
    old = made(second)
    process = processes.command("python", "-m", "lightning_tas.fit", f"resume={first}", fork=True)
    while process.status is None and made(second) in (None, old):
        time.sleep(0.002)
    process.kill()
    assert not list((again / "phases").glob("*retrain/checkpoints/*.ckpt")), "killed too late to test anything"
    status, _ = fit("again", *extra, "resume=auto")
    assert status == 0
    same_run(again, straight)
    for wrong, words in ((checkpoints / "final.ckpt", "not a checkpoint to go on from"), (second, "is broken")):
        study = (again / "study.json").read_bytes()
        if wrong == second:
            second.write_bytes(second.read_bytes()[:-200])
        assert main("fit", [f"resume={wrong}"]) == 2
        assert words in capsys.readouterr().err
        assert (again / "study.json").read_bytes() == study
    same_run(again, straight)


def made(path):
    """When a file was written; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns


def same_run(one, other):
    assert (one / "metrics.csv").read_text() == (other / "metrics.csv").read_text()
    assert result(one)["checkpoint_sha256"] == result(other)["checkpoint_sha256"]
    assert [e["metrics"] for e in result(one)["architectures"]] == [
        e["metrics"] for e in result(other)["architectures"]
    ]
    names = [sorted(str(p.relative_to(run)) for p in run.rglob("*.ckpt")) for run in (one, other)]
    assert names[0] == names[1]
