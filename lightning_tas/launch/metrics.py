"""`metrics.csv` and `system.csv`: every logged metric of a run, all phases in one file, surviving restarts.

`metrics.csv` holds what is a function of the recipe: a resumed run leaves the file of an uninterrupted one, byte for
byte. Speeds and memory (`system/*`) depend on the machine and the hour, so they have a file of their own.

Lightning's CSVLogger deletes an older file when it starts; here rows are appended, and rows beyond the step that a
checkpoint restored are cut away first.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from lightning_tas.errors import UserError
from lightning_tas.launch.files import write_text, writing
from lightning_tas.launch.run_folder import global_rank

FIXED = ("phase", "epoch", "step")
SYSTEM = "system/"
"""Prefix of the metrics that no two runs share: speeds, memory."""


class CsvRows:
    """Rows of one CSV file that grows by whole lines; a column that is new rewrites the file.

    Args:
        path: the file, created on the first row.
        phase, restored_step, later: see `RunMetrics`.
    """

    def __init__(self, path: Path, phase: str, restored_step: int | None, later: Sequence[str] = ()) -> None:
        self._path, self._phase, self._later = path, phase, set(later)
        self._columns: list[str] = list(FIXED)
        self._recent: list[dict[str, str]] = []  # rows of the newest step
        if path.exists():
            self._open(restored_step)

    def _open(self, restored_step: int | None) -> None:
        rows = self._read()
        self._columns = list(rows[0]) if rows else list(FIXED)
        if restored_step is not None:
            rows = [row for row in rows if row["phase"] not in self._later]
            rows = [row for row in rows if row["phase"] != self._phase or int(row["step"]) < restored_step]
            newest = [row for row in rows if row["phase"] == self._phase and int(row["step"]) == restored_step - 1]
            self._recent = [{key: value for key, value in row.items() if value != ""} for row in newest]
        self._rewrite(rows)

    def _read(self) -> list[dict[str, str]]:
        try:
            text = self._path.read_text(encoding="utf-8")
            # A killed process can leave a last line without its end: it was never logged as a whole.
            rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
            for row in rows:
                if None in row or None in row.values():
                    raise ValueError(f"a row of {row['phase']} has more or fewer columns than the first line")
                int(row["step"] or 0)
        except (UnicodeDecodeError, KeyError, ValueError, csv.Error) as error:
            raise UserError(
                f"resume: {str(self._path)!r} is damaged ({error}); mend it, or move it away: rows go on in a new file"
            ) from None
        return rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self._columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._path, buffer.getvalue())

    def add(self, values: Mapping[str, Any], epoch: int | str, step: int | str) -> None:
        """Append one row, on disk at once: a checkpoint must not know more than the file.

        A row that is there already is not repeated: a run resumed from the end of an epoch's last step measures that
        epoch again, and `RowBeforeCheckpoint` is ahead of Lightning.
        """
        place = {"phase": self._phase, "epoch": epoch, "step": step}
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
        with writing(self._path), self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(row)

    def sync(self) -> None:
        """Wait until the file is on the disk, not only in the machine's memory."""
        if self._path.exists():
            with writing(self._path), self._path.open("rb") as file:
                os.fsync(file.fileno())


class RunMetrics(Logger):
    """Lightning logger that appends to `metrics.csv`, and what is called `system/*` to `system.csv` beside it.

    Args:
        path: the file, created on the first row.
        phase: value of the `phase` column, for example `supernet`.
        restored_step: updates that the restored checkpoint has seen. Lightning counts them from 0, so rows of this
            phase from this step on are dropped (None: keep all).
        later: phases that follow this one and will be run again: their rows are dropped with those.

    Only rank 0 reads or writes.
    """

    def __init__(self, path: Path, phase: str, restored_step: int | None = None, later: Sequence[str] = ()) -> None:
        super().__init__()
        self._folder, self._phase = path.parent, phase
        self._files: dict[bool, CsvRows] = {}
        if global_rank() == 0:
            self._files = {
                False: CsvRows(path, phase, restored_step, later),
                True: CsvRows(path.with_name("system.csv"), phase, restored_step, later),
            }

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return self._phase

    @property
    def log_dir(self) -> str:
        return str(self._folder)

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hyper-parameters are in `config.yaml`; nothing to do here."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row to the file, or to each of the two, that the metrics belong to; tensors become numbers."""
        values = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
        epoch = values.pop("epoch", "")
        for system, file in self._files.items():
            own = {key: value for key, value in values.items() if key.startswith(SYSTEM) == system}
            if own:
                file.add(own, int(epoch) if epoch != "" else "", step if step is not None else "")

    def sync(self) -> None:
        """Make what was logged survive a machine that goes down."""
        for file in self._files.values():
            file.sync()


class RowBeforeCheckpoint(Callback):
    """Writes the row of a training step before the checkpoint of that step, and `metrics.csv` to the disk.

    Lightning logs a step after its checkpoint is saved: killed in between, the resumed run would lack the row.

    Args:
        metrics: knows the rows that it has.
        further: loggers that do not repeat a row which they have either.
        every: `trainer.log_every_n_steps`.
    """

    def __init__(self, metrics: RunMetrics, every: int, further: Sequence[Logger] = ()) -> None:
        self.metrics, self.every, self.further = metrics, every, further

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Log what Lightning is about to log, if it is (`trainer.log_every_n_steps`)."""
        if trainer.training and trainer.global_step % self.every == 0:
            logged = {key: value for key, value in trainer.callback_metrics.items() if key.startswith("train/")}
            if logged:
                row: dict[str, Any] = {**logged, "epoch": trainer.current_epoch}
                for logger in (self.metrics, *self.further):
                    logger.log_metrics(row, trainer.global_step - 1)
        self.metrics.sync()
