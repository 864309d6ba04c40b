"""The loggers of a job, read back from disk: axes that go on, tables, pictures, artifacts, configuration."""

from __future__ import annotations

import csv
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_tas.architecture import Architecture
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.launch.files import write_json
from lightning_tas.launch.loggers import RunLoggers
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.launch.settings import Settings
from lightning_tas.launch.study import Study
from lightning_tas.launch.wandb_logger import AXES, NetworkCosts
from lightning_tas.reading import read_yaml

from .wandb_records import Attempt, attempts


def offline(logger: Any = "wandb") -> Config:
    config = Config(logger=logger, seed=7, phases=["select", "supernet", "measure", "retrain"])
    config.wandb.mode, config.wandb.project, config.wandb.name = "offline", "birds", "first"
    config.train.lr = 0.0125
    return config


def train(loggers: RunLoggers, phase: str, index: int, restored: int, steps: range, validate: bool = True) -> None:
    """What a Trainer logs in a phase, with validation after the last step."""
    made = loggers.for_phase(phase, index, restored)
    for callback in loggers.callbacks():
        if isinstance(callback, NetworkCosts):
            callback.found = {"small": (1000, 20000), "large": (3000, 50000)}
    for step in steps:
        for logger in made:
            logger.log_metrics({"train/loss": 1.0 / (1 + step), "train/lr": 0.1, "epoch": 0}, step)
            logger.log_metrics({"system/images_per_second": 100.0 + step, "epoch": 0}, step)
    if validate:
        values = {f"val/{label}/{key}": 50.0 for label in ("small", "large") for key in ("top1", "top5", "loss")}
        for logger in made:
            logger.log_metrics({**values, "epoch": 0}, steps[-1])


def picture(path: Path) -> Path:
    Image.new("RGB", (8, 6)).save(path)
    return path


