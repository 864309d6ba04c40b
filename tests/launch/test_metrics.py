"""`metrics.csv` survives new columns, phases, kills and restarts."""

import csv

import torch

from lightning_tas.launch.metrics import RunMetrics


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_new_metrics_become_columns_and_old_rows_stay(tmp_path):
    path = tmp_path / "metrics.csv"
    logger = RunMetrics(path, "supernet")
    logger.log_metrics({"train/loss": torch.tensor(2.0), "epoch": 0}, step=1)
    logger.save()
    logger.log_metrics({"train/loss": 1.5, "epoch": 0}, step=2)
    logger.log_metrics({"val/top1": 50.0, "epoch": 0}, step=2)
    logger.save()
    logger.finalize("success")
    found = rows(path)
    assert [row["step"] for row in found] == ["1", "2", "2"]
    assert [row["train/loss"] for row in found] == ["2.0", "1.5", ""]
    assert [row["val/top1"] for row in found] == ["", "", "50.0"]


def test_a_second_phase_appends(tmp_path):
    path = tmp_path / "metrics.csv"
    for phase in ("supernet", "retrain"):
        logger = RunMetrics(path, phase)
        logger.log_metrics({"loss": 1.0}, step=5)
        logger.save()
    assert [(row["phase"], row["step"]) for row in rows(path)] == [("supernet", "5"), ("retrain", "5")]


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    def log(logger, steps):
        for step in steps:
            logger.log_metrics({"loss": 1.0 / step, "epoch": step // 4}, step=step)
            logger.save()

    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    log(RunMetrics(whole, "supernet"), range(1, 9))
    log(RunMetrics(cut, "supernet"), range(1, 7))
    with cut.open("a") as file:
        file.write("supernet,1,7,0.14")  # killed in the middle of a line
    log(RunMetrics(cut, "supernet", restored_step=4), range(5, 9))
    assert cut.read_text() == whole.read_text()


def test_restoring_one_phase_keeps_the_rows_of_others(tmp_path):
    path = tmp_path / "metrics.csv"
    first = RunMetrics(path, "supernet")
    first.log_metrics({"loss": 1.0}, step=100)
    first.save()
    RunMetrics(path, "retrain", restored_step=3)
    assert [row["step"] for row in rows(path)] == ["100"]
