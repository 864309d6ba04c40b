"""Options that build a vision network: what a user writes under `model.*`, and their checked, JSON-able form.

`ModelConfig` is the part that a recipe sets; `NetOptions` adds what the data decide (classes, size, channels) and what
a sub-network inherits from its supernet. One table of defaults serves supernets, stand-alone networks and recipes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_tas.errors import UserError, unknown

POOLS = ("avg", "token")
BIAS_RULES = ("regroup", "autoformer")


@dataclass
class ModelConfig:
    """Options of the network itself; defaults are those of the published AutoFormer and PreNAS supernets."""

    relative_position: bool = True  # 2-D relative position tables on keys and values
    abs_pos: bool = True  # learned absolute positions
    qkv_bias: bool = True
    pool: str = "avg"  # "avg": mean of the patch tokens (class token excluded); "token": class token
    pre_norm: bool = True  # False: LayerNorm after each residual sum and none at the end
    scale: bool = False  # multiply MLP output by r_max / r and attention output by d_max / q
    patch_size: int = 16
    drop_rate: float = 0.0  # of a network of the supernet's width; a sub-network's is rate * d / d_max
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.1  # of the supernet's last block; linear from 0 over its depth
    bias_rule: str = "regroup"  # how a supernet cuts the qkv bias; "autoformer" repeats their ungrouped cut


@dataclass
class NetOptions(ModelConfig):
    """`ModelConfig` plus the rest of what building a network takes. Raises `UserError` for impossible values.

    `img_size` is normalised to ``[height, width]``. `allocated` (embed_dim, mlp_ratio, depth) is the supernet that a
    stand-alone network was cut from, to which dropout, drop path and `scale` refer; None: the network itself.
    """

    num_classes: int = 1000
    img_size: Any = 224
    in_chans: int = 3
    allocated: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise unknown("pool", self.pool, POOLS)
        if self.bias_rule not in BIAS_RULES:
            raise unknown("bias_rule", self.bias_rule, BIAS_RULES)
        for name, least in (("patch_size", 1), ("in_chans", 1), ("num_classes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name}: {value!r} is not valid; it must be a whole number of at least {least}")
        for name in ("relative_position", "abs_pos", "qkv_bias", "pre_norm", "scale"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}: {getattr(self, name)!r} is not valid; it must be true or false")
        for name in ("drop_rate", "attn_drop_rate", "drop_path_rate"):
            if not isinstance(getattr(self, name), (int, float)) or not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}: {getattr(self, name)!r} is not valid; it must be in [0, 1)")
        self.img_size = _height_width(self.img_size)
        if min(self.img_size) < self.patch_size:
            raise UserError(f"img_size: {self.img_size} is smaller than one patch of patch_size {self.patch_size}")
        if any(side % self.patch_size for side in self.img_size):
            warnings.warn(
                f"img_size {self.img_size} is not a multiple of patch_size {self.patch_size}: the last rows or columns "
                "of pixels are not seen",
                stacklevel=4,
            )

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> NetOptions:
        """From keyword arguments or a saved dict; an unknown name is a `UserError` with the nearest valid one."""
        valid = [field.name for field in fields(cls)]
        for name in options:
            if name not in valid:
                raise unknown("option", name, valid)
        return cls(**options)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches per column and per row: ``(gh, gw)``."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON and for `read`."""
        return asdict(self)


def _height_width(size: Any) -> list[int]:
    sides = list(size) if isinstance(size, Sequence) and not isinstance(size, str) else [size, size]
    if len(sides) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sides):
        raise UserError(f"img_size: {size!r} is not valid; expected a side in pixels or a pair (height, width)")
    return sides
