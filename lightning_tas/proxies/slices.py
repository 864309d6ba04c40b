"""The saliency of every slice of an isotropic supernet, as lookup tables per layer.

From (weight, gradient) of each parameter, |g * w| is summed in float64 into 2-D prefix sums at the few edges where
slices of the space can end, so that the SNIP of a matrix cut to its first a rows and b columns is one number, P[a, b].
Interleaved qkv rows (3i + c) keep this form: the rows of h heads are the first 3 * 64 * h. A sub-network's score is
then a sum of table entries, one of `heads` and one of `mlp` per layer.

Shapes: L layers, E embedding widths, H head counts, R MLP ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_tas.architecture import Architecture
from lightning_tas.costs import HEAD_DIM
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.saliency import Saliency

FloatArray = npt.NDArray[np.float64]
NORMS = ("paper", "l1l1", "none")


@dataclass(frozen=True)
class Axes:
    """The choices of an isotropic space, ascending."""

    embed_dim: tuple[int, ...]
    depth: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: tuple[float, ...]

    @property
    def hidden(self) -> npt.NDArray[np.int64]:
        """(E, R): the hidden MLP width, int(ratio * width)."""
        return np.asarray([[int(r * d) for r in self.mlp_ratio] for d in self.embed_dim], dtype=np.int64)


@dataclass(frozen=True)
class Tables:
    """SNIP of all slices, float64.

    fixed (E,): outside the blocks. block (L, E): what a block has whatever its choices (norms, output biases, relative
    position tables). heads (L, E, H), mlp (L, E, R): what comes with the choices. total (L,): the whole block, the
    paper's normaliser. l1_heads, l1_mlp: like heads, mlp (weights only), each matrix divided by its own
    sum|w| * sum|g|, the released normaliser.
    """

    axes: Axes
    fixed: FloatArray
    block: FloatArray
    heads: FloatArray
    mlp: FloatArray
    total: FloatArray
    l1_heads: FloatArray
    l1_mlp: FloatArray

    @classmethod
    def ones(cls, axes: Axes) -> Tables:
        """Tables in which all is equal, for what does not depend on scores."""
        layers, widths = max(axes.depth), len(axes.embed_dim)
        heads, mlp = ((layers, widths, len(c)) for c in (axes.num_heads, axes.mlp_ratio))
        shapes = ((widths,), (layers, widths), heads, mlp, (layers,), heads, mlp)
        return cls(axes, *(np.ones(shape) for shape in shapes))

    def score(self, arch: Architecture) -> float:
        """Plain SNIP of one architecture of the axes' choices."""
        a = self.axes
        e = a.embed_dim.index(arch.embed_dim)
        total = self.fixed[e] + self.block[: arch.depth, e].sum()
        for layer, (h, r) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
            total += self.heads[layer, e, a.num_heads.index(h)] + self.mlp[layer, e, a.mlp_ratio.index(r)]
        return float(total)

    def gains(self, norm: str) -> tuple[FloatArray, FloatArray]:
        """(heads, mlp) as the allocation compares them, (E, L, H) and (E, L, R), under a normaliser of `NORMS`.

        "paper": eq. 13, each block divided by its total; "l1l1": as released; "none": plain SNIP.
        Raises UserError when no gradient reached a layer: a zero by accident is no score.
        """
        if norm not in NORMS:
            raise unknown("norm", norm, NORMS)
        alive = self.total > 0
        heads, mlp = self.heads, self.mlp
        if norm == "l1l1":
            heads, mlp = self.l1_heads, self.l1_mlp
            alive = (heads[:, -1, -1] > 0) & (mlp[:, -1, -1] > 0)
        if not alive.all():
            raise UserError(f"selection: no gradient reaches layer {np.argmin(alive)}, so it cannot be scored")
        if norm == "paper":
            heads, mlp = heads / self.total[:, None, None], mlp / self.total[:, None, None]
        return heads.swapaxes(0, 1), mlp.swapaxes(0, 1)


def prefix(values: Tensor, *edges: Iterable[int]) -> FloatArray:
    """Sums of `values` (1-D or 2-D, float64) over its first a (rows) and b (columns), for ascending distinct edges.

    Equals the inclusive prefix sum at those places, but adds up each strip between two edges only once.
    """
    for dim in reversed(range(values.ndim)):
        strips, low = [], 0
        for high in edges[dim]:
            strips.append(values.narrow(dim, low, high - low).sum(dim))
            low = high
        values = torch.stack(strips, dim).cumsum(dim)
    return values.cpu().numpy()


