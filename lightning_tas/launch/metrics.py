"""`metrics.csv`: every logged metric of a run, all phases in one file, surviving restarts.

Lightning's CSVLogger deletes an older file when it starts; here rows are appended, and rows beyond the step that a
checkpoint restored are cut away first, so that a resumed run leaves the file of an uninterrupted one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from lightning_tas.launch.files import write_text
from lightning_tas.launch.run_folder import global_rank

FIXED = ("phase", "epoch", "step")


class RunMetrics(Logger):
    """Lightning logger that appends to one CSV file.

    Args:
        path: the file, created on the first row.
        phase: value of the `phase` column, for example `supernet`.
        restored_step: updates that the restored checkpoint has seen. Lightning counts them from 0, so rows of this
            phase from this step on are dropped (None: keep all).
    """

    def __init__(self, path: Path, phase: str, restored_step: int | None = None) -> None:
        super().__init__()
        self._path, self._phase = path, phase
        self._columns: list[str] = list(FIXED)
        self._recent: list[dict[str, str]] = []  # rows of the newest step
        if path.exists() and global_rank() == 0:
            self._open(restored_step)

    def _open(self, restored_step: int | None) -> None:
        text = self._path.read_text(encoding="utf-8")
        # A killed process can leave a last line without its end: it was never logged as a whole.
        rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
        self._columns = list(rows[0]) if rows else list(FIXED)
        if restored_step is not None:
            rows = [row for row in rows if row["phase"] != self._phase or int(row["step"]) < restored_step]
            newest = [row for row in rows if row["phase"] == self._phase and int(row["step"]) == restored_step - 1]
            self._recent = [{key: value for key, value in row.items() if value != ""} for row in newest]
        self._rewrite(rows)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self._columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._path, buffer.getvalue())

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return self._phase

    @property
    def log_dir(self) -> str:
        return str(self._path.parent)

    @property
    def save_dir(self) -> str:
        return str(self._path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hyper-parameters are in `config.yaml`; nothing to do here."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one row; tensors become numbers. On disk at once: a checkpoint must not know more than the file.

        A row that is there already is not repeated: a run resumed from the end of an epoch's last step measures that
        epoch again, and `RowBeforeCheckpoint` is ahead of Lightning.
        """
        values = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
        epoch = values.pop("epoch", "")
        place = {
            "phase": self._phase,
            "epoch": int(epoch) if epoch != "" else "",
            "step": step if step is not None else "",
        }
        row = {key: str(value) for key, value in {**place, **values}.items()}
        if row in self._recent:
            return
        self._recent = [earlier for earlier in self._recent if earlier["step"] == row["step"]] + [row]
        self._append(row)

    def _append(self, row: dict[str, str]) -> None:
        unseen = [key for key in row if key not in self._columns]
        if unseen or not self._path.exists():
            earlier = []
            if self._path.exists():
                earlier = list(csv.DictReader(io.StringIO(self._path.read_text(encoding="utf-8"))))
            self._columns += unseen
            self._rewrite([*earlier, row])
            return
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(row)


class RowBeforeCheckpoint(Callback):
    """Writes the row of a training step before the checkpoint of that step.

    Lightning logs a step after its checkpoint is saved: killed in between, the resumed run would lack the row.
    """

    def __init__(self, metrics: RunMetrics, every: int) -> None:
        self.metrics, self.every = metrics, every

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Log what Lightning is about to log, if it is (`trainer.log_every_n_steps`)."""
        if not trainer.training or trainer.global_step % self.every:
            return
        logged = {key: value for key, value in trainer.callback_metrics.items() if key.startswith("train/")}
        if logged:
            self.metrics.log_metrics({**logged, "epoch": trainer.current_epoch}, trainer.global_step - 1)
