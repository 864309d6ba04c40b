"""NTSR (ETAS, eq. 17): trainability and expressivity by their ranks, (R(NTKT) + R(SEPT)) / 2."""

from __future__ import annotations

from collections.abc import Mapping

from scipy.stats import rankdata

from lightning_tas.proxies.registry import FloatArray, Needs, register


@register(
    "ntsr",
    needs=Needs(data=True, backward=True, per_sample=True),
    deterministic=False,
    paper="ETAS: Zero-Shot Transformer Architecture Search via Network Trainability and Expressivity, eq. 17",
    equation="(R(NTKT) + R(SEPT)) / 2",
    cost="that of ntkt",
    layers="all parameters before the classifier",
    combines=("ntkt", "sept"),
)
def ntsr(table: Mapping[str, FloatArray]) -> FloatArray:
    """Mean of the ranks of NTKT and SEPT in the comparison set (larger is better); equal values share the mean rank.

    A single network, which has no rank, has its NTKT as value.
    """
    if len(table["ntkt.value"]) == 1:
        return table["ntkt.value"].copy()
    ranks: FloatArray = (rankdata(table["ntkt.value"]) + rankdata(table["sept.value"])) / 2
    return ranks
