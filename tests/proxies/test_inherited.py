"""Scores from one shared gradient: equal to slicing naively, one architecture at a time, and to the exact mode."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.cuts import widest
from lightning_tas.proxies.inherited import LOOKUPS, agreement
from lightning_tas.spaces import Dimension, SearchSpace, isotropic
from lightning_tas.spaces.predicates import Predicate

MATRICES = ("patch_embed.proj", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "conv", "fc", "head")
NAMES = ["params", "macs", *LOOKUPS, "dss_pp"]
OBJECTIVES = {"snip_norm": "logits", "synflow": "ones", "dss": "ones"}
FAMILIES = ("autoformer", "autoprox_vit", "pit")


def space(family: str) -> SearchSpace:
    if family != "pit":
        # Ratios of which int(ratio * width) is not exact, and choices that the largest network does not have first.
        axes: dict[str, Any] = {"embed_dim": [20, 24, 40], "depth": [1, 2, 3], "num_heads": [1, 2]}
        return isotropic("tiny", family, **axes, mlp_ratio=[1, 1.7, 2])
    dimensions = [
        Dimension("base_dim", "network", (5, 8), step=1),
        Dimension("mlp_ratio", "network", (1, 2), step=1),
        Dimension("num_heads", "stage", ((1, 2), (2, 4), (4, 8))),
        Dimension("depth", "stage", ((1, 2), (1, 3), (2,)), step=1),
    ]
    return SearchSpace("tiny", family, dimensions, [Predicate("divides_next", ("num_heads",))], stages=3)


def supernet(family: str) -> Any:
    """With every parameter random, and more allocated than the largest network of the space has."""
    own = space(family)
    if family != "pit":
        own = own.with_choices(allocated={"embed_dim": 48, "depth": 4})
    net = tas.supernet(own, num_classes=5, img_size=32, in_chans=1, patch_size=16)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + 0.05)
    return net


class Naive:
    """Every network's weights and inherited gradients, by cutting two supernets of which one holds the gradients."""

    def __init__(self, net: Any, objective: str, images: Tensor, labels: Tensor) -> None:
        self.net, self.gradients = net, tas.supernet(net.space, **_build(net))
        largest = net.space.largest()
        live = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.values = tas.supernet(net.space, **_build(net))
        if objective == "ones":
            live = {name: p.abs() for name, p in live.items()}
            images = torch.ones_like(images[:1])
        live = {name: p.requires_grad_() for name, p in live.items()}
        logits = torch.func.functional_call(net.eval(), live, (images, largest))
        loss = F.cross_entropy(logits, labels) if objective == "ce" else logits.sum()
        loss.backward()
        for name, p in live.items():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            self.values.get_parameter(name).data.copy_(p.detach())
            self.gradients.get_parameter(name).data.copy_(gradient)

    def pairs(self, arch: Architecture) -> dict[str, tuple[Tensor, Tensor]]:
        """(weight, gradient) of each parameter of a network, float64."""
        values, gradients = (n.subnet_state(arch) for n in (self.values, self.gradients))
        return {name: (values[name].double(), gradients[name].double()) for name in values}

    def matrices(self, arch: Architecture) -> dict[str, tuple[Tensor, Tensor]]:
        """Those of weight matrices and convolutions."""
        ends = tuple(f"{name}.weight" for name in MATRICES)
        return {name: pair for name, pair in self.pairs(arch).items() if name.endswith(ends)}


def _build(net: Any) -> dict[str, Any]:
    return {k: v for k, v in net.options.items() if k != "allocated"}


def nuclear(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix).sum()


