"""All processes of a run must mean the same: settings, selection, network, sampler, checkpoint.

Where they do not, collectives would hang, or average gradients of different networks without a word. What each
process holds is compared before training, and a difference ends all of them with one message that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from lightning_tas.errors import UserError
from lightning_tas.launch import group

DRAWS = 64
"""So many steps of the sampler are compared, from the first one that is to be trained."""


def compare(what: str, facts: Mapping[str, str]) -> None:
    """Compare this process's facts with those of rank 0. Every process calls it; nothing happens where there is one.

    Args:
        what: opens the message, for example "launch".
        facts: name to a short text.

    Raises:
        UserError: on every process, naming the facts that differ and one process that has others.
    """
    expected = group.broadcast(dict(facts))

    def check() -> None:
        different = [
            f"{name} {facts.get(name)} (process 0: {expected.get(name)})"
            for name in dict.fromkeys([*expected, *facts])
            if facts.get(name) != expected.get(name)
        ]
        if different:
            raise UserError(
                f"{what}: process {group.rank()} differs from process 0: {'; '.join(different)}. All processes need "
                "the same command, files and versions"
            )

    group.together(check)


def flat(settings: Mapping[str, Any], prefix: str = "", leave_out: Iterable[str] = ()) -> dict[str, str]:
    """Nested settings as dotted keys with their values in JSON, without the keys in `leave_out`."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in leave_out:
            continue
        if isinstance(value, Mapping) and value and not prefix:
            found |= flat(value, f"{name}.", leave_out)
        else:
            found[name] = json.dumps(value, default=str)
    return found


class Agreement(Callback):
    """Compare all processes at the start of a fit: network before a strategy wraps it, step and sampler before step 1.

    Args:
        facts: further facts, name to short text (the checkpoint to continue, the configuration's hash).

    Put it behind the callbacks that give the module its candidates.
    """

    def __init__(self, facts: Mapping[str, str] | None = None) -> None:
        self.facts = dict(facts or {})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare what decides the shape of training."""
        if stage == "fit" and trainer.world_size > 1:
            facts = {**self.facts, "network": network_hash(pl_module)}
            candidates = getattr(pl_module, "candidates", None)
            if candidates:
                facts["selection"] = digest([candidate.to_dict() for candidate in candidates])
            compare("launch", facts)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what was restored: the step, and the sub-networks of the steps to come."""
        if trainer.world_size > 1:
            step = trainer.global_step
            facts = {"step": str(step), "epoch": str(trainer.current_epoch)}
            draw = getattr(pl_module, "architectures", None)
            if draw is not None:
                drawn = [[arch.id if arch is not None else None for arch in draw(step + i)] for i in range(DRAWS)]
                facts["sampler"] = digest(drawn)
            compare("launch", facts)


def network_hash(module: LightningModule) -> str:
    """Hash of the names, shapes and types of all parameters and buffers."""
    state = module.state_dict(keep_vars=True)
    return digest([[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()])


def digest(value: Any) -> str:
    """Short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
