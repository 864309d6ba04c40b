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
from lightning_tas.families import AUTOFORMER, Rules

POOLS = ("avg", "token")
BIAS_RULES = ("regroup", "autoformer")
INITS = ("trunc_normal", "library", "tf_tas")


@dataclass
class ModelConfig:
    """Options of the network itself. None stands for what the networks of the family have, see `families.RULES`."""

    relative_position: bool | None = None  # 2-D relative position tables on keys and values; only AutoFormer has them
    abs_pos: bool = True  # learned absolute positions
    qkv_bias: bool = True
    pool: str | None = None  # "avg": mean of the patch tokens (class token excluded); "token": class token
    pre_norm: bool = True  # False: LayerNorm after each residual sum and none at the end
    scale: bool = False  # multiply MLP output by r_max / r and attention output by d_max / q
    patch_size: int = 16
    patch_stride: int | None = None  # pixels from one patch to the next: patch_size; in PiT half of it
    init: str | None = None  # first weights: "trunc_normal", "library", "tf_tas", see `initialisation`
    drop_rate: float = 0.0  # of a network of the supernet's width; a sub-network's is rate * d / d_max
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.1  # of the supernet's last block; linear from 0 over its depth
    bias_rule: str = "regroup"  # how a supernet cuts the qkv bias; "autoformer" repeats their ungrouped cut


@dataclass
class NetOptions(ModelConfig):
    """`ModelConfig` plus the rest of what building a network takes. Raises `UserError` for impossible values.

    `img_size` is normalised to ``[height, width]``. `allocated` (sizes as in ``space.allocated``) is the supernet that
    a stand-alone network was cut from, to which dropout, drop path and `scale` refer; None: the network itself.
    `read` resolves what is left to the family; built directly, everything must be given.
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
        if self.init not in INITS:
            raise unknown("init", self.init, INITS)
        for name, least in (("patch_size", 1), ("patch_stride", 1), ("in_chans", 1), ("num_classes", 0)):
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
        if self.allocated is not None:  # as JSON has it, so that saved options are equal to these
            self.allocated = {k: list(v) if isinstance(v, tuple) else v for k, v in self.allocated.items()}
        assert self.patch_stride is not None
        if any((side - self.patch_size) % self.patch_stride for side in self.img_size):
            stride = "" if self.patch_stride == self.patch_size else f" every {self.patch_stride} pixels"
            fault = "is not a multiple of" if not stride else "does not fit"
            warnings.warn(
                f"img_size {self.img_size} {fault} patch_size {self.patch_size}{stride}: the last rows or columns "
                "of pixels are not seen",
                stacklevel=4,
            )

    @classmethod
    def read(cls, options: Mapping[str, Any], rules: Rules = AUTOFORMER) -> NetOptions:
        """From keyword arguments or a saved dict, for the family of `rules`, which decides what is None or left out.

        `UserError` for an unknown name (with the nearest valid one) and for what the family does not have.
        """
        valid = [field.name for field in fields(cls)]
        for name in options:
            if name not in valid:
                raise unknown("option", name, valid)
        given = {key: value for key, value in options.items() if value is not None}
        patch = given.get("patch_size", cls.patch_size)
        own = {"pool": rules.pool, "init": rules.init, "relative_position": rules.relative_position}
        own |= {"patch_stride": rules.stride(patch) if isinstance(patch, int) else patch}
        rules.relative(given.get("relative_position"))
        return cls(**{**own, **given})

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches per column and per row: ``(gh, gw)``."""
        assert self.patch_stride is not None
        gh, gw = ((side - self.patch_size) // self.patch_stride + 1 for side in self.img_size)
        return gh, gw

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON and for `read`."""
        return asdict(self)


def _height_width(size: Any) -> list[int]:
    sides = list(size) if isinstance(size, Sequence) and not isinstance(size, str) else [size, size]
    if len(sides) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sides):
        raise UserError(f"img_size: {size!r} is not valid; expected a side in pixels or a pair (height, width)")
    return sides
