"""`fit` and `evaluate` on two processes that a launcher started: as one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.commands.entry import main
from lightning_tas.launch.files import read_json, write_json

from .launched import fit, slurm_variables, start


def result(folder: Path) -> list[Any]:
    """What was measured, per network."""
    return [network["metrics"] for network in json.loads((folder / "result.json").read_text())["architectures"]]


def reopen(folder: Path, phase: str) -> None:
    """Make `phase` of a finished run unfinished."""
    study = read_json(folder / "study.json")
    entry = next(entry for entry in study["phases"] if entry["name"] == phase)
    entry.update(status="running", outputs={})
    write_json(folder / "study.json", study)
    (folder / "result.json").unlink()


@pytest.mark.slow
def test_two_nodes_are_one_run_and_measure_as_one_process_does(
    processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = fit(f"output_dir={tmp_path / 'runs'}")
    processes.wait(processes.torchrun(*command[1:]), timeout=200)
    (folder,) = (tmp_path / "runs" / "quickstart").iterdir()
    assert folder.name.endswith("-seed0")
    for process in processes.started[1:]:
        assert process.stdout == "" and "lightning" not in process.stderr
    measured = result(folder)
    assert {metrics["samples"] for metrics in measured} == {360}
    # Only the measuring is left, with no trainer and, on one process, no group.
    for number, argv in ((2, command), (1, command)):
        reopen(folder, "measure")
        if number == 2:
            argvs = [[*argv, "resume=auto"]] * 2
            processes.wait(start(processes, argvs, per_node=2), timeout=200)
        else:
            assert main("fit", [*argv[3:], "resume=auto"]) == 0
        again = result(folder)
        for one, other in zip(measured, again, strict=True):
            assert (one["top1"], one["top5"], one["samples"]) == (other["top1"], other["top5"], other["samples"])
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    # The command that measures shares the images in the same way.
    evaluate = ["python", "-m", "lightning_tas.evaluate", f"ckpt={folder}", "data.eval_batch_size=31"]
    processes.wait(start(processes, [evaluate] * 2), timeout=200)
    record = json.loads((folder / "evaluation.json").read_text())
    assert [network["metrics"]["top1"] for network in record["architectures"]] == [one["top1"] for one in measured]
    assert processes.started[-1].stdout == processes.started[-1].stderr == ""


@pytest.mark.slow
def test_a_mistake_on_any_process_ends_all_with_one_message(processes: Any, tmp_path: Path) -> None:
    out = f"output_dir={tmp_path / 'runs'}"
    cases = {
        "train.lr: -1.0 is not valid": [fit(out), fit(out, "train.lr=-1")],
        "process 1 differs from process 0: seed 1 (process 0: 0)": [fit(out), fit(out, "seed=1")],
        "trainer.devices: 4 is not valid; torchrun started 1": [fit(out, "trainer.devices=4")] * 2,
    }
    for message, argvs in cases.items():
        started = start(processes, argvs)
        assert processes.wait(started, timeout=200, check=False) == [2, 2], message
        assert started[0].stderr.count(message) == 1, started[0].report()
        assert started[1].stdout == started[1].stderr == "", started[1].report()
        assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_srun_gives_the_run_its_name_and_its_layout(processes: Any, tmp_path: Path) -> None:
    argv = fit(f"output_dir={tmp_path / 'runs'}", "phases=[supernet]", "sampler.name=uniform", "resume=auto")
    processes.wait(start(processes, [argv] * 2, slurm_variables), timeout=200)
    folder = tmp_path / "runs" / "quickstart" / "slurm-4711"
    assert [path.name for path in (tmp_path / "runs" / "quickstart").iterdir()] == ["slurm-4711"]
    assert json.loads((folder / "study.json").read_text())["phases"][0]["outputs"]["steps"] == 2  # of 128 images each
    # Requeued, the job has the same number, finds its run, and sees that it is finished.
    again = start(processes, [argv] * 2, slurm_variables)
    processes.wait(again, timeout=200)
    assert "all phases are finished" in again[0].stdout and again[1].stdout == ""
    assert not list(folder.rglob("hpc_ckpt*"))
