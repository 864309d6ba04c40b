"""What weight-sharing supernets of every family share: they hold no current sub-network, and can hand one over.

A family adds its layers, `check`, `forward_features` and `subnet_state`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.families import RULES
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.elastic import ElasticLinear
from lightning_tas.supernets.elastic_blocks import ElasticBlock
from lightning_tas.supernets.image_network import ImageNetwork, StandaloneNetwork

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


@dataclass(frozen=True)
class Step:
    """One part of a sub-network's forward pass: ``run(tokens)``, or of images for the first one.

    After equal steps (by `key`), a step with an equal key computes the same: sub-networks can share it.
    """

    key: Hashable
    run: Callable[[Tensor], Tensor]


class ElasticNetwork(ImageNetwork, ABC):
    """A supernet over `space`, of the sizes in ``space.allocated``; `options` are those of `NetOptions`.

    `UserError` for impossible options, images of another size and architectures that the allocated weights cannot
    hold; plain `ValueError` when no architecture is given.
    """

    families: tuple[str, ...]  # whose spaces the class serves
    _linear = ElasticLinear
    _alone: Callable[..., StandaloneNetwork]  # class of the stand-alone networks

    def __init__(self, space: SearchSpace, **options: Any) -> None:
        super().__init__()
        if space.family not in self.families:
            raise UserError(
                f"space: family {space.family!r} does not fit a supernet of family {' or '.join(self.families)}"
            )
        if options.get("allocated") is not None:
            raise UserError("allocated: a supernet's sizes come from its space; set space.allocated")
        self.space = space
        self.rules = RULES[space.family]
        self.allocated: dict[str, Any] = dict(space.allocated)
        self._options = NetOptions.read(options, self.rules)
        self.num_classes = self._options.num_classes
        self.bias_rule = self._options.bias_rule

    @property
    def options(self) -> dict[str, Any]:
        """The JSON-able build options: the class with ``net.space`` and them is the same supernet, fresh."""
        return {**super().options, "bias_rule": self.bias_rule}

    @property
    @abstractmethod
    def stage_blocks(self) -> list[nn.ModuleList]:
        """The blocks of every stage."""

    @property
    @abstractmethod
    def stage_grids(self) -> list[tuple[int, int]]:
        """The patch grid of every stage."""

    @property
    def depths(self) -> tuple[int, ...]:
        """How many blocks are allocated per stage."""
        return tuple(len(blocks) for blocks in self.stage_blocks)

    @abstractmethod
    def check(self, arch: Architecture) -> None:
        """`UserError` naming quantity, value and maximum when the allocated weights cannot hold `arch`."""

    @abstractmethod
    def steps(self, arch: Architecture) -> list[Step]:
        """The forward pass of `arch` from images up to the last block's tokens, step by step."""

    def forward_features(self, x: Tensor, arch: Architecture) -> Tensor:
        """Images to the sub-network's tokens after the final norm, (B, N, d)."""
        for step in self.steps(arch):
            x = step.run(x)
        return self.finish(x)

    @abstractmethod
    def finish(self, x: Tensor) -> Tensor:
        """The last block's tokens after the final norm."""

    @abstractmethod
    def subnet_state(self, arch: Architecture) -> dict[str, Tensor]:
        """Copies of the weights that `arch` uses, as the state dict of its stand-alone network."""

    def _refuse(self, name: str, value: float, limit: float) -> None:
        if value > limit:
            raise UserError(f"{name}: {value} exceeds what supernet {self.space.name!r} allocates, {limit}")

    def forward(self, x: Tensor, arch: Architecture | None = None) -> Tensor:
        """Logits (B, num_classes) of the sub-network `arch` on images (B, C, H, W)."""
        if arch is None:
            raise ValueError("a supernet holds no current sub-network: call net(x, arch) with an architecture")
        return self.forward_head(self.forward_features(x, arch))

    def _block(self, block: nn.Module, num_heads: int, mlp_ratio: float, x: Tensor) -> Tensor:
        return self._run(block, x, num_heads, mlp_ratio, self.bias_rule)

    def touch(self, archs: Sequence[Architecture]) -> Tensor:
        """Zero, as a scalar, with a graph through every parameter that no network of `archs` uses.

        Added to a loss it changes no value and gives those parameters gradients of exactly zero: what ZeRO-3 needs,
        which otherwise applies an earlier step's gradients again. Blocks are the only parts that networks leave out;
        each one costs a pass of a single image of zeros, at its full size.
        """
        total = self.cls_token.new_zeros(())
        for s, (blocks, grid) in enumerate(zip(self.stage_blocks, self.stage_grids, strict=True)):
            for block in blocks[max((arch.depths[s] for arch in archs), default=0) :]:
                assert isinstance(block, ElasticBlock)
                total = total + block.touch(1 + math.prod(grid))
        return total

    def subnet(self, arch: Architecture) -> StandaloneNetwork:
        """The stand-alone network of `arch` with copied weights, in this network's mode; draws no random numbers."""
        self.check(arch)
        options = {**self.options, "allocated": self.allocated, "bias_rule": "regroup"}
        with torch.device("meta"), _Unfilled():
            net = self._alone(arch, **options)
        net.load_state_dict(self.subnet_state(arch), assign=True)
        return net.train(self.training)

    def copied(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies of slices of the shared weights, without their graph; what is a copy already stays."""
        shared = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
        copies = {}
        for key, value in state.items():
            kept = value.is_contiguous() and value.untyped_storage().data_ptr() not in shared
            copies[key] = value.detach() if kept else value.detach().clone(memory_format=torch.contiguous_format)
        return copies


class _Unfilled(TorchFunctionMode):
    """Layers made inside are not initialised: on the meta device that takes as long as all the rest."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
