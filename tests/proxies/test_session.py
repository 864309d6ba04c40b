"""Sessions score as `score_many` does, call after call, with sums by block also from inherited tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies.session import Session
from lightning_tas.spaces import SearchSpace, isotropic, pit_ti

SPACES = {
    "autoformer": isotropic("mini", embed_dim=[16, 32], depth=[2, 3], num_heads=[1, 2], mlp_ratio=[1, 2]),
    "autoprox_vit": isotropic(
        "plain", "autoprox_vit", embed_dim=[16, 32], depth=[2, 3], num_heads=[1, 2], mlp_ratio=[1, 2]
    ),
    "pit": pit_ti().with_choices(base_dim=[8, 16], mlp_ratio=[1, 2], num_heads=[1, 2], depth=[1, 2]),
}


def random_net(space: SearchSpace) -> Any:
    torch.manual_seed(0)
    net = tas.supernet(space, num_classes=3, img_size=32)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("mode", ["exact", "inherited"])
@pytest.mark.parametrize("family", SPACES)
def test_equals_score_many_and_blocks_add_up(family: str, mode: str) -> None:
    net = random_net(SPACES[family])
    session = Session(["dss", "snip"], net, mode=mode, batch_size=2, options={"dss": {"qkv": "split"}})
    for seed in range(2):
        archs = net.space.sample(seed=seed, n=3)
        found = session.score(archs)
        want = tas.score_many(["dss", "snip"], net, archs, mode=mode, batch_size=2, options={"dss": {"qkv": "split"}})
        for name in ("dss", "snip"):
            assert found.value(name).tolist() == want.value(name).tolist()
        for place, arch in enumerate(archs):
            score = found.score("dss", place)
            assert set(score.blocks) == {"diversity", "saliency"}
            assert score.parts == pytest.approx([sum(both) for both in zip(*score.blocks.values(), strict=True)])
            for key, blocks in score.blocks.items():
                assert len(blocks) == arch.depth and min(blocks) > 0
                assert sum(blocks) == pytest.approx(score.extras[key], rel=1e-10)
        assert found.score("snip", 0).blocks == {}


def test_inherited_blocks_are_those_of_the_widest_network() -> None:
    """Where nothing is cut, the shared gradient is the network's own."""
    net = random_net(SPACES["autoformer"])
    arch = net.space.largest()
    exact, inherited = (Session("dss", net, mode=mode).score([arch]).score("dss", 0) for mode in ("exact", "inherited"))
    for key in ("diversity", "saliency"):
        assert inherited.blocks[key] == pytest.approx(exact.blocks[key], rel=1e-5)


def test_refusals() -> None:
    net = random_net(SPACES["autoformer"])
    with pytest.raises(UserError, match="mode: 'fast' is not valid"):
        Session("dss", net, mode="fast")
    with pytest.raises(UserError, match="archs: there are none to score"):
        Session("dss", net).score([])
