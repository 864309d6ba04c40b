"""Parameters and multiply-accumulates of an architecture in closed form, one by one or a million codes at a time.

Costs depend on a few sums only (of widths, depths, heads, hidden MLP widths), so encoded architectures are reduced to
those columns and one formula per family serves both forms: `isotropic`, `pit`.
It equals counting: `params` is the sum of `numel` over the extracted sub-network, `macs` the multiply-accumulates of
its matrix products and convolutions (norms, softmax, activations, means and scalar factors count nothing), for one
image.

Relative position adds products that published tables leave out, so `count_rpe` names a convention:
``False`` none of them; ``"explicit"`` the textbook form, q.R and a.R with R of shape (N, N, 64): 2 N^2 q per block;
``"executed"`` the factorised form that the networks of this package really run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.costs.isotropic import HEAD_DIM, isotropic_columns, isotropic_costs, isotropic_many, isotropic_one
from lightning_tas.costs.options import Cost, CostOptions, Costs, CountRPE, IntArray
from lightning_tas.costs.pit import pit_many, pit_one
from lightning_tas.errors import UserError, unknown
from lightning_tas.families import AUTOFORMER, AUTOPROX_VIT, PIT

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace

__all__ = [
    "FORMULAS",
    "HEAD_DIM",
    "Cost",
    "CostOptions",
    "Costs",
    "CountRPE",
    "Formula",
    "IntArray",
    "cost",
    "cost_options",
    "formula",
    "isotropic_columns",
    "isotropic_costs",
]


class Formula(NamedTuple):
    """How one family is counted: one architecture, and a matrix of codes of a space."""

    one: Callable[[Architecture, CostOptions], Cost]
    many: Callable[[SearchSpace, npt.NDArray[np.integer[Any]], CostOptions], Costs]


FORMULAS: dict[str, Formula] = {
    AUTOFORMER.family: Formula(isotropic_one, isotropic_many),
    AUTOPROX_VIT.family: Formula(isotropic_one, isotropic_many),
    PIT.family: Formula(pit_one, pit_many),
}


def formula(family: str) -> Formula:
    """The counting rules of a family; UserError for a family that has none."""
    if family not in FORMULAS:
        raise unknown("family", family, FORMULAS)
    return FORMULAS[family]


class CostKeywords(TypedDict, total=False):
    """Keywords of `cost`; None or absent means the network's own value, else the default of `CostOptions`."""

    img_size: int | tuple[int, int] | None
    num_classes: int | None
    in_chans: int | None
    patch_size: int | None
    patch_stride: int | None
    relative_position: bool | None
    abs_pos: bool | None
    qkv_bias: bool | None
    pool: str | None
    pre_norm: bool | None
    count_rpe: CountRPE


_OPTION_NAMES = tuple(f.name for f in fields(CostOptions))


def cost_options(net: Any = None, **given: Any) -> CostOptions:
    """Options for `cost`: the defaults, over them those `net` was built with, over them what is given (not None)."""
    for key in given:
        if key not in _OPTION_NAMES:
            raise unknown("cost", key, _OPTION_NAMES)
    built: dict[str, Any] = {}
    if net is not None:
        built = {k: v for k, v in net.options.items() if k in _OPTION_NAMES}
        built |= {"img_size": net.img_size, "num_classes": int(net.num_classes)}
    options = {**built, **{k: v for k, v in given.items() if v is not None}}
    if "img_size" in options:
        size = options["img_size"]
        options["img_size"] = tuple(size) if isinstance(size, Sequence) else (size, size)
    return CostOptions(**options)


@overload
def cost(arch: Architecture, net_or_space: Any = None, **options: Unpack[CostKeywords]) -> Cost: ...
@overload
def cost(
    arch: npt.NDArray[np.integer[Any]] | Sequence[Architecture],
    net_or_space: Any = None,
    **options: Unpack[CostKeywords],
) -> Costs: ...


def cost(
    arch: Architecture | npt.NDArray[np.integer[Any]] | Sequence[Architecture],
    net_or_space: Any = None,
    **options: Unpack[CostKeywords],
) -> Cost | Costs:
    """Parameters and multiply-accumulates (one image), equal to counting the extracted sub-network.

    arch: an `Architecture` gives `Cost` of ints; a sequence of them, or codes (N, C) of a space's `encode`, gives
    `Costs` of int64 arrays (N,). net_or_space: a supernet or a stand-alone network, whose options are used; or a
    space, which codes need. options: ``img_size=224`` (or (H, W)), ``num_classes=1000``, ``in_chans=3``,
    ``patch_size=16``, ``abs_pos=True``, ``qkv_bias=True``, ``pool="avg"``, ``pre_norm=True``; what the family has,
    unless given: ``patch_stride`` (the patch size, in PiT half of it), ``relative_position``; and
    ``count_rpe=False | "explicit" | "executed"``, see the module.
    Raises UserError for an unknown family, option or value, and for codes without their space.
    """
    if net_or_space is not None and not (hasattr(net_or_space, "options") or hasattr(net_or_space, "columns")):
        raise UserError(f"cost: the second argument is a network or a space, not a {type(net_or_space).__name__}")
    net = net_or_space if hasattr(net_or_space, "options") else None
    space: Any = getattr(net, "space", None) if net is not None else net_or_space
    chosen = cost_options(net, **options)
    if isinstance(arch, np.ndarray):
        if not hasattr(space, "columns"):
            raise UserError("cost: codes need the space that encoded them, as the second argument (or its supernet)")
        if arch.ndim != 2 or arch.shape[1] != len(space.columns):
            raise UserError(f"cost: codes of shape {arch.shape} are not (N, {len(space.columns)}) of {space.name!r}")
        return formula(space.family).many(space, arch, chosen)
    if isinstance(arch, Sequence):
        both = [_count(a, chosen) for a in arch]
        table = np.asarray(both, dtype=np.int64).reshape(len(both), 2)
        return Costs(table[:, 0], table[:, 1])
    return _count(arch, chosen)


def _count(arch: Architecture, options: CostOptions) -> Cost:
    if not isinstance(arch, Architecture):
        raise UserError(f"cost: expected an Architecture, got {type(arch).__name__}")
    return formula(arch.family).one(arch, options)
