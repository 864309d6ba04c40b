"""Lightning callbacks that connect proxies and search strategies to training; installed as `lightning_tas.callbacks`.

from lightning_tas.callbacks import EvolutionSearch, PreferredSelection, ProxyScoring
"""

from __future__ import annotations

import importlib
from typing import Any

_SEARCHES = (
    "AnySearch", "BlockwiseEvolution", "EtasSearch", "EvolutionSearch", "ExactSearch", "RandomSearch", "SearchCallback",
)  # fmt: skip
_HOME = {
    "PreferredSelection": "preferred_selection",
    "ProxyScoring": "proxy_scoring",
    **dict.fromkeys(_SEARCHES, "searches"),
}
__all__ = [
    "AnySearch",
    "BlockwiseEvolution",
    "EtasSearch",
    "EvolutionSearch",
    "ExactSearch",
    "PreferredSelection",
    "ProxyScoring",
    "RandomSearch",
    "SearchCallback",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_tas.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_tas.callbacks.{_HOME[name]}"), name)
