"""Build the Lightning Trainer of a phase from the configuration."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_tas.errors import UserError
from lightning_tas.launch import environment, group
from lightning_tas.launch.checkpoint_io import AtomicCheckpointIO
from lightning_tas.launch.checkpoints import RunCheckpoints
from lightning_tas.launch.loggers import RunLoggers
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.launch.strategies import build_strategy, check_strategy, prepare_deepspeed

if TYPE_CHECKING:
    from lightning_tas.commands.config import Config, TrainerConfig
    from lightning_tas.training.config import TrainConfig

FINAL = "final.ckpt"
# What libraries say of themselves and of each other, and no user can change.
_NOT_OURS = (
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.11 and later
    r"barrier\(\): using the device under current context",  # Lightning and DeepSpeed on nccl
)


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with the loss and the time left of the phase, without the logger's version, which is its name.

    Reading the loss makes the host wait for a GPU, so there the bar moves every 20 batches only; in a file or a pipe
    every movement is a line of its own, so there it moves every 200.
    """

    def __init__(self) -> None:
        moves = 20 if torch.cuda.is_available() else 1
        super().__init__(refresh_rate=moves if sys.stdout.isatty() else 200)
        self._began, self._from, self._steps = time.monotonic(), 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember when training began, and how many steps it has."""
        super().on_train_start(trainer, pl_module)
        self._began, self._from = time.monotonic(), trainer.global_step
        self._steps = float(trainer.estimated_stepping_batches)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics shown beside the bar."""
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        done = trainer.global_step - self._from
        if done > 0 and math.isfinite(self._steps):  # Lightning's own times are those of the epoch
            left = (time.monotonic() - self._began) * max(0.0, self._steps - trainer.global_step) / done
            shown["phase left"] = Tqdm.format_interval(left)
        if "train/loss" in trainer.callback_metrics:
            shown["train/loss"] = f"{trainer.callback_metrics['train/loss'].item():.3f}"
        return shown


class _NoTips(logging.Filter):
    """Drops Lightning's advertisements (and nothing else) from its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Tip: For seamless" not in record.getMessage()


_no_tips = _NoTips()


def accelerator(settings: TrainerConfig) -> str:
    """`trainer.accelerator` with "auto" resolved: "cuda" where this machine has it, else "cpu"."""
    if settings.accelerator in ("auto", "gpu", "cuda"):
        return "cuda" if torch.cuda.is_available() or settings.accelerator != "auto" else "cpu"
    return settings.accelerator


def settings_of(settings: TrainerConfig) -> dict[str, Any]:
    """`trainer.*` as Lightning's arguments, but for the strategy."""
    given: dict[str, Any] = asdict(settings)
    given["devices"], given["num_nodes"] = environment.fill_in(settings)
    if given["max_steps"] is None:
        given["max_steps"] = -1
    del given["float32_matmul_precision"]  # a setting of torch, not of Lightning
    del given["strategy"]
    return given


def check_trainer(settings: TrainerConfig, train: TrainConfig) -> None:
    """Refuse, before anything is written, what would train wrongly and what Lightning would refuse when it starts.

    Raises:
        UserError: with the reason, for example an accelerator that this machine does not have.
    """
    check_strategy(settings.strategy, train, accelerator(settings), settings.precision)
    if settings.strategy.startswith("deepspeed"):
        prepare_deepspeed(accelerator(settings) == "cpu")
    if settings.num_nodes > 1 and not environment.launched():
        raise UserError(
            f"trainer.num_nodes: {settings.num_nodes} needs a launcher on every node, or this one would wait for the "
            "others for ever; start with torchrun or srun"
        )
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            Trainer(
                **settings_of(settings),
                strategy="auto",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
            )
    except (MisconfigurationException, ImportError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"trainer: Lightning refuses these settings: {reason}") from None


@contextlib.contextmanager
def deterministic(asked: bool | str) -> Iterator[None]:
    """Run all phases of a command as `trainer.deterministic` says, those without a Trainer too; then as it was before.

    Put it around the first operation on a GPU: cuBLAS reads its variable, which child processes inherit, only then.
    """
    mode, name = torch.get_deterministic_debug_mode(), "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(name)
    torch.use_deterministic_algorithms(bool(asked), warn_only=asked == "warn")
    if asked:
        os.environ.setdefault(name, ":4096:8")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing below a warning is logged: Lightning announces its devices whenever a Trainer is made."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def build_trainer(
    config: Config,
    folder: RunFolder,
    index: int,
    phase: str,
    callbacks: Sequence[Callback] = (),
    restored_step: int | None = None,
    loggers: RunLoggers | None = None,
    find_unused: bool = True,
) -> Trainer:
    """The Trainer of phase `index`; `config.trainer` fields go to Lightning under Lightning's own names.

    `find_unused`: whether a step may leave parameters without a gradient, for which DDP has to look then.
    """
    settings = config.trainer
    loggers = loggers or RunLoggers(config, folder)
    strategy = build_strategy(settings.strategy, world_size(settings), accelerator(settings), find_unused)
    plugins: list[Any] = [plugin for plugin in (environment.cluster(),) if plugin is not None]
    if not settings.strategy.startswith("deepspeed"):
        plugins.append(AtomicCheckpointIO())  # DeepSpeed writes for itself
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(_no_tips)
    for message in _NOT_OURS:
        warnings.filterwarnings("ignore", message=message)
    made = loggers.for_phase(phase, index, restored_step, settings.log_every_n_steps)
    return Trainer(
        **settings_of(settings),
        strategy=strategy,
        plugins=plugins,
        logger=made,
        callbacks=[
            *callbacks,
            *loggers.callbacks(),
            RunCheckpoints(folder.checkpoints(index, phase), config.checkpoint),
            ProgressBar(),
        ],
        # Our loaders shard themselves and know the epoch; Lightning's sampler would replace them.
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        default_root_dir=str(folder.path),
    )


def start_processes(settings: TrainerConfig) -> None:
    """Have the processes that `trainer.devices` asks for, where neither a launcher nor a fit has started them.

    So a run that is resumed between two fits works with as many as it did before, and computes the same.
    """
    if environment.launched() or group.size() > 1 or world_size(settings) == 1:
        return
    with warnings.catch_warnings(), quiet():
        trainer = Trainer(
            **settings_of(settings),
            strategy="ddp",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        assert trainer.strategy.launcher is not None
        trainer.strategy.launcher.launch(trainer.strategy.setup_environment, trainer=trainer)


def world_size(settings: TrainerConfig) -> int:
    """Number of processes that `trainer.devices` and `trainer.num_nodes` mean on this machine."""
    devices, num_nodes = environment.fill_in(settings)
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        gpus = torch.cuda.device_count() if settings.accelerator in ("auto", "gpu", "cuda") else 0
        per_node = max(gpus, 1)
    else:
        per_node = devices if isinstance(devices, int) else len(cast(Sequence[int], devices))
    return per_node * num_nodes
