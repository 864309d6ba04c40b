"""Images: data sets, splits, augmentation, and loaders that resume bit for bit.

The names are imported on first use: what commands check of `data.*` before any work must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tas.data.config import DataConfig
    from lightning_tas.data.module import TASDataModule
    from lightning_tas.data.registry import ArrayImages, Facts, ImageData, names, register

_HOME = {
    "ArrayImages": "registry",
    "DataConfig": "config",
    "Facts": "registry",
    "ImageData": "registry",
    "TASDataModule": "module",
    "names": "registry",
    "register": "registry",
}

__all__ = ["ArrayImages", "DataConfig", "Facts", "ImageData", "TASDataModule", "names", "register"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_tas.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lightning_tas.data.{_HOME[name]}"), name)
    globals()[name] = value
    return value
