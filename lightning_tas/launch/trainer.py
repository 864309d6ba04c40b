"""Build the Lightning Trainer of a phase from the configuration."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_tas.errors import UserError
from lightning_tas.launch import environment
from lightning_tas.launch.loggers import RunLoggers
from lightning_tas.launch.run_folder import RunFolder

if TYPE_CHECKING:
    from lightning_tas.commands.config import CheckpointConfig, Config, TrainerConfig

LAST = "last.ckpt"
FINAL = "final.ckpt"


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with the loss and without the logger's version, which for us is the name of the phase.

    Reading the loss makes the host wait for a GPU, so there the bar moves every 20 batches only; in a file or a pipe
    every movement is a line of its own, so there it moves every 200.
    """

    def __init__(self) -> None:
        moves = 20 if torch.cuda.is_available() else 1
        super().__init__(refresh_rate=moves if sys.stdout.isatty() else 200)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics shown beside the bar."""
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        if "train/loss" in trainer.callback_metrics:
            shown["train/loss"] = f"{trainer.callback_metrics['train/loss'].item():.3f}"
        return shown


class _NoTips(logging.Filter):
    """Drops Lightning's advertisements (and nothing else) from its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Tip: For seamless" not in record.getMessage()


_no_tips = _NoTips()


def checkpoint_callbacks(folder: Path, settings: CheckpointConfig) -> list[Callback]:
    """Keep the newest `keep_last` checkpoints and `last.ckpt`.

    Saved every `every_n_epochs`, and every `every_n_steps` where asked: a step checkpoint in the middle of an epoch
    resumes exactly, because all randomness is a function of counters.
    """

    def saver(**when: Any) -> ModelCheckpoint:
        # monitor=step, mode=max: the newest ones are the best ones.
        return ModelCheckpoint(
            dirpath=folder,
            filename="{epoch:04d}-{step:07d}",
            monitor="step",
            mode="max",
            save_top_k=settings.keep_last,
            save_last=True,
            enable_version_counter=False,
            **when,
        )

    savers: list[Callback] = [saver(every_n_epochs=settings.every_n_epochs, save_on_train_epoch_end=True)]
    if settings.every_n_steps:
        savers.append(saver(every_n_train_steps=settings.every_n_steps))
    return savers


def _settings(settings: TrainerConfig) -> dict[str, Any]:
    """`trainer.*` as Lightning's arguments."""
    given: dict[str, Any] = asdict(settings)
    given["devices"], given["num_nodes"] = environment.fill_in(settings)
    given["plugins"] = [plugin for plugin in (environment.cluster(),) if plugin is not None]
    if settings.strategy == "auto" and world_size(settings) > 1:
        # A supernet step leaves blocks unused: DDP has to look for them.
        given["strategy"] = "ddp_find_unused_parameters_true"
    if given["max_steps"] is None:
        given["max_steps"] = -1
    del given["float32_matmul_precision"]  # a setting of torch, not of Lightning
    return given


def check_trainer(settings: TrainerConfig) -> None:
    """Refuse, before anything is written, what Lightning would refuse when it starts.

    Raises:
        UserError: with Lightning's reason, for example an accelerator that this machine does not have.
    """
    if str(settings.strategy).startswith("deepspeed"):
        try:
            import deepspeed  # noqa: F401  # only whoever asks for it pays for importing it
        except ImportError:
            raise UserError(
                f"trainer.strategy: {settings.strategy!r} needs the package deepspeed (pip install deepspeed); "
                "valid without it: auto, ddp"
            ) from None
    if settings.num_nodes > 1 and not environment.launched():
        raise UserError(
            f"trainer.num_nodes: {settings.num_nodes} needs a launcher on every node, or this one would wait for the "
            "others for ever; start with torchrun or srun"
        )
    try:
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            Trainer(**_settings(settings), logger=False, enable_checkpointing=False, enable_progress_bar=False)
    except (MisconfigurationException, ImportError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"trainer: Lightning refuses these settings: {reason}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
) -> Trainer:
    """The Trainer of phase `index`; `config.trainer` fields go to Lightning under Lightning's own names."""
    loggers = loggers or RunLoggers(config, folder)
    given = _settings(config.trainer)
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(_no_tips)
    made = loggers.for_phase(phase, index, restored_step)
    return Trainer(
        **given,
        logger=made,
        callbacks=[
            *callbacks,
            *loggers.callbacks(),
            *checkpoint_callbacks(folder.checkpoints(index, phase), config.checkpoint),
            ProgressBar(),
        ],
        # Our loaders shard themselves and know the epoch; Lightning's sampler would replace them.
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        default_root_dir=str(folder.path),
    )


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
