"""Which trainings DDP is told of as leaving parameters out."""

from __future__ import annotations

from typing import Any

import pytest

import lightning_tas as tas
from lightning_tas.commands.phases import _may_leave_unused
from lightning_tas.samplers import SamplerConfig, build_sampler
from lightning_tas.spaces import isotropic
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.supernet_module import SupernetModule

SMALL: dict[str, Any] = {"base_dim": (4,), "mlp_ratio": (1,)}


@pytest.mark.parametrize(
    ("space", "sampler", "unused"),
    [
        (tas.space("pit_ti", **SMALL), "sandwich", False),
        (tas.space("pit_ti", **SMALL), "uniform", True),
        # No member of 12 to 14 blocks is deepest in every stage, so even a sandwich leaves some blocks out.
        (tas.space("autoprox_pit", **SMALL), "sandwich", True),
        (tas.space("pit_ti", depth=(2,), **SMALL), "uniform", True),  # the supernet allocates more than these blocks
        (isotropic("flat", embed_dim=[24, 32], depth=[2], num_heads=[1], mlp_ratio=[1]), "uniform", False),
    ],
)
def test_blocks_that_a_step_may_leave_out(space: tas.SearchSpace, sampler: str, unused: bool) -> None:
    net = tas.supernet(space, img_size=32, num_classes=2)
    module = SupernetModule(net, build_sampler(SamplerConfig(sampler), space), TrainConfig(), global_batch=8)
    assert _may_leave_unused(module) == unused
