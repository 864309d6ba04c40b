"""lightning_tas: train and search Transformers on PyTorch Lightning.

The public names below are imported on first use, so that `import lightning_tas` and `--help` of a command cost
milliseconds and not a second of torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tas.errors import UserError
from lightning_tas.version import __version__

if TYPE_CHECKING:
    from lightning_tas import proxies
    from lightning_tas.architecture import Architecture, Block, Stage
    from lightning_tas.costs import Cost, cost
    from lightning_tas.proxies import Score, Scores, score_many, score_one
    from lightning_tas.search import Candidate, Selection, select_preferred
    from lightning_tas.spaces import SearchSpace, space
    from lightning_tas.supernets import network, supernet

# The folders callbacks/ and recipes/ lie beside this one in a checkout and inside it once installed. The plain
# checkout, `python -m lightning_tas.fit` without any installation, needs to be told.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "callbacks").is_dir() and (_HERE.parent / "pyproject.toml").is_file():
    __path__.append(str(_HERE.parent))

_HOME = {
    "Architecture": "architecture",
    "Block": "architecture",
    "Candidate": "search",
    "Cost": "costs",
    "Score": "proxies",
    "Scores": "proxies",
    "SearchSpace": "spaces",
    "Selection": "search",
    "Stage": "architecture",
    "cost": "costs",
    "network": "supernets",
    "proxies": "proxies",
    "score_many": "proxies",
    "score_one": "proxies",
    "select_preferred": "search",
    "space": "spaces",
    "supernet": "supernets",
}

__all__ = [
    "Architecture",
    "Block",
    "Candidate",
    "Cost",
    "Score",
    "Scores",
    "SearchSpace",
    "Selection",
    "Stage",
    "UserError",
    "__version__",
    "cost",
    "network",
    "proxies",
    "score_many",
    "score_one",
    "select_preferred",
    "space",
    "supernet",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_tas' has no attribute {name!r}")
    module = importlib.import_module(f"lightning_tas.{_HOME[name]}")
    if _HOME[name] == name:
        return module  # a package that can be called; importing it has set the attribute already
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
