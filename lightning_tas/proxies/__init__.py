"""Zero-cost proxies: scores of untrained networks, one file per idea, and the engine that runs them together.

`score_one` scores one network, `score_many` many; `proxies` lists what there is, `register` adds to it. The package
itself can be called, ``tas.proxies()``, and then is that list.
"""

from __future__ import annotations

import sys
from types import ModuleType

from lightning_tas.proxies.many import score_many
from lightning_tas.proxies.passes import Pass, Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, Proxy, proxies, register
from lightning_tas.proxies.roles import Layer
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.scorer import score_one
from lightning_tas.proxies.table import Scores

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
        return proxies()


sys.modules[__name__].__class__ = _Callable
