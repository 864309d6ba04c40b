"""SEPT (ETAS, eq. 16): an upper bound of the separation rank of a Transformer, from its widths alone.

    SEPT = log sum_l d_l + log sum_l (d_l^(T+1) - 1) / (d_l - 1)

for blocks l of width d_l and T tokens. d^(T+1) leaves float64 at d = 192 and T = 134, so in logarithms:

    t_l = (T + 1) log d_l + log(1 - exp(-(T + 1) log d_l)) - log(d_l - 1);   SEPT = log sum_l d_l + logsumexp_l t_l

It is ruled by the widest block: an AutoFormer space of one width per network has few distinct values. In networks of
several stages every block counts with the width and the tokens of its own stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from scipy.special import logsumexp

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown
from lightning_tas.families import RULES, widths
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import one_of, register
from lightning_tas.supernets.pit import stage_grids

WIDTHS = ("embed", "qkv")


@register(
    "sept",
    paper="ETAS: Zero-Shot Transformer Architecture Search via Network Trainability and Expressivity, eq. 16",
    equation="log sum_l d_l + log sum_l (d_l^(T+1) - 1) / (d_l - 1)",
    cost="none",
    layers="none: widths alone",
    function=True,
    light=True,
)
def sept(probe: Probe, width: Annotated[str, one_of(WIDTHS)] = "embed") -> Measured:
    """Bound of the separation rank. `width`: d_l is the block's "embed" width, or that of its queries, "qkv"."""
    arch, grid = getattr(probe.net, "arch", None), getattr(probe.net, "grid_size", None)
    if arch is None or grid is None:
        return Measured(0.0, reason="the network does not say its architecture and grid (net.arch, net.grid_size)")
    assert isinstance(grid, tuple)
    return Measured(separation_rank(*sizes(arch, grid, width)))


def sizes(arch: Architecture, grid: tuple[int, int], width: str = "embed") -> tuple[list[int], list[int]]:
    """Width and number of tokens (class token included) of every block, for a patch grid of the first stage."""
    if width not in WIDTHS:
        raise unknown("sept: width", width, WIDTHS)
    if width == "qkv" and arch.family not in RULES:
        raise UserError(f"sept: width 'qkv' is not known for family {arch.family!r}; valid: {', '.join(RULES)}")
    found: list[int] = []
    tokens: list[int] = []
    heads = iter(arch.num_heads)
    grids = stage_grids(grid, len(arch.stages))
    for dim, depth, (rows, columns) in zip(widths(arch), arch.depths, grids, strict=True):
        for _ in range(depth):
            found.append(dim if width == "embed" else RULES[arch.family].query_width(dim, int(next(heads))))
            tokens.append(1 + rows * columns)
    return found, tokens


def separation_rank(d: Sequence[int], tokens: Sequence[int]) -> float:
    """SEPT of blocks of widths `d`, each looking at so many `tokens`."""
    width, power = np.asarray(d, dtype=np.float64), np.asarray(tokens, dtype=np.float64) + 1
    with np.errstate(divide="ignore", invalid="ignore"):  # d = 1, whose limit is taken below
        exponent = power * np.log(width)
        terms = exponent + np.log1p(-np.exp(-exponent)) - np.log(width - 1)
    return float(np.log(width.sum()) + logsumexp(np.where(width == 1, np.log(power), terms)))
