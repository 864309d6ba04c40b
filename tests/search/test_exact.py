"""Exact search on the inherited tables of real supernets: brute force over every network agrees."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import lightning_tas as tas
from lightning_tas.additive import Term, Total
from lightning_tas.costs import CostOptions
from lightning_tas.errors import UserError
from lightning_tas.limits import Limits, Region
from lightning_tas.proxies.inherited import LOOKUPS
from lightning_tas.search.exact import exact_front, search_exact, search_tables
from lightning_tas.spaces import Dimension, Predicate, SearchSpace, isotropic


def space(family: str) -> SearchSpace:
    if family != "pit":
        axes: dict[str, Any] = {"embed_dim": [20, 24, 40], "depth": [1, 2, 3], "num_heads": [1, 2]}
        return isotropic("tiny", family, **axes, mlp_ratio=[1, 1.7, 2])
    dimensions = [
        Dimension("base_dim", "network", (5, 8)),
        Dimension("mlp_ratio", "network", (1, 2)),
        Dimension("num_heads", "stage", ((1, 2), (2, 4), (4, 8))),
        Dimension("depth", "stage", ((1, 2), (1, 3), (2,))),
    ]
    return SearchSpace("tiny", family, dimensions, [Predicate("divides_next", ("num_heads",))], stages=3)


def supernet(family: str) -> Any:
    net = tas.supernet(space(family), num_classes=5, img_size=32, in_chans=1, patch_size=16)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + 0.05)
    return net


@pytest.mark.parametrize("family", ["autoformer", "autoprox_vit", "pit"])
def test_brute_force_agrees_on_every_proxy(family: str) -> None:
    net = supernet(family)
    codes = net.space.encode(net.space.enumerate())
    every = tas.score_many(list(LOOKUPS), net, codes, mode="inherited")
    costs = tas.cost(codes, net)
    low, high = (int(np.quantile(costs.params, q)) for q in (0.3, 0.6))
    most = int(np.quantile(costs.macs, 0.4))
    limits = {"params": (low, high), "macs": (None, most)}
    within = (costs.params >= low) & (costs.params <= high) & (costs.macs <= most)
    for name in LOOKUPS:
        value = every.value(name)
        found = search_exact(net, name, limits, top=3)
        assert found.optimal and found.size == len(codes) == net.space.size()
        np.testing.assert_array_equal([n.score for n in found], np.sort(value[within])[::-1][:3])
        assert found.bound == found.networks[0].score
        archs = [n.arch for n in found]
        assert tas.score_many(name, net, archs, mode="inherited").value(name).tolist() == [n.score for n in found]
        assert [(n.params, n.macs) for n in found] == [tuple(tas.cost(arch, net)) for arch in archs]
    value = every.value("snip")
    rows = np.stack([costs.params, costs.macs, -value], axis=1)[within].round(12)
    rows = np.unique(rows, axis=0)
    below = (rows[:, None] <= rows[None]).all(axis=2) & ~np.eye(len(rows), dtype=bool)
    front = exact_front(net, "snip", limits)
    assert front.optimal and front.bound == 0 and len(front) > 3
    assert [[n.params, n.macs, round(-n.score, 12)] for n in front] == rows[~below.any(axis=0)].tolist()


def test_settings_reach_the_gradient_pass() -> None:
    net = supernet("autoformer")
    images, labels = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 3, 1, 4])
    given: dict[str, Any] = {"images": images, "labels": labels}
    limits = {"params": (None, 60_000)}  # the largest network scores the number of its blocks, whatever the loss
    found = search_exact(net, "snip_norm", limits, options={"loss": "ce"}, **given)
    again = tas.score_many(
        "snip_norm", net, [found.networks[0].arch], mode="inherited", options={"snip_norm": {"loss": "ce"}}, **given
    )
    other = search_exact(net, "snip_norm", limits, **given)
    assert found.networks[0].score == again.value("snip_norm")[0] != other.networks[0].score
    assert found.settings["proxy"] == "snip_norm" and found.settings["options"] == {"loss": "ce"}
    assert set(found.seconds) == {"tables", "costs", "search"}
    assert found.to_dict()["networks"][0]["arch"] == found.networks[0].arch.to_dict()


def test_one_member_and_none() -> None:
    net = supernet("autoformer")
    smallest = net.space.smallest()
    params = tas.cost(smallest, net).params
    found = search_exact(net, "dss", {"params": (params, params)}, top=7)
    assert [n.arch for n in found] == [smallest] and found.optimal
    with pytest.raises(UserError, match=r"no network of 'tiny' has params from 1 to 2; the space reaches params from"):
        search_exact(net, "dss", {"params": (1, 2)})
    # Each limit can be met, both together cannot.
    most = int(tas.cost(net.space.largest(), net).macs)
    with pytest.raises(UserError, match=r"params from .* and macs from"):
        search_exact(net, "dss", {"params": (params, params), "macs": (most, None)}, front=True)
    fixed = isotropic("one", embed_dim=[24], depth=[2], num_heads=[1], mlp_ratio=[2])
    alone = search_tables(fixed, Total(()), CostOptions(img_size=(32, 32)))
    assert [n.arch for n in alone] == [fixed.largest()] and alone.size == 1


class Limited:
    """What `lightning_tas.limits.Region` tells an exact search: here a third quantity."""

    def __init__(self, total: Total, exact: bool = True) -> None:
        self.total, self.exact = total, exact

    def whole_limits(self) -> tuple[dict[str, Total], dict[str, tuple[float, float]]]:
        return {"blocks": self.total}, {"blocks": (-np.inf, 1)}


def test_limits_on_other_sums() -> None:
    net = supernet("autoformer")
    depth = next(i for i, c in enumerate(net.space.columns) if c.name == "depth")
    region = Limited(Total((Term((depth,), np.array([1.0, 2.0, 3.0])),)))
    found = search_exact(net, "snip", region)
    assert found.networks[0].arch.depth == 1 < search_exact(net, "snip").networks[0].arch.depth
    with pytest.raises(UserError, match="but blocks is limited too"):
        search_exact(net, "snip", region, front=True)
    with pytest.raises(UserError, match="sums of whole numbers"):
        search_exact(net, "snip", Limited(region.total, exact=False))


@pytest.mark.parametrize(
    "given",
    [
        {"params": ["10k", "90k"]},
        {"params": (10_000, None), "macs": [None, "0.4M"]},
        {"macs": (None, None)},
        {"params": None},
        {"params": 5},
        {"params": "5k"},
        {"params": ["7k", "5k"]},
        {"params": ["ten", None]},
        {"params": [1, 2, 3]},
        {"params": [float("nan"), None]},
        {"params": [True, None]},
        {"params": [-1, None]},
        [("params", (1, 2))],
    ],
)
def test_limits_are_read_as_everywhere(given: Any) -> None:
    """As a `Region` reads them: the same networks, and the same words for what is wrong."""
    net = supernet("autoformer")
    total = Total((Term((0,), np.arange(3.0)),))
    options = CostOptions(img_size=(32, 32), in_chans=1, patch_size=16)
    try:
        region = Region(net.space, given, options)
    except UserError as error:
        with pytest.raises(UserError, match=f"^{re.escape(str(error))}$"):
            search_tables(net.space, total, options, given)
        return
    found = [search_tables(net.space, total, options, limits, 3) for limits in (region, given, Limits.read(given))]
    assert found[0] == found[1] == found[2] and region.allowed(net.space.encode([n.arch for n in found[1]])).all()


def test_mistakes() -> None:
    net = supernet("autoformer")
    with pytest.raises(UserError, match=r"'dss_pp' ranks networks among those beside them.*snip.*dss"):
        search_exact(net, "dss_pp")
    with pytest.raises(UserError, match="'naswot' is no sum over blocks"):
        search_exact(net, "naswot")
    with pytest.raises(UserError, match="needs a supernet"):
        search_exact(net.subnet(net.space.smallest()), "snip")
    with pytest.raises(UserError, match=r"limits: 'param' is not valid.*Did you mean 'params'"):
        search_exact(net, "snip", {"param": (1, 2)})
    with pytest.raises(UserError, match="limits: 'latency' is not valid; valid: params, macs"):
        search_exact(net, "snip", {"latency": (None, 2)})
    with pytest.raises(UserError, match="top: 0"):
        search_exact(net, "snip", top=0)
    with torch.no_grad():
        net.head.weight.zero_()
    with pytest.raises(UserError, match="snip: no network has a valid score: no gradient reaches"):
        search_exact(net, "snip")
