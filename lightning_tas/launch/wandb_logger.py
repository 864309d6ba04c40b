"""W&B, imported only when a recipe asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tas.errors import UserError
from lightning_tas.launch.run_folder import RunFolder

if TYPE_CHECKING:
    from pytorch_lightning.loggers import WandbLogger

    from lightning_tas.commands.config import Config


def check_wandb() -> None:
    """UserError, by name, when the package is missing."""
    try:
        import wandb  # noqa: F401  # fails here, and not inside Lightning
    except ImportError:
        raise UserError("logger: 'wandb' needs the package wandb (pip install wandb); valid without it: csv") from None


def wandb_logger(config: Config, folder: RunFolder, phase: str) -> WandbLogger:
    """One W&B run per job, named after the run folder; `phase` is a field of its configuration."""
    check_wandb()
    from pytorch_lightning.loggers import WandbLogger

    settings = config.wandb
    return WandbLogger(
        name=settings.name or folder.path.name,
        project=settings.project,
        entity=settings.entity,
        save_dir=str(folder.path),
        id=f"{folder.path.parent.name}-{folder.path.name}",
        offline=settings.mode == "offline",
        mode=settings.mode if settings.mode != "offline" else None,
        config={"phase": phase},
    )
