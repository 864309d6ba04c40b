"""Checkpoint files of one process and of DDP: written whole or not at all, without a second copy in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_fabric.plugins import TorchCheckpointIO

from lightning_tas.launch.files import write_torch


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a hidden neighbour, then moves it into place; reads like Lightning's own plugin.

    Lightning's first gathers the whole file in memory, as much again as all weights and moments.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            UserError: the file cannot be written (a full disk, say); whatever was at `path` is untouched.
        """
        assert storage_options is None, "checkpoints are written to a file system, which has no options"
        write_torch(path, checkpoint, key="checkpoint")
