"""Sweeps: what they expand to, what they refuse before the first job, how they end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from lightning_tas.commands import multirun
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError
from lightning_tas.launch.files import take_lock, write_json

from .launched import fit


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs that only note their command line in the file given back, and fail where their seed is 13."""
    log = tmp_path / "log"
    script = (
        f"import sys; open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10)); "
        "sys.exit(3 * ('seed=13' in sys.argv))"
    )
    command = property(lambda job: [sys.executable, "-c", script, *job.overrides, f"run={job.folder.name}"])
    monkeypatch.setattr(multirun.Job, "command", command)
    monkeypatch.chdir(tmp_path)
    return log


def test_every_combination_is_a_job_with_its_own_run(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main("fit", ["-m", "recipe=quickstart,prenas_fashion_mnist", "seed=1,2", "smoke=true", "run=s"]) == 0
    assert jobs.read_text().splitlines() == [
        "recipe=quickstart seed=1 smoke=true run=s-00",
        "recipe=quickstart seed=2 smoke=true run=s-01",
        "recipe=prenas_fashion_mnist seed=1 smoke=true run=s-02",
        "recipe=prenas_fashion_mnist seed=2 smoke=true run=s-03",
    ]
    out = capfd.readouterr().out
    assert "sweep s: 4 jobs" in out
    assert [line.split()[-4:] for line in out.splitlines() if "finished" in line][3] == [
        "finished", "-", "-", "runs/prenas_fashion_mnist/s-03",
    ]  # fmt: skip


def test_the_table_has_the_best_accuracy_of_each_job(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    measured = {"small": {"top1": 71.0}, "large": {"top1": 80.25}, "broken": {"top1": None}, "found": {}}
    for folder, labels in zip(folders, (measured, ["found"]), strict=False):
        folder.mkdir()
        entries = [{"label": label, "metrics": measured[label]} for label in labels]
        write_json(folder / "result.json", {"architectures": entries})
    table = multirun._summary([multirun.Job((), f"seed={i}", f) for i, f in enumerate(folders)], [0, 0, None])
    head, _, *lines = table.strip().splitlines()
    assert "best top-1 [%]" in head
    assert [line.split()[-3:-1] for line in lines] == [["80.25", "large"], ["-", "-"], ["-", "-"]]


def test_a_failed_job_is_reported_and_does_not_stop_the_others(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main("fit", ["--multirun", "recipe=quickstart", "seed=1,13,2", "run=s"]) == 3
    assert len(jobs.read_text().splitlines()) == 3
    out, err = capfd.readouterr()
    assert "failed (3)" in out and out.count("finished") == 2
    assert "1 of 3 jobs did not finish" in err and "run=s resume=auto" in err and err.count("\n") == 1


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["recipe=quickstart", "train.lr=0.1,-1"], ["job 1 (train.lr=-1): train.lr: -1"]),
    (["recipe=quickstart,quickstrat"], ["job 1 (recipe=quickstrat)", "Did you mean 'quickstart'"]),
    (["recipe=quickstart", "sed=1,2"], ["sed: no such key", "'seed'"]),
    (["recipe=quickstart", "output_dir=a,b"], ["output_dir: 'a,b' is several values"]),
    (["recipe=quickstart", "train.lr=interval(0,1)"], ["train.lr", "not a list of values"]),
    (["recipe=quickstart", "seed=1,2", "hydra/launcher=joblb"], ["hydra/launcher", "'hydra/launcher/joblb'", "basic"]),
    (["recipe=quickstart", "hydra/sweeper=optuna"], ["'hydra/sweeper=optuna' is not for a sweep", "hydra/launcher"]),
    (["recipe=quickstart", "resume=runs/x"], ["job 0", "resume"]),
]


@pytest.mark.parametrize(("argv", "words"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_a_mistake_in_any_job_is_refused_before_the_first(
    argv: list[str], words: list[str], jobs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main("fit", ["-m", *argv, *(["run=s"] if "run=" not in argv else [])]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not jobs.exists() and not Path("runs").exists()


def test_a_run_that_exists_is_refused(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/quickstart/s-01")
    folder.mkdir(parents=True)
    (folder / "study.json").write_text("{}")
    assert main("fit", ["-m", "recipe=quickstart", "seed=1,2", "run=s"]) == 2
    assert "run: 'runs/quickstart/s-01' exists already" in capfd.readouterr().err
    assert main("fit", ["-m", "recipe=quickstart", "seed=1,2", "run=s", "resume=auto"]) == 0


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_sweeps_are_for_fit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, ["-m", "ckpt=x", "seed=1,2"]) == 2
    assert f"{command}: sweeps (-m) are for fit" in capsys.readouterr().err


def test_without_the_flag_several_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("fit", ["recipe=quickstart", "seed=1,2"]) == 2
    assert "-m runs each value" in capsys.readouterr().err
    assert main("fit", ["recipe=quickstart", "hydra/launcher=joblib"]) == 2
    assert "give -m as well" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("seed=1,2", ["seed=1", "seed=2"]),
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("seed=7", ["seed=7"]),
        ("phases=[select,supernet]", ["phases=[select,supernet]"]),
        ("phases=[supernet],[retrain]", ["phases=[supernet]", "phases=[retrain]"]),
        ("arch=a.json@x,b dir/c.json", ["arch=a.json@x", "arch=b dir/c.json"]),
        ("space={depth: [1, 2]}", ["space={depth: [1, 2]}"]),
        ("space=autoformer_tiny,{depth: [1, 2]}", ["space=autoformer_tiny", "space={depth: [1, 2]}"]),
        ("data.root='/a,b'", ["data.root='/a,b'"]),
    ],
)
def test_split(argument: str, values: Sequence[str]) -> None:
    assert multirun.split(argument) == list(values)


def test_split_names_what_cannot_be_read() -> None:
    with pytest.raises(UserError, match=r"train\.betas"):
        multirun.split("train.betas=[0.9")


class ProbeLauncher(Launcher):
    """Notes what Hydra gives it, and runs the jobs backwards."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Hydra's hook."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        """Hydra's hook."""
        from hydra.core.utils import run_job

        ProbeLauncher.seen = {"n_jobs": self.n_jobs, "jobs": [list(overrides) for overrides in job_overrides]}
        done = []
        for number, overrides in reversed(list(enumerate(job_overrides))):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            config.hydra.job.id, config.hydra.job.num = str(number), number
            done.append(
                run_job(
                    task_function=self.task_function,
                    config=config,
                    job_dir_key="hydra.sweep.dir",
                    job_subdir_key="hydra.sweep.subdir",
                    hydra_context=self.hydra_context,
                )
            )
        return done[::-1]


def test_the_launcher_is_the_one_asked_for(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins.instance()  # which looks for the real ones
    monkeypatch.setattr(ProbeLauncher, "__module__", "hydra_plugins.probe")
    for name in ("hydra_plugins", "hydra_plugins.probe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["hydra_plugins.probe"].ProbeLauncher = ProbeLauncher  # type: ignore[attr-defined]
    sys.modules["hydra_plugins"].probe = sys.modules["hydra_plugins.probe"]  # type: ignore[attr-defined]
    node = {"_target_": "hydra_plugins.probe.ProbeLauncher", "n_jobs": 1}
    ConfigStore.instance().store(group="hydra/launcher", name="probe", node=node)
    plugins.register(ProbeLauncher)
    arguments = ["-m", "recipe=quickstart", "seed=1,2", "run=s", "hydra/launcher=probe", "hydra.launcher.n_jobs=5"]
    assert main("fit", arguments) == 0
    assert ProbeLauncher.seen == {"n_jobs": 5, "jobs": [["job=0"], ["job=1"]]}
    assert [line.split()[-1] for line in jobs.read_text().splitlines()] == ["run=s-01", "run=s-00"]


SWEEP = """
import sys
from omegaconf import OmegaConf
from lightning_tas.commands import multirun
multirun.work(OmegaConf.create({"folder": sys.argv[1], "job": 0}))
"""
JOB = """
import signal, sys, time
from lightning_tas.launch.early import hold_save_signal
from lightning_tas.launch.follow import follow_sweep
def note(word):
    with open(sys.argv[1], "a") as log:
        log.write(word + "\\n")
def stop(*_):
    note("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
hold_save_signal()
signal.signal(signal.SIGUSR1, lambda *_: note("asked"))
follow_sweep()
note("began")
while True:
    time.sleep(0.05)
"""


def test_a_killed_sweep_takes_its_job_along_and_sigusr1_reaches_it(processes: Any, tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "sweep"
    place.mkdir()
    log.touch()
    (place / "jobs.json").write_text(
        json.dumps({"cwd": str(tmp_path), "commands": [[sys.executable, "-c", JOB, str(log)]]})
    )

    def wait(words: list[str]) -> None:
        end = time.monotonic() + 60
        while log.read_text().split() != words:
            assert time.monotonic() < end, f"{log.read_text()}\n{sweep.report()}"
            time.sleep(0.05)

    sweep = processes.command("python", "-c", SWEEP, place)
    wait(["began"])
    sweep.send(signal.SIGUSR1)
    wait(["began", "asked"])
    assert sweep.status is None and len(sweep.descendants()) == 1
    held = os.open(place / "job-0.lock", os.O_RDWR)
    assert not take_lock(held, 0), "nobody starts this job a second time"
    sweep.send(signal.SIGKILL)
    wait(["began", "asked", "saved"])
    assert take_lock(held, 20) and sweep.descendants() == []
    os.close(held)


@pytest.mark.parametrize("ends", [True, False])
def test_a_resumed_sweep_waits_for_the_job_of_a_killed_one(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PATIENCE_SECONDS", "MARGIN_SECONDS"):
        monkeypatch.setattr(multirun, name, 5.0 if ends else 0.1)
    (tmp_path / "jobs.json").write_text(json.dumps({"cwd": str(tmp_path), "commands": [["touch", "begun"]]}))
    lock = os.open(tmp_path / "job-0.lock", os.O_RDWR | os.O_CREAT)
    assert take_lock(lock, 0)
    config = OmegaConf.create({"folder": str(tmp_path), "job": 0})
    monkeypatch.setattr("lightning_tas.launch.files.time.sleep", lambda _: os.close(lock) if ends else None)
    if ends:
        assert multirun.work(config) == 0
    else:
        with pytest.raises(SystemExit):
            multirun.work(config)
        os.close(lock)
    said = capsys.readouterr().out
    assert said.count("is still stopping; waiting") == 1 and ("is still running" in said) == (not ends)
    assert (tmp_path / "begun").exists() == ends


@pytest.mark.slow
def test_jobs_may_have_two_processes_and_ctrl_c_stops_all(processes: Any, tmp_path: Path) -> None:
    argv = fit(
        f"output_dir={tmp_path / 'runs'}", "phases=[supernet]", "sampler.name=uniform", "trainer.devices=2",
        "trainer.max_epochs=1,1000,2", "run=s",
    )  # fmt: skip
    sweep = processes.command(*argv, "-m")
    folders = [tmp_path / "runs" / "quickstart" / f"s-0{number}" for number in range(3)]
    end = time.monotonic() + 200
    while not (folders[1] / "phases" / "00-supernet" / "checkpoints").is_dir():
        assert sweep.status is None and time.monotonic() < end, sweep.report()
        time.sleep(0.2)
    sweep.send(signal.SIGINT)
    assert processes.wait([sweep], timeout=90, check=False) == [130]
    assert json.loads((folders[0] / "study.json").read_text())["phases"][0]["status"] == "finished"
    assert json.loads((folders[1] / "study.json").read_text())["phases"][0]["status"] == "running"
    assert not folders[2].exists()
    for word in ("finished", "stopped (130)", "not started"):
        assert word in sweep.stdout
    time.sleep(1)
    assert sweep.descendants() == []