def naive_score(name: str, naive: Naive, arch: Architecture) -> float:
    pairs = naive.matrices(arch)
    if name == "snip":
        return float(sum((w * g).abs().sum() for w, g in pairs.values()))
    if name == "plain":
        return float(sum((w * g).sum() for w, g in pairs.values()))
    if name == "grad_norm":
        return float(sum(g.norm() for _, g in pairs.values()))
    if name == "synflow":
        return float(sum((w * g).abs().sum() for w, g in pairs.values()))
    if name == "dss":
        attention = [p for n, p in pairs.items() if ".attn." in n]
        mlp = [p for n, p in pairs.items() if ".mlp." in n]
        return float(sum(nuclear(g) * nuclear(w) for w, g in attention) + sum((w * g).abs().sum() for w, g in mlp))
    assert name == "snip_norm"
    whole, own = naive.pairs(naive.net.space.largest()), naive.pairs(arch)
    total = 0.0
    for block in sorted({n[: n.index(".", n.index("blocks.") + 7)] for n in own if "blocks." in n}):
        mine, most = (
            sum(float((w * g).abs().sum()) for n, (w, g) in d.items() if n.startswith(f"{block}."))
            for d in (own, whole)
        )
        total += mine / most
    return total


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 3, 1, 4])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LOOKUPS)
def test_equals_slicing_one_architecture_at_a_time(name: str, family: str) -> None:
    net, (images, labels) = supernet(family), batch()
    archs = [*net.space.sample(1, n=4), net.space.smallest(), net.space.largest()]
    scores = tas.score_many(name, net, archs, mode="inherited", images=images, labels=labels)
    naive = Naive(net, OBJECTIVES.get(name, "ce"), images, labels)
    expected = [naive_score(name, naive, arch) for arch in archs]
    # float32 gradients of a pass that sums in another order
    np.testing.assert_allclose(scores.value(name), expected, rtol=2e-4 if name == "plain" else 2e-5)
    assert len(set(expected)) == len(set(archs)) and scores.valid(name).all() and scores.archs == archs


@functools.cache
def drawable(family: str) -> tuple[Any, list[Architecture], dict[str, Naive]]:
    """A supernet, every network of its space, and the naive side of each of its proxies."""
    net = supernet(family)
    naive = {objective: Naive(net, objective, *batch()) for objective in ("ce", "logits", "ones")}
    return net, list(net.space.enumerate()), {name: naive[OBJECTIVES.get(name, "ce")] for name in LOOKUPS}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_architectures_equal_their_slices(family: str) -> None:
    net, everything, naive = drawable(family)
    images, labels = batch()

    @settings(max_examples=5, deadline=None, phases=(Phase.generate,))  # networks are small already
    @given(st.lists(st.sampled_from(everything), min_size=1, max_size=4))
    def check(archs: list[Architecture]) -> None:
        scores = tas.score_many(list(LOOKUPS), net, archs, mode="inherited", images=images, labels=labels)
        for name in LOOKUPS:
            expected = [naive_score(name, naive[name], arch) for arch in archs]
            # What a sum rounds by goes with its terms: those of plain cancel, and SNIP is the sum of their sizes.
            size = np.abs(expected) if name != "plain" else [naive_score("snip", naive["snip"], arch) for arch in archs]
            assert (np.abs(scores.value(name) - expected) <= 2e-5 * np.asarray(size)).all(), name

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_network_inherits_its_own_gradients(family: str) -> None:
    net = supernet(family)
    arch = net.space.largest()
    assert arch == widest(net.space)
    shared = tas.score_many(NAMES, net, [arch], mode="inherited")
    for name in ("params", "macs", *LOOKUPS):
        alone = tas.score_one(name, net, arch)
        np.testing.assert_allclose(shared.value(name)[0], alone.value, rtol=1e-5, err_msg=name)
        for key, value in alone.extras.items():
            np.testing.assert_allclose(shared.extras(name, key)[0], value, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_are_architectures(family: str) -> None:
    net = supernet(family)
    codes = net.space.sample_codes(3, 100)
    by_codes = tas.score_many(NAMES, net, codes, mode="inherited")
    by_archs = tas.score_many(NAMES, net, net.space.decode(codes), mode="inherited")
    for name in NAMES:
        assert by_codes.value(name).tobytes() == by_archs.value(name).tobytes()
    costs = tas.cost(codes, net)
    assert (by_codes.params == costs.params).all() and by_codes.value("macs").tolist() == costs.macs.tolist()
    kept = tas.score_many(NAMES, net, iter(net.space.decode(codes[:20])), mode="inherited", shard=(0, 1))
    assert kept.value("dss").tobytes() == by_codes.value("dss")[:20].tobytes()


def test_space_whose_predicates_forbid_the_widest_network() -> None:
    """Tables hold every choice also where no network has all of them."""
    free = space("pit")
    own = SearchSpace("cut", "pit", free.dimensions, [*free.predicates, Predicate("total_between", ("depth", 4, 6))], 3)
    net = tas.supernet(own, num_classes=5, img_size=32, in_chans=1, patch_size=16)
    assert widest(own) not in own and own.largest().depth == 6
    scores = tas.score_many(["snip", "dss"], net, own.sample(0, n=5), mode="inherited")
    assert scores.valid("snip").all() and len(set(scores.value("dss").tolist())) > 1


@pytest.mark.parametrize("options", [{"mode": "released"}, {"qkv": "split"}, {"signed": True}, {"head_weight": 2}])
def test_options_of_dss(options: dict[str, Any]) -> None:
    net = supernet("autoformer")
    shared = tas.score_many("dss", net, [net.space.largest()], mode="inherited", options={"dss": options})
    alone = tas.score_one("dss", net, net.space.largest(), **options)
    np.testing.assert_allclose(shared.value("dss")[0], alone.value, rtol=1e-5)
    assert shared.value("dss")[0] != tas.score_many("dss", net, [net.space.largest()], mode="inherited").value("dss")[0]


@pytest.mark.parametrize("options", [{"norm": "l1l1"}, {"loss": "ce"}])
def test_options_of_snip_norm(options: dict[str, Any]) -> None:
    net = supernet("autoformer")
    largest, other = net.space.largest(), net.space.sample(0)
    given: dict[str, Any] = {"mode": "inherited", "options": {"snip_norm": options}}
    shared = tas.score_many("snip_norm", net, [largest, other], **given).value("snip_norm")
    np.testing.assert_allclose(shared[0], tas.score_one("snip_norm", net, largest, **options).value, rtol=1e-5)
    # The largest network is its own reference, so with norm="paper" every loss gives it one for each block.
    assert shared[1] < shared[0]
    assert shared[1] != tas.score_many("snip_norm", net, [other], mode="inherited").value("snip_norm")[0]


def test_agreement_is_kendalls_tau_of_the_two_modes() -> None:
    net = supernet("autoformer")
    archs = net.space.sample(0, n=12)
    exact, shared = (tas.score_many(["params", "snip"], net, archs, mode=mode) for mode in ("exact", "inherited"))
    a, b = exact.value("snip"), shared.value("snip")
    pairs = [(i, j) for i in range(12) for j in range(i)]
    signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in pairs]
    ties = [sum(v[i] == v[j] for i, j in pairs) for v in (a, b)]
    expected = sum(signs) / np.sqrt((len(pairs) - ties[0]) * (len(pairs) - ties[1]))
    assert agreement(exact, shared, "snip") == pytest.approx(expected) and 0 < expected < 1
    assert agreement(exact, shared, "params") == 1.0
    with pytest.raises(UserError, match="of different networks"):
        agreement(exact, tas.score_many(["params", "snip"], net, archs[:5]), "snip")


