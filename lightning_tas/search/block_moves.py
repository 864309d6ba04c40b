"""The laws of block-wise evolution over sites, and which blocks are released where its own leave nothing.

T-Razor changes the lowest blocks. Near a limit on size these are the smallest ones, and every change of them exceeds
it: then blocks that were to be kept are released one by one, first the one whose change makes the most room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_tas.limits import Region
from lightning_tas.search.history import Codes
from lightning_tas.search.moves import Moves
from lightning_tas.search.objective import FloatArray
from lightning_tas.search.sites import Sites


def changes(
    moves: Moves, sites: Sites, parent: Codes, rates: FloatArray, changed: Sequence[int], freed: Sequence[int]
) -> list[FloatArray]:
    """Laws: sites in `changed` get other choices, uniformly; those in `freed` any; others keep theirs.

    rates (columns,): of choices outside of sites, the probability that they are redrawn.
    """
    kept, uniform = moves.kept(parent), moves.paths.uniform
    genes = rates[:, None] * uniform + (1.0 - rates[:, None]) * kept
    for j in freed:
        genes[sites.sites[j].columns] = uniform[sites.sites[j].columns]
    if sites.kind == "block":
        law = moves.paths.law(genes)
        for j in changed:
            at = moves.at(sites.sites[j].columns)
            others = moves.paths.law(uniform)[at] * (moves.paths.law(kept)[at] == 0)
            law[at] = others / others.sum()
        return [law]
    laws = [genes]
    for j in changed:  # some choice of the site differs: the first that does is its first, its second, ...
        columns = [c for c in sites.sites[j].columns.tolist() if moves.paths.choices[c] > 1]
        laws = [_first_other(law, kept, uniform, columns, k) for law in laws for k in range(len(columns))]
    return [moves.paths.law(law) for law in laws]


def _first_other(genes: FloatArray, kept: FloatArray, uniform: FloatArray, columns: list[int], k: int) -> FloatArray:
    genes = genes.copy()
    genes[columns[:k]] = kept[columns[:k]] * uniform[columns[:k]]
    genes[columns[k]] = uniform[columns[k]] * (kept[columns[k]] == 0)
    genes[columns[k + 1 :]] = uniform[columns[k + 1 :]]
    return genes


def exchanges(
    moves: Moves, sites: Sites, own: Codes, whole: Codes, taken: Sequence[int], freed: Sequence[int]
) -> list[FloatArray]:
    """Laws: the sites in `taken` are those of `whole`, those in `freed` are whole ones of either, others the `own`."""
    base = own.copy()
    for j in taken:
        base[sites.sites[j].columns] = whole[sites.sites[j].columns]
    if sites.kind == "block":
        law = moves.paths.law(moves.kept(base))
        for j in freed:
            at = moves.at(sites.sites[j].columns)
            law[at] = moves.halves(own, whole)[at]
        return [law]
    laws = []
    for donors in itertools.product((own, whole), repeat=len(freed)):
        for j, donor in zip(freed, donors, strict=True):
            base[sites.sites[j].columns] = donor[sites.sites[j].columns]
        laws.append(moves.paths.law(moves.kept(base)))
    return laws


def released(region: Region, sites: Sites, parent: Codes, changed: Sequence[int], kept: Sequence[int]) -> Iterator[int]:
    """The `kept` sites in the order of their release: first the one whose change makes most room within the limits.

    Where sites are no blocks: in the order in which they come.
    """
    if sites.kind != "block" or not region.limits:
        yield from kept
        return
    variants, of = [parent], [-1]
    for j in [*changed, *kept]:
        site = sites.sites[j]
        for block in region.space.block_choices(parent, site.stage):
            if (block != parent[site.columns]).any():
                variants.append(parent.copy())
                variants[-1][site.columns] = block
                of.append(j)
    steps, place = _steps(region, np.stack(variants)), np.asarray(of)
    mean = sum((steps[:, place == j].mean(axis=1) for j in changed if (place == j).any()), start=np.zeros(len(steps)))
    towards = _back(region, parent, mean)
    room = (towards[:, None] * steps).sum(axis=0)
    rooms = {j: float(room[place == j].max(initial=-math.inf)) for j in kept}
    yield from sorted(kept, key=lambda j: -rooms[j])


def handed(
    region: Region, sites: Sites, own: Codes, whole: Codes, taken: Sequence[int], left: Sequence[int]
) -> Iterator[int]:
    """The sites of an exchange in the order of their release: of those `taken` and those `left`, most room first."""
    if sites.kind != "block" or not region.limits:
        yield from [*taken, *left]
        return
    variants = [own]
    for j in [*taken, *left]:
        variants.append(own.copy())
        variants[-1][sites.sites[j].columns] = whole[sites.sites[j].columns]
    steps = _steps(region, np.stack(variants))[:, 1:]
    towards = _back(region, own, steps[:, : len(taken)].sum(axis=1))
    rooms = (towards[:, None] * steps).sum(axis=0)
    rooms[: len(taken)] *= -1  # a block that need not be taken
    for i in np.argsort(-rooms, kind="stable").tolist():
        yield [*taken, *left][i]


def _steps(region: Region, variants: Codes) -> FloatArray:
    """By how much the limited quantities of networks differ from those of the first: (quantities, N)."""
    found = region.quantities(variants)
    values = np.stack([np.asarray(found[name], dtype=np.float64) for name in region.limits.bounds])
    return np.asarray(values - values[:, :1])


def _back(region: Region, row: Codes, step: FloatArray) -> FloatArray:
    """Weights of the quantities (Q,): one over the size of the limit that `step` would exceed most, with its sign."""
    found = region.quantities(row[None])
    weights, worst = np.zeros(len(step)), -math.inf
    for i, (name, (low, high)) in enumerate(region.limits.bounds.items()):
        value = float(found[name][0]) + step[i]
        for beyond, bound, sign in ((value - high, high, -1.0), (low - value, low, 1.0)):
            scale = max(abs(bound), 1.0)
            if not math.isinf(bound) and beyond / scale > worst:
                worst, weights = beyond / scale, np.zeros(len(step))
                weights[i] = sign / scale
    return weights
