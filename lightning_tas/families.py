"""What the name of a family carries: the rules of its networks that are not choices.

A plain ViT of one family and that of another may have the same widths, depths, heads and ratios, and still be other
networks: how wide queries are, whether positions are relative, which token is classified. `RULES` holds this for the
families that the package itself realises; spaces, costs and networks read it from here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown

ENTRY_POINTS = "lightning_tas.families"


@dataclass(frozen=True)
class Rules:
    """The rules of one family, and the defaults of its networks' build options."""

    family: str
    head_dim: int | None  # channels per head; None: the width divided by the heads, so queries are as wide as tokens
    norm_eps: float
    relative_position: bool  # whether there are relative position tables (2-D, on keys and values)
    pool: str  # what is classified: "avg" (mean of the patch tokens) or "token" (the class token)
    overlap: int  # patches begin every patch_size / overlap pixels
    init: str  # first weights, see `supernets.initialise`

    def channels(self, dim: int, num_heads: int) -> int:
        """Channels of one head in a block of width `dim`."""
        return dim // num_heads if self.head_dim is None else self.head_dim

    def query_width(self, dim: int, num_heads: int) -> int:
        """Width of queries, keys and values each, in a block of width `dim`."""
        return dim if self.head_dim is None else num_heads * self.head_dim

    def stride(self, patch_size: int) -> int:
        """Pixels from one patch to the next."""
        return max(1, patch_size // self.overlap)

    def relative(self, given: bool | None) -> bool:
        """Whether there is relative position where `given` is wanted (None: as the family has it)."""
        if given and not self.relative_position:
            raise UserError(f"relative_position: networks of family {self.family!r} have none; leave it out")
        return self.relative_position if given is None else given

    def check_heads(self, dim: int, num_heads: int, name: str) -> None:
        """`UserError` when heads of equal width cannot share `dim` channels."""
        if self.head_dim is None and dim % num_heads:
            raise UserError(f"{name}: {num_heads} does not divide the width {dim}, as heads of {self.family!r} must")


AUTOFORMER = Rules("autoformer", 64, 1e-5, True, "avg", 1, "trunc_normal")
# The class that Auto-Prox trained its AutoFormer benchmark with: a plain ViT, not the AutoFormer network.
AUTOPROX_VIT = Rules("autoprox_vit", None, 1e-6, False, "avg", 1, "trunc_normal")
# Pooling-based ViT: patches of 16 pixels every 8; heads have base_dim channels, which is the width over the heads.
PIT = Rules("pit", None, 1e-6, False, "token", 2, "library")

RULES: dict[str, Rules] = {rules.family: rules for rules in (AUTOFORMER, AUTOPROX_VIT, PIT)}


def halved(grid: tuple[int, int]) -> tuple[int, int]:
    """The patch grid behind a pooling of PiT (3 x 3, stride 2, padding 1): 27 to 14 to 7."""
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def widths(arch: Architecture) -> tuple[int, ...]:
    """Channels of the tokens in every stage: its ``embed_dim``, or ``base_dim`` for each of its heads (PiT)."""
    if arch.family == PIT.family and "base_dim" not in arch:
        own = sorted(arch.keys() | arch.stages[0].keys())
        raise UserError(f"base_dim: this {PIT.family} architecture has none; its own values are {', '.join(own)}")
    found = []
    for stage in arch.stages:
        seen: Mapping[str, Any] = {**arch.extras, **dict(stage.items())}
        if "embed_dim" in seen:
            found.append(int(seen["embed_dim"]))
        elif "base_dim" in seen and "num_heads" in seen:
            found.append(int(seen["base_dim"] * seen["num_heads"]))
        else:
            raise UserError(f"a {arch.family} architecture has neither embed_dim nor base_dim and num_heads per stage")
    return tuple(found)


def check_family(name: str) -> None:
    """`UserError` for a family of a space that no class realises, without importing the classes: they need torch."""
    registry = sys.modules.get("lightning_tas.supernets.registry")  # knows what a program has registered
    known = {*RULES, *(registry._FAMILIES if registry is not None else ())}
    if name not in known and not entry_points(group=ENTRY_POINTS):
        raise unknown("space.family", name, sorted(known))
