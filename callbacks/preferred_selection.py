"""PreNAS inside `Trainer.fit`: select the preferred architectures, then train only those.

Selection is a pure function of (initial supernet, settings, seed). It runs in `setup`, before a strategy wraps the
module, on rank 0 and on a private copy of the supernet; every rank receives that one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from lightning_tas.callbacks.contract import check_module
from lightning_tas.errors import UserError
from lightning_tas.launch.files import make_folder, write_json
from lightning_tas.launch.results import read_selection
from lightning_tas.search import Selection
from lightning_tas.search.config import SelectConfig
from lightning_tas.search.preferred import select_with

Batch = tuple[torch.Tensor, torch.Tensor]


def selection_hash(record: dict[str, Any]) -> str:
    """Hash of what a selection decides: everything in `selection.json` but its timing."""
    decided = {key: value for key, value in record.items() if key != "timing"}
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


class PreferredSelection(Callback):
    """Run the PreNAS selector before training and hand its candidates to the module.

    Args:
        select: settings of the selector (mode, bins, allocation, ...).
        seed: seed of the data-free batch.
        path: `selection.json`; read if it exists (a resumed run, or a selection made earlier), written otherwise.
            None keeps the selection in memory only.
        batch: returns (images (B, C, H, W), targets (B,)) for `select.images="data"`; default: the first training
            images of the data module without augmentation.

    The module must offer `net` (the supernet) and `set_candidates(candidates)`.
    """

    def __init__(
        self,
        select: SelectConfig,
        seed: int,
        path: Path | str | None = None,
        batch: Callable[[int], Batch] | None = None,
    ) -> None:
        self.select, self.seed, self.batch = select, seed, batch
        self.path = Path(path) if path is not None else None
        self.selection: Selection | None = None
        self._restored_hash: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Select on rank 0, share, configure sampler and validation."""
        if stage != "fit":
            return
        check_module(pl_module, "select", candidates=True)
        mine = self._record(trainer, pl_module) if trainer.is_global_zero else None
        record: dict[str, Any] = trainer.strategy.broadcast(mine)  # type: ignore[arg-type]  # rank 0 has one
        if self._restored_hash is not None and self._restored_hash != selection_hash(record):
            raise UserError(f"resume: {self.path} is not the selection that the checkpoint was trained with")
        self.selection = Selection.from_dict(record)
        pl_module.set_candidates(self.selection)  # type: ignore[operator]  # SupernetModule's contract
        rank_zero_info(f"PreNAS: {len(self.selection.candidates)} preferred architectures")

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if self.path is not None and self.path.exists():
            return read_selection(self.path).to_dict()
        batch = self.batch
        if batch is None and self.select.images == "data":
            batch = getattr(getattr(trainer, "datamodule", None), "selection_batch", None)
        record = make_selection(pl_module.net, self.select, self.seed, batch).to_dict()  # type: ignore[arg-type]
        if self.path is not None:
            make_folder(self.path.parent, "selection")
            write_json(self.path, record)
        return record

    def state_dict(self) -> dict[str, Any]:
        """The hash of the selection, so that a checkpoint is never continued with another one."""
        return {"hash": selection_hash(self.selection.to_dict())} if self.selection else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare the hash of a checkpoint with the selection in use."""
        self._restored_hash = state_dict.get("hash")
        if self.selection is None or self._restored_hash is None:
            return
        if self._restored_hash != selection_hash(self.selection.to_dict()):
            raise UserError(f"resume: {self.path} is not the selection that the checkpoint was trained with")


def make_selection(
    net: torch.nn.Module, select: SelectConfig, seed: int, batch: Callable[[int], Batch] | None = None
) -> Selection:
    """Run the selector with `select` on a private copy of `net`; `batch(n)` supplies images where data is asked for."""
    images: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    if select.images == "data":
        if batch is None:
            raise UserError(
                "select.images: 'data' needs images: a data module with selection_batch(number), or the callback's "
                "batch=; valid without: gaussian"
            )
        images, targets = batch(select.batch_size)
    try:
        return select_with(select, net, images=images, targets=targets, seed=seed, progress=True)
    except UserError as error:
        raise as_setting(error) from None


def as_setting(error: UserError) -> UserError:
    """The selector names its arguments (margin, limits, ...); a recipe has them as keys of `select`."""
    argument, colon, reason = str(error).partition(":")
    if argument == "limits":
        return UserError(f"select.low, select.high:{reason}")
    if colon and hasattr(SelectConfig, argument):
        return UserError(f"select.{argument}:{reason}")
    return UserError(f"select: {error}")
