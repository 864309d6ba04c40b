"""Strategies that choose architectures; no Lightning here.

The names are imported on first use: `python -m lightning_tas.search` imports this package before it reads its
arguments, and neither `--help` nor a misspelt key should wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tas.search.config import SelectConfig
    from lightning_tas.search.preferred import select_preferred, select_with
    from lightning_tas.search.selection import Candidate, Selection, candidate_labels, cut_space

_HOME = {
    "Candidate": "selection",
    "SelectConfig": "config",
    "Selection": "selection",
    "candidate_labels": "selection",
    "cut_space": "selection",
    "select_preferred": "preferred",
    "select_with": "preferred",
}

__all__ = ["Candidate", "SelectConfig", "Selection", "candidate_labels", "cut_space", "select_preferred", "select_with"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_tas.search' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lightning_tas.search.{_HOME[name]}"), name)
    globals()[name] = value
    return value
