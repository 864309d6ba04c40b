"""The published networks have the parameters that their papers and files state."""

from __future__ import annotations

import pytest

import lightning_tas as tas
from lightning_tas.catalogue import PARAMS, PUBLISHED, SPACES
from lightning_tas.spaces import resolve_space

DEPTHS = {"autoformer": (13, 13, 14), "prenas": (12, 13, 14), "tf_tas": (13, 14, 15)}
PIT_DEPTHS = {"pit": [(2, 6, 4)] * 3, "tf_tas_pit": [(2, 4, 4), (1, 4, 2), (1, 4, 4)]}
SUMMED_GMACS = {"autoformer_t": 1.28, "autoformer_s": 4.77, "autoformer_b": 11.05, "prenas_ti": 1.32, "prenas_s": 4.80}
SUMMED_GMACS |= {"pit_ti": 0.70, "pit_xs": 1.39, "pit_s": 2.87}
SUMMED_GMACS |= {"tf_tas_pit_ti": 0.67, "tf_tas_pit_xs": 1.83, "tf_tas_pit_s": 3.41}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str) -> None:
    arch = PUBLISHED[name]
    cost = tas.cost(arch)
    assert cost.params == PARAMS[name]
    assert cost.macs / 1e9 == pytest.approx(SUMMED_GMACS.get(name, cost.macs / 1e9), abs=0.005)
    paper, _, size = name.rpartition("_")
    if arch.family == "pit":
        assert arch.depths == PIT_DEPTHS[paper][["ti", "xs", "s"].index(size)]
    else:
        assert arch.depth == DEPTHS[paper][{"t": 0, "ti": 0, "s": 1, "b": 2}[size]]
    space = resolve_space(SPACES[name])
    # AutoFormer-T has an MLP ratio of 3, which its own released space does not.
    assert (arch in space) == (name != "autoformer_t"), space.why_not(arch)
