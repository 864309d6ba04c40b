"""Training one stand-alone network: from scratch, or from the weights it has inherited from a supernet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.supernets import StandaloneNetwork
from lightning_tas.training.checkpoint import initialise
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.module import ClassifierModule


class RetrainModule(ClassifierModule):
    """Trains a network of `lightning_tas.network` or ``supernet.subnet(arch)`` with the supernet's recipe.

    Args:
        net: the network; ``net.arch`` and ``net.options`` go into checkpoints.
        train: the recipe; `train.from_checkpoint` may be a supernet's checkpoint, then its weights for this
            architecture are inherited, or a network's.
        global_batch, seed, class_names: see `ClassifierModule`.
        compare_classes: whether `train.from_checkpoint` heeds the names of its classes.

    Logs ``train/loss``, ``train/lr`` and ``val/{top1,top5,loss}``.
    """

    kind = "network"
    compiles = True
    net: StandaloneNetwork

    def __init__(
        self,
        net: StandaloneNetwork,
        train: TrainConfig,
        global_batch: int,
        seed: int = 0,
        class_names: Sequence[str] | None = None,
        compare_classes: bool = True,
    ) -> None:
        super().__init__(net, train, global_batch, seed, class_names)
        if train.from_checkpoint is not None:
            initialise(net, train.from_checkpoint, self.class_names if compare_classes else None)

    def architectures(self, step: int) -> list[Architecture | None]:
        return [None]

    def reported(self) -> Mapping[str, Architecture | None]:
        return {"": None}

    def name_architecture(self, arch: Architecture | None) -> str:
        return super().name_architecture(self.net.arch)

    def describe(self) -> dict[str, Any]:
        return {"arch": self.net.arch.to_dict(), "model": dict(self.net.options)}

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        if Architecture.from_dict(saved["arch"]) != self.net.arch:
            raise UserError("resume: the checkpoint's network has another architecture")
