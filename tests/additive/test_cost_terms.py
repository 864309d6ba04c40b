"""Costs as sums of tables equal the formulas on every family, space and option, to the last unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lightning_tas as tas
from lightning_tas.additive import count, ranges
from lightning_tas.additive.derive import derive_terms
from lightning_tas.costs import cost_options
from lightning_tas.costs.terms import cost_terms
from lightning_tas.errors import UserError
from lightning_tas.spaces import Dimension, SearchSpace, isotropic

SPACES = [
    "autoformer_tiny",
    "autoformer_small",
    "autoformer_base_paper",
    "autoprox_autoformer",
    "pit_s",
    "autoprox_pit",
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"count_rpe": "explicit", "img_size": (96, 160), "num_classes": 10, "abs_pos": False},
    {"count_rpe": "executed", "qkv_bias": False, "pre_norm": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SPACES)
def test_equal_the_formulas(name: str, options: dict[str, Any]) -> None:
    space = tas.space(name)
    terms = cost_terms(space, cost_options(**options))
    codes = space.sample_codes(7, 500)
    found = tas.cost(codes, space, **options)
    assert terms["params"](codes).tolist() == found.params.tolist()
    assert terms["macs"](codes).tolist() == found.macs.tolist()
    # What a search must remember of earlier stages stays small: no term sees more than two of them.
    assert all(len({space.columns[c].stage for c in t.columns} - {None}) <= 2 for t in terms["params"].terms)


def test_known_ranges_and_sizes() -> None:
    space = tas.space("autoformer_base_paper")
    costs = cost_terms(space)
    assert ranges(space, costs["params"]) == (39_792_856, 76_882_264)
    assert count(space, costs) == space.size() == 3 * (9**14 + 9**15 + 9**16)


def test_stages_of_blocks_with_choices() -> None:
    """PiT's costs are of products over a stage's width, with ratios chosen per block."""
    dimensions = [
        Dimension("base_dim", "network", (5, 8)),
        Dimension("mlp_ratio", "block", (1, 1.7, 2)),
        Dimension("num_heads", "stage", ((1, 2), (2, 4), (4, 8))),
        Dimension("depth", "stage", ((1, 2), (1, 3), (2,))),
    ]
    space = SearchSpace("mixed", "pit", dimensions, stages=3)
    codes = space.sample_codes(0, 2000)
    terms = cost_terms(space)
    assert terms["macs"](codes).tolist() == tas.cost(codes, space).macs.tolist()
    assert terms["params"](codes).tolist() == tas.cost(codes, space).params.tolist()


def test_what_is_not_additive_is_refused() -> None:
    space = isotropic("toy", embed_dim=[24, 40], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2.5])
    with pytest.raises(UserError, match="peak: not a sum over the blocks"):
        derive_terms(space, lambda codes: np.maximum(codes[:, 2], codes[:, 4]), "peak")
