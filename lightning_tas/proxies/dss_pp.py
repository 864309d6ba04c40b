"""DSS++ (T-Razor, Zhou et al. 2023): rank by synaptic diversity plus rank by synaptic saliency.

    DSS++ = R(sum_l D_l) + R(sum_k S_k),   R: 1 for the smallest of the comparison set, n for the largest

So it compares magnitudes that the sum of DSS cannot, and a network's value depends on the networks beside it: those
scored together, or, in a search, all sampled so far (`archive.Archive`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.stats import rankdata

from lightning_tas.proxies.registry import FloatArray, Needs, register


@register(
    "dss_pp",
    needs=Needs(backward=True),
    paper="Zhou et al. 2023, Training-Free Transformer Architecture Search With Zero-Cost Proxy Guided Evolution",
    equation="rank(diversity) + rank(saliency) over the comparison set",
    cost="that of dss",
    layers="qkv, proj; fc1, fc2",
    combines=("dss",),
)
def dss_pp(raw: Mapping[str, FloatArray]) -> FloatArray:
    """Sum of the ranks of the two halves of DSS, which belong to the comparison set; equal values share their rank.

    Sums of ranks are multiples of 1/2. Networks with the same sum are told apart by D / median D + S / median S, in
    steps inside that 1/2, so ``numpy.floor(2 * value) / 2`` is the plain sum. A single network has its DSS as value.
    """
    diversity, saliency = raw["dss.diversity"], raw["dss.saliency"]
    if len(diversity) == 1:
        return raw["dss.value"].copy()
    ranks: FloatArray = rankdata(diversity) + rankdata(saliency)
    return ranks + _inside_ties(ranks, _relative(diversity) + _relative(saliency))


def _relative(values: FloatArray) -> FloatArray:
    """Values in units of their median; a median of 0 has no unit to offer."""
    return values / (abs(np.median(values)) or 1.0)


def _inside_ties(ranks: FloatArray, size: FloatArray) -> FloatArray:
    """In [0, 1/2): 0 for the smallest `size` among equal `ranks`, equal steps up to the largest."""
    order = np.lexsort((size, ranks))
    r, s = ranks[order], size[order]
    fresh = np.append(True, r[1:] != r[:-1])  # where a group of equal ranks begins
    larger = np.append(True, s[1:] != s[:-1]) & ~fresh
    group = np.cumsum(fresh) - 1
    counts = np.cumsum(larger)
    step = counts - counts[np.flatnonzero(fresh)][group]  # 0, 1, ... inside each group
    steps = np.maximum.reduceat(step, np.flatnonzero(fresh)) + 1
    out = np.empty_like(ranks)
    out[order] = 0.5 * step / steps[group]
    return out
