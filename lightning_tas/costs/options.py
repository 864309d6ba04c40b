"""What a cost is, and what it depends on besides the architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown
from lightning_tas.families import Rules

IntArray = npt.NDArray[np.int64]
CountRPE = Literal[False, "explicit", "executed"]


class Cost(NamedTuple):
    """Parameters, and multiply-accumulates for one image, of one architecture."""

    params: int
    macs: int


class Costs(NamedTuple):
    """The same for many architectures, int64 arrays of shape (N,)."""

    params: IntArray
    macs: IntArray


@dataclass(frozen=True)
class CostOptions:
    """What the cost depends on besides the architecture: the build options of a network and the RPE convention.

    None stands for what the networks of the family have; `resolve` fills it in.
    """

    img_size: tuple[int, int] = (224, 224)
    num_classes: int = 1000
    in_chans: int = 3
    patch_size: int = 16
    patch_stride: int | None = None
    relative_position: bool | None = None
    abs_pos: bool = True
    qkv_bias: bool = True
    pool: str = "avg"
    pre_norm: bool = True
    count_rpe: CountRPE = False

    def __post_init__(self) -> None:
        if self.pool not in ("avg", "token"):
            raise unknown("pool", self.pool, ("avg", "token"))
        if self.count_rpe not in (False, "explicit", "executed"):
            raise unknown("count_rpe", self.count_rpe, ("False", "explicit", "executed"))
        for name, least in (("patch_size", 1), ("patch_stride", 1), ("in_chans", 1), ("num_classes", 0)):
            value = getattr(self, name)
            if name == "patch_stride" and value is None:
                continue
            if not isinstance(value, Integral) or value < least:
                raise UserError(f"{name}: {value!r} is not valid; it must be a whole number of at least {least}")
        if len(self.img_size) != 2 or not all(isinstance(side, Integral) for side in self.img_size):
            raise UserError(f"img_size: {self.img_size!r} is not valid; expected a side in pixels or (height, width)")
        if min(self.grid) < 1:
            raise UserError(f"img_size: {self.img_size} is smaller than one patch of {self.patch_size} pixels")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per (column, row)."""
        stride = self.patch_stride or self.patch_size
        gh, gw = ((side - self.patch_size) // stride + 1 for side in self.img_size)
        return gh, gw

    @property
    def tokens(self) -> int:
        """Patches plus the class token (which attends whatever the pooling is)."""
        return self.grid[0] * self.grid[1] + 1

    def resolve(self, rules: Rules) -> CostOptions:
        """The options of a network of this family; `UserError` for what it does not have."""
        stride = rules.stride(self.patch_size) if self.patch_stride is None else self.patch_stride
        return replace(self, patch_stride=stride, relative_position=rules.relative(self.relative_position))
