"""NTKT: against loops over single images and against Jacobians written out, in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies import ntkt
from lightning_tas.proxies.probe import quiet
from lightning_tas.proxies.roles import block_names
from lightning_tas.proxies.scorer import make_probe

BATCH = 3
SMALL = {"num_classes": 5, "img_size": 16, "patch_size": 8, "in_chans": 2}


def network(family: str, **options: Any) -> nn.Module:
    """A small network in which no parameter has a special value."""
    if family == "pit":
        arch = Architecture.from_dict({"base_dim": 4, "mlp_ratio": 2, "depth": [1, 2, 1], "num_heads": [1, 2, 4]})
    else:
        arch = Architecture.vit(8, [1, 2], [1, 2.5], family=family)
    net: nn.Module = tas.network(arch, **{**SMALL, **options})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + 0.05)
    return net.eval()


def images() -> Tensor:
    return torch.randn(BATCH, 2, 16, 16, generator=torch.Generator().manual_seed(1))


def score(net: nn.Module, seed: int = 0, **options: Any) -> tas.Score:
    return tas.score_one("ntkt", net, seed=seed, images=images(), **options)


def last_tokens(net: nn.Module) -> Tensor:
    """What leaves the last block, (B, T, d), with its graph."""
    seen: list[Tensor] = []
    handle = net.get_submodule(block_names(net)[-1]).register_forward_hook(lambda *a: seen.append(a[2]))
    net(images().double())
    handle.remove()
    return seen[0]


def counted(net: nn.Module, params: str) -> list[Tensor]:
    """The parameters that count: everything before the last block's output, or ETAS's list."""
    if params == "all":
        return [p for name, p in net.named_parameters() if not name.startswith(("norm.", "head."))]
    kinds = ("patch_embed.proj.weight", "qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight")
    return [p for name, p in net.named_parameters() if name.endswith(kinds)]


def outputs(z: Tensor, variant: str) -> Tensor:
    """What the trace is of, per image: equation 13 divides all tokens by T, equation 12 takes their mean."""
    return z / z.shape[1] if variant == "eq13" else z.mean(1)


def squares(value: Tensor, weights: list[Tensor]) -> float:
    found = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    return sum(float(g.square().sum()) for g in found if g is not None)


def trace(net: nn.Module, variant: str, params: str) -> float:
    """Exactly: every row of every image's Jacobian."""
    net = copy.deepcopy(net).double()
    rows = outputs(last_tokens(net), variant).flatten()
    return sum(squares(row, counted(net, params)) for row in rows)


@pytest.mark.parametrize("params", ntkt.PARAMS)
@pytest.mark.parametrize("variant", ntkt.VARIANTS)
@pytest.mark.parametrize("family", ["autoformer", "autoprox_vit", "pit"])
def test_exact_for_the_vector_drawn(family: str, variant: str, params: str) -> None:
    net = network(family)
    twin = copy.deepcopy(net).double()
    of = outputs(last_tokens(twin), variant)
    with quiet():
        probe = make_probe(net, None, 0, images())
    signs = ntkt.signs(probe, of.shape, 0)
    assert set(signs.unique().tolist()) == {-1, 1}
    naive = sum(squares((of[b] * signs[b]).sum(), counted(twin, params)) for b in range(BATCH))
    found = score(net, variant=variant, params=params)
    assert found.valid and found.value == pytest.approx(naive, rel=1e-5)
    assert len(found.parts) == len(block_names(net)) and 0 < sum(found.parts) < found.value


@pytest.mark.parametrize("options", [{"pre_norm": False}, {"abs_pos": False, "qkv_bias": False, "pool": "token"}])
def test_other_builds(options: dict[str, Any]) -> None:
    net = network("autoformer", **options)
    twin = copy.deepcopy(net).double()
    of = outputs(last_tokens(twin), "eq13")
    with quiet():
        signs = ntkt.signs(make_probe(net, None, 0, images()), of.shape, 0)
    naive = sum(squares((of[b] * signs[b]).sum(), counted(twin, "all")) for b in range(BATCH))
    assert score(net).value == pytest.approx(naive, rel=1e-5)


@pytest.mark.parametrize("params", ntkt.PARAMS)
@pytest.mark.parametrize("family", ["autoformer", "pit"])
def test_after_the_final_norm(family: str, params: str) -> None:
    """Its parameters belong to all of them."""
    net = network(family)
    twin: Any = copy.deepcopy(net).double()
    of = outputs(twin.forward_features(images().double()), "eq13")
    with quiet():
        signs = ntkt.signs(make_probe(net, None, 0, images()), of.shape, 0)
    weights = counted(twin, params) + (list(twin.norm.parameters()) if params == "all" else [])
    naive = sum(squares((of[b] * signs[b]).sum(), weights) for b in range(BATCH))
    found = score(net, params=params, output="norm")
    assert found.value == pytest.approx(naive, rel=1e-5)
    assert found.value != pytest.approx(score(net, params=params).value, rel=1e-2)


@pytest.mark.parametrize("variant", ntkt.VARIANTS)
def test_the_estimate_is_unbiased(variant: str) -> None:
    net = network("autoformer")
    exact = trace(net, variant, "all")
    found = np.array([score(net, seed, variant=variant).value for seed in range(60)])
    error = found.std(ddof=1) / len(found) ** 0.5
    assert error < 0.03 * exact, "too few vectors to tell"
    assert abs(found.mean() - exact) < 3 * error


def test_the_two_equations_differ() -> None:
    net = network("autoformer")
    assert trace(net, "eq13", "all") != pytest.approx(trace(net, "mean", "all"), rel=0.05)


def test_several_probes_are_averaged() -> None:
    net = network("autoformer")
    with quiet():
        probe = make_probe(net, None, 0, images())
    of = outputs(last_tokens(twin := copy.deepcopy(net).double()), "mean")
    naive = [
        sum(squares((of[b] * ntkt.signs(probe, of.shape, i)[b]).sum(), counted(twin, "all")) for b in range(BATCH))
        for i in range(3)
    ]
    assert len(set(naive)) == 3
    assert score(net, variant="mean", probes=3).value == pytest.approx(np.mean(naive), rel=1e-5)


def test_a_dead_layer_is_invalid() -> None:
    net = network("autoformer")
    with torch.no_grad():
        net.get_submodule("blocks.1.attn.proj").weight.zero_()  # type: ignore[operator, union-attr]
    found = score(net)
    assert not found.valid and found.reason == "no gradient reaches layer blocks.1.attn.qkv"


def test_a_parameter_without_a_rule_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    net = network("autoformer")
    net.get_submodule("blocks.0").drop_path = Scaled()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"blocks\.0\.drop_path\.gamma.*params='paper'"):
        score(net)
    assert score(net, params="paper").valid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "eq12"}, "eq13"),
        ({"params": "most"}, "paper"),
        ({"output": "head"}, "block"),
        ({"probes": 0}, "probes of ntkt: 0"),
        ({"probe": 1}, "probes"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(network("autoformer"), **options)
