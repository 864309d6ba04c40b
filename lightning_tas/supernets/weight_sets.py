"""The sets of weights inside a checkpoint, which of them is read, and names without the prefixes of wrappers.

A file may hold several state dicts: live weights and an average of them (``model`` and ``model_ema``, ``state_dict``
and ``state_dict_ema``), a student and a teacher. Any entry whose names are text and whose values are tensors is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_tas.errors import UserError, unknown

AUTO, LIVE, EMA = "auto", "live", "ema"
"""The averaged weights where there are some, else the live ones; the live ones; the averaged ones."""

# Parts of names that DDP, AveragedModel, torch.compile, FSDP, activation checkpoints and Lightning's DeepSpeed add.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# What a module that trains a network usually calls it; taken off where all names begin with it.
HOLDERS = ("model", "net", "network", "backbone", "encoder")
_PREFERRED = ("state_dict", "model", "model_state_dict", "net", "module", "state_dict_ema", "model_ema", "ema")
_NO_WEIGHTS = re.compile(r"optim|sched|scaler|callbacks|loops|hparams|hyper_parameters|^args$")
_AVERAGED = re.compile(r"(^|[^a-z])(ema|swa|avg|average|averaged)([^a-z]|$)")
_DEPTH = 3


def sets_in(content: Mapping[Any, Any], depth: int = _DEPTH) -> dict[str, Mapping[str, Tensor]]:
    """Every state dict inside a checkpoint by its entry, "" for the checkpoint itself; empty where there is none."""
    if not content or not all(isinstance(name, str) for name in content):
        return {}
    if all(isinstance(value, Tensor) for value in content.values()):
        return {"": content}
    found: dict[str, Mapping[str, Tensor]] = {}
    for entry, value in content.items():
        if depth and isinstance(value, Mapping) and not _NO_WEIGHTS.search(entry):
            found |= {f"{entry}.{inner}".rstrip("."): state for inner, state in sets_in(value, depth - 1).items()}
    return found


def choose(names: Collection[str], weights: str = AUTO) -> str:
    """The one of `names` that `weights` means: `AUTO`, `LIVE`, `EMA`, or one of them.

    Raises:
        UserError: an unknown name, nothing of that kind, or several and nothing tells which.
    """
    if weights in names:
        return weights
    if weights not in (AUTO, LIVE, EMA):
        raise unknown("weights", weights, [AUTO, LIVE, EMA, *filter(None, names)])
    averaged = [name for name in names if _AVERAGED.search(name)]
    live = [name for name in names if name not in averaged]
    fit = {AUTO: averaged or live, LIVE: live, EMA: averaged}[weights]
    if not fit:
        kind = "averaged" if weights == EMA else "live"
        raise UserError(f"weights: {weights!r} is not valid: there are no {kind} weights; {_listed(names)}")
    known = [name for name in _PREFERRED if name in fit]
    if len(fit) > 1 and not known:
        raise UserError(f"weights: there are several sets and none is named; {_listed(names)}")
    return fit[0] if len(fit) == 1 else known[0]


def _listed(names: Collection[str]) -> str:
    return f"valid: {', '.join(repr(name) for name in names if name) or repr(AUTO)}"


def unwrapped(state: Mapping[str, Tensor], own: Collection[str] = ()) -> dict[str, Tensor]:
    """`state` without the parts of names that wrappers add, wherever they stand.

    own: the names of the network that is loaded; where all of them fit as they are, nothing is taken off.

    Raises:
        UserError: two names are one without them.
    """
    if own and set(state) <= set(own):
        return dict(state)
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        short = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if short == "n_averaged":  # a counter of torch's AveragedModel
            continue
        if short in found:
            raise UserError(f"checkpoint: {name!r} and another entry are both {short!r} without wrappers' prefixes")
        found[short] = value
    while (root := _root(found)) in HOLDERS and not any(name.startswith(f"{root}.") for name in own):
        found = {name.partition(".")[2]: value for name, value in found.items()}
    return found


def _root(names: Collection[str]) -> str | None:
    """The first part of all names, None where they differ or a name has no other."""
    roots = {name.partition(".")[0] if "." in name else None for name in names}
    return roots.pop() if len(roots) == 1 else None