ENTRIES = [
    {"label": label, "params": params, "macs": 9 * params, "arch": Architecture.vit(16, heads, [2.0, 1.5]).to_dict()}
    for label, params, heads in (("1k", 1000, [1, 2]), ("2k", 2000, [2, 2]))
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[Attempt]]:
    """A job of four phases, killed after six steps of the second and resumed from step 4."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "recipe" / "run").create()
    config = offline()
    folder.config.write_text(to_yaml(config))
    study = Study(folder.study, config.phases, Settings({}, {}))

    first = RunLoggers(config, folder)
    candidates = [{**entry, "score": 5.0 + i, "bin": i + 1.0} for i, entry in enumerate(ENTRIES)]
    selection = {"candidates": candidates, "examined": 12}
    write_json(folder.selection, selection)
    first.log_selection(selection, picture(folder.path / "allocation.png"))
    study.finish(0, {"selection": "selection.json"})
    train(first, "supernet", 1, 0, range(6), validate=False)
    first.close(1)

    second = RunLoggers(config, folder)
    train(second, "supernet", 1, 4, range(4, 8))
    study.finish(1, {"steps": 8})
    measured = {"top1": 61.0, "top5": None, "loss": 1.25, "samples": 100}
    result = {"architectures": [{**entry, "metrics": measured} for entry in ENTRIES], "steps": 8, "epochs": 1}
    write_json(folder.result, result)
    second.log_result(result, picture(folder.path / "accuracy.png"))
    study.finish(2, {"result": "result.json"})
    train(second, "retrain", 3, 0, range(3))
    second.close()
    return folder, attempts(folder.path)


def test_one_run_named_and_configured(whole: tuple[RunFolder, list[Attempt]]) -> None:
    folder, found = whole
    assert len(found) == 2
    assert len({attempt.run["run_id"] for attempt in found}) == 1
    recipe = read_yaml(folder.config)
    for attempt in found:
        assert (attempt.run["project"], attempt.run["display_name"]) == ("birds", "first")
        assert {key: attempt.config[key] for key in recipe} == recipe, "the config is the whole resolved recipe"
    assert [attempt.of("exit")[0]["exit_code"] for attempt in found] == [1, 0]


def test_every_namespace_has_its_axis(whole: tuple[RunFolder, list[Attempt]]) -> None:
    _, found = whole
    for attempt in found:
        assert attempt.axes == {f"{axis}/*": f"{axis}/step" for axis in AXES}
    assert set(AXES) == {"train", "val", "select", "search", "score", "system"}


def test_axes_go_on_over_restarts_and_phases(whole: tuple[RunFolder, list[Attempt]]) -> None:
    _, (first, second) = whole
    for axis in ("train", "system"):
        assert first.column(f"{axis}/step") == [0, 1, 2, 3, 4, 5]
        assert second.column(f"{axis}/step") == [4, 5, 6, 7, 8, 9, 10], "retraining follows the eight steps before it"
    assert second.column("val/step") == [7, 10]
    assert [row["phase"] for row in second.rows if "train/loss" in row] == ["supernet"] * 4 + ["retrain"] * 3
    assert second.column("train/loss")[:4] == [1 / 5, 1 / 6, 1 / 7, 1 / 8]
    assert second.column("system/images_per_second")[0] == 104.0
    # The server drops rows whose counter goes backwards.
    counters = [row["_step"] for attempt in (first, second) for row in attempt.rows]
    assert counters == sorted(set(counters))


def test_selection_is_a_table_a_picture_and_an_artifact(whole: tuple[RunFolder, list[Attempt]]) -> None:
    _, (first, _) = whole
    assert first.column("select/step") == [0, 1, 1]
    assert first.column("select/score") == [5.0, 6.0]
    last = next(row for row in first.rows if "select/preferred.path" in row)
    preferred = first.table(last, "select/preferred")
    assert [(line["network"], line["params"], line["macs"]) for line in preferred] == [
        ("1k", 1000, 9000),
        ("2k", 2000, 18000),
    ]
    assert (preferred[0]["depth"], preferred[0]["num_heads"], preferred[0]["mlp_ratio"]) == (2, "1 2", "2 1.5")
    assert (first.folder / "files" / last["select/allocation.path"]).stat().st_size > 0
    (kept,) = first.artifacts("selection")
    names = {entry["path"] for entry in kept["manifest"]["contents"]}
    assert names == {"selection.json", "allocation.png"}


def test_accuracies_are_tables_and_scatters(whole: tuple[RunFolder, list[Attempt]]) -> None:
    _, (_, second) = whole
    for chart in ("val/networks", "result/networks"):
        assert second.charts[chart] == {"x": "params", "y": "top1"}
    validated = [row for row in second.rows if "val/networks_table.path" in row]
    assert [row["val/step"] for row in validated] == [7, 10]
    small, large = second.table(validated[0], "val/networks_table")
    assert small == {
        "network": "small", "params": 1000, "macs": 20000, "top1": 50.0, "top5": 50.0, "loss": 50.0,
        "epoch": 0, "step": 7, "phase": "supernet",
    }  # fmt: skip
    assert (large["network"], large["params"]) == ("large", 3000)
    final = next(row for row in second.rows if "result/networks_table.path" in row)
    lines = second.table(final, "result/networks_table")
    assert [(line["network"], line["top1"], line["top5"]) for line in lines] == [("1k", 61.0, None), ("2k", 61.0, None)]
    summary = {key: value for update in second.of("summary") for key, value in update.get("update", {}).items()}
    assert summary["result/2k/top1"] == 61.0


def test_result_is_an_artifact_whose_files_lie_in_the_run_folder(whole: tuple[RunFolder, list[Attempt]]) -> None:
    folder, (_, second) = whole
    (kept,) = second.artifacts("result")
    contents = {entry["path"]: Path(entry["local_path"]) for entry in kept["manifest"]["contents"]}
    assert set(contents) == {"result.json", "accuracy.png"}
    assert contents["result.json"].read_bytes() == folder.result.read_bytes()
    assert all(path.is_relative_to(folder.path) for path in contents.values())


def test_speeds_have_a_file_of_their_own(whole: tuple[RunFolder, list[Attempt]]) -> None:
    folder, _ = whole
    with folder.metrics.open(newline="") as file:
        metrics = list(csv.DictReader(file))
    with (folder.path / "system.csv").open(newline="") as file:
        system = list(csv.DictReader(file))
    assert not [key for key in metrics[0] if key.startswith("system/")]
    assert list(system[0]) == ["phase", "epoch", "step", "system/images_per_second"]
    places = [("supernet", str(step)) for step in range(8)] + [("retrain", str(step)) for step in range(3)]
    assert [(row["phase"], row["step"]) for row in system] == places
    assert [(row["phase"], row["step"]) for row in metrics if row["train/loss"]] == places


def test_only_rank_0_talks_to_wandb(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    loggers = RunLoggers(offline(["csv", "wandb"]), folder)
    assert [logger.name for logger in loggers.for_phase("supernet", 0, 0)] == ["metrics"]
    loggers.log_selection({"candidates": [], "examined": 0})
    loggers.close()
    assert not list(folder.path.iterdir())


@pytest.mark.parametrize("asked", ["csv", None, [], ["csv"]])
def test_csv_is_always_there(folder: RunFolder, asked: Any) -> None:
    loggers = RunLoggers(Config(logger=asked), folder)
    (metrics,) = loggers.for_phase("supernet", 0, 0)
    metrics.log_metrics({"train/loss": 1.0}, 0)
    loggers.close()
    assert [path.name for path in folder.path.iterdir()] == ["metrics.csv"]


def test_tensorboard_beside_wandb(no_wandb: pytest.MonkeyPatch, folder: RunFolder) -> None:
    loggers = RunLoggers(offline(["tensorboard", "wandb"]), folder)
    train(loggers, "supernet", 0, 0, range(3))
    loggers.close()
    assert list(folder.path.glob("tensorboard/supernet/events.*"))
    (attempt,) = attempts(folder.path)
    assert attempt.column("train/step") == [0, 1, 2]


@pytest.mark.slow
def test_the_counter_of_rows_never_goes_back(no_wandb: pytest.MonkeyPatch, folder: RunFolder) -> None:
    """Also where W&B has written nothing down yet when the job is killed, or its files were synced and deleted."""
    seen: list[int] = []
    for restored in (0, 2, 4):
        loggers = RunLoggers(offline(), folder)
        train(loggers, "supernet", 0, restored, range(restored, restored + 3), validate=False)
        loggers.close()
        (attempt,) = attempts(folder.path)
        counters = [row["_step"] for row in attempt.rows]
        assert counters == sorted(set(counters)) and (not seen or counters[0] > seen[-1])
        seen += counters
        for path in folder.path.glob("wandb/offline-run-*"):
            shutil.rmtree(path)
        time.sleep(1.1)  # W&B names the folder of an attempt after the second in which it began
