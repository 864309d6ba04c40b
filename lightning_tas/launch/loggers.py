"""The loggers of a job: `metrics.csv` always, TensorBoard and W&B where `logger` asks for them.

Made once per job, because W&B has one run for all phases; only rank 0 talks to it:

    loggers = RunLoggers(config, folder)                        # touches nothing yet
    loggers.start()                                             # optional: begin the W&B run now, not at the first row
    Trainer(
        logger=loggers.for_phase("supernet", index, restored_step),
        callbacks=[..., *loggers.callbacks()],                  # of the phase asked for last
    )
    loggers.log_selection(selection.to_dict(), allocation_picture)       # phase select
    loggers.log_result(result_record, accuracy_picture)                  # phases measure and retrain
    loggers.close(status)                                       # exit status of the job, in a `finally`

`index` counts phases from 0; steps of earlier phases (`study.json`) are added on the axes of W&B, so that no axis
starts again. `restored_step` is the number of updates that the restored checkpoint has seen, 0 without one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Callback
from pytorch_lightning.loggers.logger import Logger

from lightning_tas.errors import UserError
from lightning_tas.launch.metrics import RowBeforeCheckpoint, RunMetrics
from lightning_tas.launch.run_folder import RunFolder, global_rank
from lightning_tas.launch.study import phase_labels, read_study
from lightning_tas.launch.throughput import Throughput
from lightning_tas.launch.wandb_logger import NetworkCosts, WandbPhase, WandbRun, check_wandb, mode

if TYPE_CHECKING:
    from lightning_tas.commands.config import Config


def asked(config: Config) -> list[str]:
    """The names in `logger`."""
    return [config.logger] if isinstance(config.logger, str) else list(config.logger or [])


def check_loggers(config: Config) -> None:
    """UserError, by name, when the package that a logger needs is missing."""
    names = asked(config)
    if "tensorboard" in names and not any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")):
        raise UserError(
            "logger: 'tensorboard' needs the package tensorboard (pip install tensorboard); valid without it: csv"
        )
    if "wandb" in names:
        check_wandb(config)


class RunLoggers:
    """See the module. Making it touches nothing; W&B starts when there is something to log.

    Args:
        config: the resolved recipe.
        folder: the run's folder, which exists and is locked by this job.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.wandb: WandbRun | None = None
        if "wandb" in asked(config) and mode(config) != "disabled" and global_rank() == 0:
            self.wandb = WandbRun(config, folder)
        self._callbacks: list[Callback] = []

    def start(self) -> None:
        """Begin the W&B run, if there is to be one, with its message; otherwise it begins with the first phase."""
        if self.wandb is not None:
            self.wandb.start()

    def for_phase(
        self, phase: str, index: int = 0, restored_step: int | None = None, every: int | None = None
    ) -> list[Logger]:
        """The loggers of one phase; the first writes `metrics.csv`.

        Args:
            phase: its label, a field of every row.
            index: its place in `config.phases`.
            restored_step: rows of this phase from this step on, and of the phases after it, are dropped (None: none).
            every: its `trainer.log_every_n_steps`; None: the recipe's.
        """
        self.start()
        metrics = RunMetrics(self.folder.metrics, phase, restored_step, phase_labels(self.config.phases)[index + 1 :])
        made: list[Logger] = [metrics]
        self._callbacks = [Throughput()]
        if "tensorboard" in asked(self.config):
            from pytorch_lightning.loggers import TensorBoardLogger

            board = TensorBoardLogger(
                save_dir=str(self.folder.path), name="tensorboard", version=phase, purge_step=restored_step
            )
            made.append(board)
        ahead: list[Logger] = []
        if self.wandb is not None:
            costs = NetworkCosts()
            logger = WandbPhase(self.wandb, phase, self._steps_before(index), costs)
            made.append(logger)
            ahead.append(logger)
            self._callbacks.append(costs)
        self._callbacks.append(RowBeforeCheckpoint(metrics, every or self.config.trainer.log_every_n_steps, ahead))
        return made

    def callbacks(self) -> list[Callback]:
        """What the phase that `for_phase` was last called for needs in its Trainer besides loggers."""
        return self._callbacks

    def _steps_before(self, index: int) -> int:
        """Updates in the phases before `index`."""
        if not self.folder.study.exists():
            return 0
        phases = read_study(self.folder.study)["phases"][:index]
        return sum(int(phase["outputs"].get("steps") or 0) for phase in phases)

    def log_selection(self, record: Mapping[str, Any], picture: Path | None = None) -> None:
        """Show a selection (the content of `selection.json`) and its allocation picture."""
        if self.wandb is not None:
            self.wandb.log_selection(record, self.folder.selection, picture)

    def log_result(self, record: Mapping[str, Any], picture: Path | None = None) -> None:
        """Show the specialised networks (the content of `result.json`) and their accuracies."""
        if self.wandb is not None:
            self.wandb.log_result(record, self.folder.result, picture)

    def log_scores(
        self, rows: Sequence[Mapping[str, Any]], pictures: Mapping[str, Path], files: Sequence[Path]
    ) -> None:
        """Show correlations of proxies (the rows of `correlations.csv`), their pictures, and keep `files`."""
        if self.wandb is not None:
            self.wandb.log_scores(rows, pictures, files)

    def log_generation(self, row: Mapping[str, Any]) -> None:
        """Show one generation of a search."""
        if self.wandb is not None:
            self.wandb.log_generation(row)

    def log_search(self, found: Mapping[str, Any], files: Sequence[Path], picture: Path | None) -> None:
        """Show what a search found (the content of `search.json`), its picture, and keep `files`."""
        if self.wandb is not None:
            self.wandb.log_search(found, files, picture)

    def close(self, status: int = 0) -> None:
        """End the W&B run with the exit status of the job; a later job with the same run folder continues it."""
        if self.wandb is not None:
            self.wandb.close(status)
