"""Parameters and multiply-accumulates of an architecture in closed form, one by one or a million codes at a time.

The cost of an isotropic ViT depends on four numbers only: embedding width, depth, the sum of the heads and the sum of
the hidden MLP widths. So encoded architectures are reduced to those four columns and one formula serves both forms.
It equals counting: `params` is the sum of `numel` over the extracted sub-network, `macs` the multiply-accumulates of
its matrix products and convolutions (norms, softmax, activations, means and scalar factors count nothing), for one
image.

Relative position adds products that published tables leave out, so `count_rpe` names a convention:
``False`` none of them; ``"explicit"`` the textbook form, q.R and a.R with R of shape (N, N, 64): 2 N^2 q per block;
``"executed"`` the factorised form that the networks of this package really run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace

IntArray = npt.NDArray[np.int64]
CountRPE = Literal[False, "explicit", "executed"]
HEAD_DIM = 64


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
    """What the cost depends on besides the architecture: the build options of a network and the RPE convention."""

    img_size: tuple[int, int] = (224, 224)
    num_classes: int = 1000
    in_chans: int = 3
    patch_size: int = 16
    relative_position: bool = True
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
        for name, least in (("patch_size", 1), ("in_chans", 1), ("num_classes", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise UserError(f"{name}: {value!r} is not valid; it must be a whole number of at least {least}")
        if len(self.img_size) != 2 or not all(isinstance(side, Integral) for side in self.img_size):
            raise UserError(f"img_size: {self.img_size!r} is not valid; expected a side in pixels or (height, width)")
        if min(self.grid) < 1:
            raise UserError(f"img_size: {self.img_size} is smaller than one patch of {self.patch_size} pixels")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per (column, row)."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    @property
    def tokens(self) -> int:
        """Patches plus the class token (which attends whatever the pooling is)."""
        return self.grid[0] * self.grid[1] + 1


def isotropic_costs(embed: IntArray, depth: IntArray, q: IntArray, hidden: IntArray, options: CostOptions) -> Costs:
    """Costs of isotropic AutoFormer ViTs from four columns of shape (N,).

    embed, depth: width and number of blocks; q: sum over blocks of the query width (64 x heads); hidden: sum over
    blocks of the MLP's hidden width, int(ratio x embed). Spec A1, extended to every build option.
    """
    o = options
    n, (gh, gw) = o.tokens, o.grid
    patch = o.in_chans * o.patch_size**2
    relative_rows = 2 * gh + 2 + 2 * gw + 2 if o.relative_position else 0

    params = (patch + 1) * embed + embed + (n * embed if o.abs_pos else 0)
    params = params + depth * (6 * embed + 2 * relative_rows * HEAD_DIM)  # two norms, two output biases, tables
    params = params + q * (4 * embed + (3 if o.qkv_bias else 0)) + hidden * (2 * embed + 1)
    params = params + (2 * embed if o.pre_norm else 0) + o.num_classes * (embed + 1)

    macs = (n - 1) * patch * embed + n * embed * (4 * q + 2 * hidden) + 2 * n * n * q + o.num_classes * embed
    if o.relative_position:
        macs = macs + _relative_macs(q, o)
    return Costs(params, macs)


def _relative_macs(q: IntArray, options: CostOptions) -> IntArray:
    """Multiply-accumulates of the relative position of all blocks, under the wanted convention."""
    if options.count_rpe is False:
        return np.zeros_like(q)
    if options.count_rpe == "explicit":
        return 2 * options.tokens**2 * q
    # Factorised: q times both tables and back, and attention longer by one slot per grid row, grid column and two for
    # the class token, rounded up to a multiple of 16 (see supernets.relative_position).
    gh, gw = options.grid
    rows, slots = 2 * (gh + gw) + 4, (gh + gw + 2 + 15) // 16 * 16
    return 2 * options.tokens * q * rows + 2 * options.tokens**2 * (q // HEAD_DIM) * slots


class Formula(NamedTuple):
    """How one family is counted: one architecture, and a matrix of codes of a space."""

    one: Callable[[Architecture, CostOptions], Cost]
    many: Callable[[SearchSpace, npt.NDArray[np.integer[Any]], CostOptions], Costs]


def _autoformer_one(arch: Architecture, options: CostOptions) -> Cost:
    embed = int(arch.embed_dim)
    q = HEAD_DIM * sum(arch.num_heads)
    hidden = sum(int(r * embed) for r in arch.mlp_ratio)
    width, depth, queries, mlp = (np.asarray(v, dtype=np.int64) for v in (embed, arch.depth, q, hidden))
    params, macs = isotropic_costs(width, depth, queries, mlp, options)
    return Cost(int(params), int(macs))


def isotropic_columns(
    space: SearchSpace, codes: npt.NDArray[np.integer[Any]]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(embed, depth, sum of query widths, sum of hidden widths), each (N,), of encoded one-stage architectures.

    Heads and ratios may be chosen per block, or once for all blocks. UserError for a space without one of the four.
    """
    columns = {(c.name, c.block): (i, c.choices) for i, c in enumerate(space.columns)}
    lacking = [name for name in ("embed_dim", "depth") if (name, None) not in columns]
    lacking += [name for name in ("num_heads", "mlp_ratio") if not {(name, None), (name, 0)} & columns.keys()]
    if space.stages > 1 or lacking:
        reason = f"no {', '.join(lacking)} where a plain ViT has it" if lacking else f"{space.stages} stages"
        raise UserError(f"cost: codes of space {space.name!r} cannot be counted: it has {reason}")
    embed_at, embed_choices = columns["embed_dim", None]
    depth_at, depth_choices = columns["depth", None]
    embed_code = codes[:, embed_at].astype(np.intp)
    embeds = np.asarray(embed_choices, dtype=np.int64)
    depth = np.asarray(depth_choices, dtype=np.int64)[codes[:, depth_at]]
    q = np.zeros(len(codes), dtype=np.int64)
    hidden = np.zeros(len(codes), dtype=np.int64)
    for (name, block), (at, choices) in columns.items():
        times = depth if block is None else 1
        # The code -1 of an unused slot picks the appended last entry, a width of zero.
        if name == "num_heads":
            q += times * np.asarray([*(HEAD_DIM * int(h) for h in choices), 0], dtype=np.int64)[codes[:, at]]
        elif name == "mlp_ratio":
            width = len(choices) + 1
            table = np.asarray([[*(int(r * d) for r in choices), 0] for d in embed_choices], dtype=np.int64).ravel()
            code = codes[:, at]
            hidden += times * table[embed_code * width + np.where(code < 0, width - 1, code)]
    return embeds[embed_code], depth, q, hidden


def _autoformer_many(space: SearchSpace, codes: npt.NDArray[np.integer[Any]], options: CostOptions) -> Costs:
    return isotropic_costs(*isotropic_columns(space, codes), options=options)


FORMULAS: dict[str, Formula] = {"autoformer": Formula(_autoformer_one, _autoformer_many)}


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
    ``patch_size=16``, ``relative_position=True``, ``abs_pos=True``, ``qkv_bias=True``, ``pool="avg"``,
    ``pre_norm=True``; and ``count_rpe=False | "explicit" | "executed"``, see the module.
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
