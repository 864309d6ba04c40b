"""The published networks have the parameters that their papers and files state."""

from __future__ import annotations

import pytest

import lightning_tas as tas
from lightning_tas.catalogue import PARAMS, PUBLISHED, SPACES
from lightning_tas.spaces import resolve_space

DEPTHS = {"autoformer": (13, 13, 14), "prenas": (12, 13, 14), "tf_tas": (13, 14, 15)}
SUMMED_GMACS = {"autoformer_t": 1.28, "autoformer_s": 4.77, "autoformer_b": 11.05, "prenas_ti": 1.32, "prenas_s": 4.80}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str) -> None:
    arch = PUBLISHED[name]
    cost = tas.cost(arch)
    assert cost.params == PARAMS[name]
    assert cost.macs / 1e9 == pytest.approx(SUMMED_GMACS.get(name, cost.macs / 1e9), abs=0.005)
    paper, _, size = name.rpartition("_")
    assert arch.depth == DEPTHS[paper][{"t": 0, "ti": 0, "s": 1, "b": 2}[size]]
    space = resolve_space(SPACES[name])
    # AutoFormer-T has an MLP ratio of 3, which its own released space does not.
    assert (arch in space) == (name != "autoformer_t"), space.why_not(arch)
