"""What single blocks contribute to inherited scores: for searches that change the weakest blocks.

Shapes: N codes, P places of blocks in the widest network, stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.terms import FloatArray, Term
from lightning_tas.proxies.cuts import Cuts
from lightning_tas.proxies.roles import Layer


class BlockSums:
    """Sums over the layers of every block of their entries in `tables` (layers outside of blocks are left out)."""

    def __init__(self, cuts: Cuts, tables: Mapping[Layer, FloatArray]) -> None:
        self._depths = cuts.depths
        self._terms: list[tuple[int, int, Term]] = []  # stage, slot, what its block contributes
        for (stage, slot), table in cuts.by_place(tables).items():
            self._terms.append((stage, slot, cuts.slot_term(stage, slot, table)))

    def __call__(self, codes: npt.NDArray[np.integer[Any]]) -> list[tuple[float, ...]]:
        """Of every code (N, columns) the contributions of its blocks, in order."""
        values = np.stack([term(codes) for *_, term in self._terms], axis=1)  # (N, P)
        depth = np.stack([self._depths(codes, stage) for stage, *_ in self._terms], axis=1)
        there = np.array([slot for _, slot, _ in self._terms]) < depth
        return [tuple(row[own].tolist()) for row, own in zip(values, there, strict=True)]
