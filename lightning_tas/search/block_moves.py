"""The laws of block-wise evolution over sites, and which blocks are released where its own leave nothing.

T-Razor changes the lowest blocks. Near a limit on size these are the smallest ones, and every change of them exceeds
it: then blocks that were to be kept are released one by one, first the one whose change makes the most room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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


def released(
    region: Region, sites: Sites, parent: Codes, changed: Sequence[int], kept: Sequence[int]
) -> tuple[list[int], int]:
    """The `kept` sites in the order of their release: first the one whose change makes most room within the limits.

    And how many at least must be released, with all choices outside of sites kept: more than there are where that is in
    vain. Where sites are no blocks: in the order in which they come.
    """
    if sites.kind != "block" or not region.limits:
        return list(kept), 0
    variants, of = [parent], [-1]
    for j in [*changed, *kept]:
        site = sites.sites[j]
        for block in region.space.block_choices(parent, site.stage):
            if (block != parent[site.columns]).any():
                variants.append(parent.copy())
                variants[-1][site.columns] = block
                of.append(j)
    (first, steps), place = _steps(region, np.stack(variants)), np.asarray(of)
    must = [steps[:, place == j] for j in changed if (place == j).any()]
    towards = _back(region, first + sum(part.mean(axis=1) for part in must))
    room = (towards[:, None] * steps).sum(axis=0)
    order = sorted(kept, key=lambda j: -float(room[place == j].max(initial=-math.inf)))
    may = [steps[:, (place == j) | (place < 0)] for j in order]  # or stay as it is
    return order, _needed(region, first, must, may)


def handed(
    region: Region, sites: Sites, own: Codes, whole: Codes, taken: Sequence[int], left: Sequence[int]
) -> tuple[list[int], int]:
    """The sites of an exchange in the order of their release: of those `taken` and those `left`, most room first.

    And how many at least must be released, more than there are where that is in vain.
    """
    either = [*taken, *left]
    if sites.kind != "block" or not region.limits:
        return either, 0
    variants = [own]
    for j in either:
        variants.append(own.copy())
        variants[-1][sites.sites[j].columns] = whole[sites.sites[j].columns]
    first, steps = _steps(region, np.stack(variants))
    steps = steps[:, 1:]
    first = first + steps[:, : len(taken)].sum(axis=1)
    steps[:, : len(taken)] *= -1  # a block that need not be taken
    towards = _back(region, first)
    order = np.argsort(-(towards[:, None] * steps).sum(axis=0), kind="stable").tolist()
    may = [np.stack([steps[:, i], np.zeros(len(steps))], axis=1) for i in order]
    return [either[i] for i in order], _needed(region, first, [], may)


def _needed(region: Region, first: FloatArray, must: Sequence[FloatArray], may: Sequence[FloatArray]) -> int:
    """How many of `may` must be open until the sums of steps (Q, n) can be within the limits that are sums.

    One more than there are where they never can.
    """
    low, high = np.array(list(region.limits.bounds.values())).T
    sums = np.array([name in region.sums for name in region.limits.bounds])
    least, most = (first + sum(end(part, axis=1) for part in must) for end in (np.min, np.max))
    slack = 1e-9 * np.abs(first)
    for number in range(len(may) + 1):
        if (((least <= high + slack) & (most >= low - slack)) | ~sums).all():
            return number
        if number < len(may):
            least, most = least + may[number].min(axis=1), most + may[number].max(axis=1)
    return len(may) + 1


def _steps(region: Region, variants: Codes) -> tuple[FloatArray, FloatArray]:
    """The limited quantities of the first network (Q,), and by how much those of all differ from them (Q, N)."""
    names = list(region.limits.bounds)
    found = {name: region.sums[name](variants) for name in names if name in region.sums}
    if len(found) < len(names):
        found = {**region.quantities(variants), **found}
    values = np.stack([np.asarray(found[name], dtype=np.float64) for name in names])
    return values[:, 0], values - values[:, :1]


def _back(region: Region, values: FloatArray) -> FloatArray:
    """The way back within the limits: weights of the quantities (Q,), of the one whose limit `values` exceed most."""
    worst, weights = -math.inf, np.zeros(len(values))
    for i, (low, high) in enumerate(region.limits.bounds.values()):
        for beyond, bound, sign in ((values[i] - high, high, -1.0), (low - values[i], low, 1.0)):
            scale = max(abs(bound), 1.0)
            if not math.isinf(bound) and beyond / scale > worst:
                worst, weights = beyond / scale, np.zeros(len(values))
                weights[i] = sign / scale
    return weights