class _Parameters:
    """|g * w| of named parameters, and their prefix sums."""

    def __init__(self, saliency: Saliency) -> None:
        self.saliency = saliency

    def product(self, name: str) -> Tensor | None:
        """|g * w| in float64, None for a parameter that the network does not have."""
        if name not in self.saliency:
            return None
        weight, grad = self.saliency[name]
        return grad.to(torch.float64, copy=True).mul_(weight.double()).abs_()

    def grid(self, name: str, rows: Sequence[int], columns: Sequence[int]) -> FloatArray:
        """SNIP of every (first rows, first columns) slice of a matrix, at ascending distinct edges."""
        product = self.product(name)
        assert product is not None and product.ndim == 2, name
        return prefix(product, rows, columns)

    def line(self, name: str, ends: Sequence[int]) -> FloatArray:
        """SNIP of the first `ends` entries along the last axis, zeros for a missing parameter."""
        product = self.product(name)
        if product is None:
            return np.zeros(len(ends))
        return prefix(product.reshape(-1, product.shape[-1]).sum(0), ends)

    def whole(self, name: str) -> float:
        """SNIP of a parameter that is never cut, zero for a missing one."""
        product = self.product(name)
        return 0.0 if product is None else float(product.sum())

    def l1l1(self, name: str, rows: int | None, columns: int | None) -> float:
        """sum|w| * sum|g| over the first rows and columns; None: all that are allocated."""
        weight, grad = (t[:rows, :columns].abs().sum(dtype=torch.float64) for t in self.saliency[name])
        return float(weight * grad)


def build_tables(saliency: Saliency, axes: Axes, released: bool = False) -> Tables:
    """All tables from the (weight, gradient) pairs of the largest network.

    With `released`, SNIP is summed as the published code does: class token, positions and relative position tables are
    left out, and the head's bias is cut to its first `embed_dim` entries.
    """
    p = _Parameters(saliency)
    layers = range(max(axes.depth))
    parts = [_layer(p, f"blocks.{i}", axes, released) for i in layers]
    block, heads, mlp, l1_heads, l1_mlp, total = (np.stack(column) for column in zip(*parts, strict=True))
    return Tables(axes, _fixed(p, axes, released), block, heads, mlp, total, l1_heads, l1_mlp)


def _fixed(p: _Parameters, axes: Axes, released: bool) -> FloatArray:
    """(E,): patch embedding, class token, positions, last norm and classifier."""
    d = axes.embed_dim
    weight = p.product("patch_embed.proj.weight")
    assert weight is not None
    out = prefix(weight.flatten(1).sum(1), d) + p.line("patch_embed.proj.bias", d)
    out += p.line("norm.weight", d) + p.line("norm.bias", d)
    out += p.line("head.weight", d)
    if released:
        bias = p.product("head.bias")
        return out + (0.0 if bias is None else np.asarray([float(bias[:width].sum()) for width in d]))
    return out + p.line("cls_token", d) + p.line("pos_embed", d) + p.whole("head.bias")


def _layer(p: _Parameters, block: str, axes: Axes, released: bool) -> tuple[FloatArray | float, ...]:
    """(block, heads, mlp, l1_heads, l1_mlp, total) of one layer, see `Tables`."""
    d, widest = axes.embed_dim, axes.embed_dim[-1]
    q = [HEAD_DIM * h for h in axes.num_heads]
    hidden = axes.hidden
    f = np.unique(hidden)
    at = np.searchsorted(f, hidden)  # (E, R): index of the hidden width among all of them
    width = np.arange(len(d))[:, None]

    qkv = p.grid(f"{block}.attn.qkv.weight", [3 * width for width in q], d).T  # (E, H)
    heads = qkv + p.line(f"{block}.attn.qkv.bias", [3 * width for width in q])
    heads += p.grid(f"{block}.attn.proj.weight", d, q)
    fc1 = p.grid(f"{block}.mlp.fc1.weight", f.tolist(), d)[at, width]  # (E, R)
    fc2 = p.grid(f"{block}.mlp.fc2.weight", d, f.tolist())[width, at]
    mlp = fc1 + fc2 + p.line(f"{block}.mlp.fc1.bias", f.tolist())[at]

    common = np.zeros(len(d))
    for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.proj.bias", "mlp.fc2.bias"):
        common += p.line(f"{block}.{name}", d)
    tables = sum(p.whole(name) for name in p.saliency if name.startswith(f"{block}.attn.rel_pos_"))
    # The whole block: beyond the slices of the widest network, which the saliency is of, every gradient is zero.
    total = heads[-1, -1] + mlp[-1, -1] + common[-1] + tables

    # Published code takes the sums over all allocated rows but only the columns, for fc2 the rows, of the widest net.
    l1_heads = _ratio(qkv, p.l1l1(f"{block}.attn.qkv.weight", None, widest))
    l1_mlp = _ratio(fc1, p.l1l1(f"{block}.mlp.fc1.weight", None, widest))
    l1_mlp = l1_mlp + _ratio(fc2, p.l1l1(f"{block}.mlp.fc2.weight", widest, None))
    return common + (0.0 if released else tables), heads, mlp, l1_heads, l1_mlp, total


def _ratio(numerator: FloatArray, denominator: float) -> FloatArray:
    return numerator / denominator if denominator > 0 else np.zeros_like(numerator)