def test_dead_weights_give_invalid_scores() -> None:
    net = supernet("autoformer")
    with torch.no_grad():
        net.head.weight.zero_()
    scores = tas.score_many(["snip", "params"], net, net.space.sample(0, n=2), mode="inherited")
    assert not scores.valid("snip").any() and (scores.value("snip") == -np.inf).all()
    assert "no gradient reaches" in scores.reason("snip")[0] and scores.valid("params").all()


def test_mistakes() -> None:
    net = supernet("autoformer")
    archs = net.space.sample(0, n=2)
    with pytest.raises(UserError, match=r"'naswot' has no tables.*snip.*dss.*mode='exact'"):
        tas.score_many(["snip", "naswot"], net, archs, mode="inherited")
    with pytest.raises(UserError, match="needs a supernet"):
        tas.score_many("snip", None, archs, mode="inherited")
    with pytest.raises(UserError, match="needs a supernet"):
        tas.score_many("snip", net.subnet(archs[0]), archs, mode="inherited")
    with pytest.raises(UserError, match="has no effect with mode='inherited'"):
        options = {"snip_norm": {"space": "autoformer_tiny"}}
        tas.score_many("snip_norm", net, archs, mode="inherited", options=options)
    with pytest.raises(UserError, match="is outside the space"):
        tas.score_many("snip", net, [Architecture.vit(22, [1], [1])], mode="inherited")
    codes = net.space.encode(archs)
    with pytest.raises(UserError, match="are not integers"):
        tas.score_many("snip", net, codes[:, :-1], mode="inherited")
    codes[1, 0] = 9
    with pytest.raises(UserError, match="row 1 is no code"):
        tas.score_many("snip", net, codes, mode="inherited")
