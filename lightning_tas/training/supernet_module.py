"""Training a weight-sharing supernet: each step trains the architectures that a sampler gives for it.

The loss of a step is the mean over its architectures (PreNAS's "loss divided by the number of nets") or their sum (S3:
`sampler.reduce`), with one backward (right under DDP and ZeRO); `train.memory_lean` keeps the activations of one
network at a time. Blocks that no architecture of a step uses get no gradient, or a gradient of zero: see
`train.unused`. Under ZeRO-3 a pass through them adds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError, unknown
from lightning_tas.samplers import REDUCE, Sampler, SamplerConfig, build_sampler
from lightning_tas.search import Candidate, candidate_labels
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import ElasticNetwork
from lightning_tas.training.checkpoint import initialise
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.lean import lean_mean
from lightning_tas.training.module import ClassifierModule
from lightning_tas.training.trained import Trained

_MEMORY = 4096
"""Sizes of so many architectures are remembered: lists of candidates are short, draws from a space do not repeat."""


class SupernetModule(ClassifierModule):
    """Trains an elastic network on the architectures of `sampler`.

    Args:
        net: the supernet; ``net.space`` and ``net.options`` go into checkpoints.
        sampler: the architectures of a step; None: built from `sampler_config` when first needed.
        train, global_batch, seed, class_names: see `ClassifierModule`.
        compare_classes: whether `train.from_checkpoint` heeds the names of its classes.
        report: what validation measures, label to architecture; the default is the space's smallest, middle and
            largest, or all candidates.
        sampler_config: settings of the sampler where none is given; it draws from the candidates if
            `set_candidates` has brought some, else from the space, or from what `source` says. `reduce` counts always.

    Logs ``train/loss``, ``train/lr``, ``train/params`` and ``val/<label>/{top1,top5,loss}``.
    """

    kind = "supernet"
    net: ElasticNetwork

    def __init__(
        self,
        net: ElasticNetwork,
        sampler: Sampler | None,
        train: TrainConfig,
        global_batch: int,
        seed: int = 0,
        report: Mapping[str, Architecture] | None = None,
        class_names: Sequence[str] | None = None,
        sampler_config: SamplerConfig | None = None,
        compare_classes: bool = True,
    ) -> None:
        super().__init__(net, train, global_batch, seed, class_names)
        self.candidates: list[Candidate] = []
        self._given = sampler
        self._built: Sampler | None = None
        self._sampler_config = sampler_config if sampler_config is not None else SamplerConfig()
        if self._sampler_config.reduce not in REDUCE:
            raise unknown("sampler.reduce", self._sampler_config.reduce, REDUCE)
        self._report = dict(report) if report is not None else None
        self._sizes: dict[Architecture, int] = {}
        if train.from_checkpoint is not None:
            initialise(net, train.from_checkpoint, self.class_names if compare_classes else None)

    @property
    def space(self) -> SearchSpace:
        """The space of the supernet."""
        return self.net.space

    @property
    def sampler(self) -> Sampler:
        """The sampler in use: the one given, or the one that the settings and the candidates say."""
        if self._given is not None:
            return self._given
        if self._built is None:
            archs = [candidate.arch for candidate in self.candidates] or None
            self._built = build_sampler(self._sampler_config, self.space, archs, self.seed)
            first = self._built(0)
            if not first:
                raise UserError(f"sampler.name: {self._sampler_config.name!r} gives no network for step 0")
            for arch in first:
                self.net.check(arch)
        return self._built

    def set_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Report these networks from now on, and train them; call it before training (a callback's `setup` hook).

        A sampler given to the constructor stays; one that follows from settings is built from the candidates, unless
        `source` is "space".

        Raises:
            UserError: there are none, or the supernet cannot hold one of them.
        """
        if not candidates:
            raise UserError("the selection gave no candidates to train")
        for candidate in candidates:
            self.net.check(candidate.arch)
        self.candidates = list(candidates)
        self._built = None
        self._report = candidate_labels(candidates)

    def architectures(self, step: int) -> list[Architecture]:
        return self.sampler(step)

    @property
    def trained(self) -> Trained:
        """Which networks are trained."""
        config = self._sampler_config
        if self._given is not None:
            config = replace(config, name=type(self._given).__name__.lower())
        return Trained.of(config, self.sampler, self.space, [candidate.arch for candidate in self.candidates])

    def reported(self) -> Mapping[str, Architecture]:
        if self._report is None:
            self._report = space_labels(self.net)
        return self._report

    def on_fit_start(self) -> None:
        super().on_fit_start()
        chosen = [candidate.arch for candidate in self.candidates]
        warning = self.trained.warning(self.reported(), chosen, getattr(self.sampler, "archs", ()))
        if warning is not None:
            rank_zero_warn(warning)
        if self._sharded and not hasattr(self.net, "touch"):
            raise UserError(
                f"trainer.strategy: ZeRO-3 needs a supernet that gives unused parameters gradients of zero (a method "
                f"`touch`), which {type(self.net).__name__} does not; use trainer.strategy=deepspeed_stage_2"
            )

    def mean_loss(self, images: Tensor, targets: Tensor, archs: Sequence[Architecture | None]) -> Tensor:
        """See `ClassifierModule`. Small networks come first: largest last is what saves memory one by one."""
        ordered = sorted(cast(Sequence[Architecture], archs), key=self._size)
        if not torch.is_grad_enabled():
            return super().mean_loss(images, targets, ordered)
        if self.train_config.memory_lean and len(ordered) > 1:
            losses = [partial(self._loss, images, targets, arch) for arch in ordered]
            return lean_mean(losses, self.net.parameters())
        loss = super().mean_loss(images, targets, ordered)
        # ZeRO-3 applies an earlier step's gradients again to parameters that get none.
        return loss + self.net.touch(ordered) if self._sharded else loss

    def scale(self, archs: Sequence[Architecture | None]) -> float:
        """What the mean loss of a step is multiplied by for the backward pass: `sampler.reduce`."""
        return float(len(archs)) if self._sampler_config.reduce == "sum" else 1.0

    def _loss(self, images: Tensor, targets: Tensor, arch: Architecture) -> Tensor:
        return self.criterion(self(images, arch), targets)

    @property
    def _sharded(self) -> bool:
        """Whether ZeRO-3 holds the parameters."""
        return self._trainer is not None and getattr(self._trainer.strategy, "zero_stage_3", False)

    def mean_params(self, archs: Sequence[Architecture | None]) -> float:
        return sum(self._size(cast(Architecture, arch)) for arch in archs) / len(archs)

    def _size(self, arch: Architecture) -> int:
        if arch not in self._sizes:
            if len(self._sizes) >= _MEMORY:
                self._sizes.clear()
            self._sizes[arch] = cost(arch, self.net).params
        return self._sizes[arch]

    def describe(self) -> dict[str, Any]:
        return {
            "space": self.space.to_dict(),
            "model": dict(self.net.options),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "trained": self.trained.to_dict(),
            "report": {label: arch.to_dict() for label, arch in self.reported().items()},
        }

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        if SearchSpace.from_dict(saved["space"]) != self.space:
            raise UserError(f"resume: the checkpoint's supernet is of another space than {self.space.name!r}")
        for key, value in self.net.options.items():
            if saved["model"].get(key) != value:
                raise UserError(f"resume: model.{key} is {value!r}, but {saved['model'].get(key)!r} in the checkpoint")
        before = [entry["arch"] for entry in saved["candidates"]]
        if before != [candidate.arch.to_dict() for candidate in self.candidates]:
            raise UserError("resume: the checkpoint was trained on other candidates than the selection gives now")
        trained = saved.get("trained")  # absent from older files
        if trained is not None and Trained.from_dict(trained) != self.trained:
            raise UserError(f"resume: the checkpoint trains {Trained.from_dict(trained)}, and now it is {self.trained}")


def space_labels(net: ElasticNetwork) -> dict[str, Architecture]:
    """The smallest, a middle and the largest network of a supernet's space.

    The middle one is the median in parameters among 65 of the space drawn with a fixed seed, so that it is a member
    and the same in every run.
    """
    drawn = sorted(net.space.sample(seed=0, n=65), key=lambda arch: (cost(arch, net).params, arch.id))
    return {"smallest": net.space.smallest(), "middle": drawn[32], "largest": net.space.largest()}
