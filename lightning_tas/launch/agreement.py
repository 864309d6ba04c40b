"""All processes of a run must mean the same: selection, network, sampler, checkpoint.

Where they do not, collectives would hang, or average gradients of different networks without a word. So they are
compared at the start of every fit, and a difference ends all processes with one message that names it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytorch_lightning import Callback, LightningModule, Trainer

from lightning_tas.launch.compare import compare, digest

DRAWS = 64
"""So many steps of the sampler are compared, from the first one that is to be trained."""


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
