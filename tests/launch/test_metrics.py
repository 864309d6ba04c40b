"""`metrics.csv` survives new columns, phases, kills and restarts."""

import csv

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_tas.launch.metrics import RowBeforeCheckpoint, RunMetrics


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
            logger.log_metrics({"loss": 1.0 / (step + 1), "epoch": step // 4}, step=step)
            logger.save()

    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    log(RunMetrics(whole, "supernet"), range(8))
    log(RunMetrics(cut, "supernet"), range(6))
    with cut.open("a") as file:
        file.write("supernet,1,6,0.14")  # killed in the middle of a line
    log(RunMetrics(cut, "supernet", restored_step=4), range(4, 8))  # four updates: steps 0 to 3
    assert cut.read_text() == whole.read_text()


def test_restoring_one_phase_keeps_the_rows_of_others(tmp_path):
    path = tmp_path / "metrics.csv"
    first = RunMetrics(path, "supernet")
    first.log_metrics({"loss": 1.0}, step=100)
    first.save()
    RunMetrics(path, "retrain", restored_step=3)
    assert [row["step"] for row in rows(path)] == ["100"]


def test_restarting_a_phase_drops_the_rows_of_those_after_it(tmp_path):
    """`resume=` may name a checkpoint of an earlier phase: what follows is run, and logged, again."""
    path = tmp_path / "metrics.csv"
    for phase in ("supernet", "retrain"):
        logger = RunMetrics(path, phase)
        for step in range(4):
            logger.log_metrics({"loss": 1.0, "system/speed": 2.0}, step)
    RunMetrics(path, "supernet", restored_step=2, later=["retrain"])
    for file in (path, path.with_name("system.csv")):
        assert [(row["phase"], row["step"]) for row in rows(file)] == [("supernet", "0"), ("supernet", "1")]


def test_a_row_is_on_disk_at_once_and_never_twice(tmp_path):
    path = tmp_path / "metrics.csv"
    logger = RunMetrics(path, "supernet")
    for _ in range(2):
        logger.log_metrics({"train/loss": 2.0, "epoch": 0}, step=3)
    logger.log_metrics({"val/top1": 50.0, "epoch": 0}, step=3)
    assert [row["step"] for row in rows(path)] == ["3", "3"]
    # Resumed from the checkpoint of step 3, before its validation: the epoch is measured again.
    again = RunMetrics(path, "supernet", restored_step=4)
    again.log_metrics({"val/top1": 50.0, "epoch": 0}, step=3)
    assert [row["step"] for row in rows(path)] == ["3", "3"]


def test_a_phase_without_a_checkpoint_starts_its_rows_again(tmp_path):
    path = tmp_path / "metrics.csv"
    RunMetrics(path, "supernet").log_metrics({"loss": 1.0}, step=0)
    RunMetrics(path, "supernet", restored_step=0)
    assert rows(path) == []


def test_the_row_of_a_step_comes_before_its_checkpoint(tmp_path):
    """Lightning saves first and logs then; a run killed in between would lack the row."""
    path, seen = tmp_path / "metrics.csv", {}

    class Look(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            seen[trainer.global_step] = len(rows(path)) if path.exists() else 0

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch, batch_idx):
            self.log("train/loss", self.weight.sum())
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    metrics = RunMetrics(path, "supernet")
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        max_steps=6, accelerator="cpu", logger=[metrics], log_every_n_steps=2, enable_progress_bar=False,
        callbacks=[RowBeforeCheckpoint(metrics, 2), Look(), saver], enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(range(6)))
    assert seen == {step: step // 2 for step in range(1, 7)}
    assert [row["step"] for row in rows(path)] == ["1", "3", "5"]
