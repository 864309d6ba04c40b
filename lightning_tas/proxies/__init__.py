"""Zero-cost proxies: scores of untrained networks, one file per idea, and the engine that runs them together.

`score_one` scores one network, `score_many` many; `proxies` lists what there is, `register` adds to it. The package
itself can be called, ``tas.proxies()``, and then is that list. The names are imported on first use: what commands check
of proxies before any work must not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tas.proxies.many import score_many
    from lightning_tas.proxies.passes import Pass, Watcher
    from lightning_tas.proxies.probe import Measured, Probe, per_block
    from lightning_tas.proxies.registry import Needs, Proxy, proxies, register
    from lightning_tas.proxies.roles import Layer
    from lightning_tas.proxies.score import Score
    from lightning_tas.proxies.scorer import score_one
    from lightning_tas.proxies.table import Scores

_HOME = {
    "Layer": "roles",
    "Measured": "probe",
    "Needs": "registry",
    "Pass": "passes",
    "Probe": "probe",
    "Proxy": "registry",
    "Score": "score",
    "Scores": "table",
    "Watcher": "passes",
    "per_block": "probe",
    "proxies": "registry",
    "register": "registry",
    "score_many": "many",
    "score_one": "scorer",
}

__all__ = [
    "Layer",
    "Measured",
    "Needs",
    "Pass",
    "Probe",
    "Proxy",
    "Score",
    "Scores",
    "Watcher",
    "per_block",
    "proxies",
    "register",
    "score_many",
    "score_one",
]


class _Callable(ModuleType):
    """`lightning_tas.proxies` is both this package and the public function of that name."""

    def __call__(self) -> dict[str, Proxy]:
        found: dict[str, Proxy] = self.proxies()
        return found

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value


sys.modules[__name__].__class__ = _Callable
