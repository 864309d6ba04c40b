"""Normalised SNIP against eq. 13 written out, with a supernet and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_tas as tas
from lightning_tas.architecture import Architecture, Block, Stage
from lightning_tas.errors import UserError
from lightning_tas.proxies import scorer
from lightning_tas.spaces import Dimension, SearchSpace, isotropic

BUILD = {"num_classes": 5, "img_size": 32, "patch_size": 16}
generator = torch.Generator().manual_seed(3)
IMAGES, LABELS = torch.randn(3, 3, 32, 32, generator=generator), torch.tensor([0, 4, 2])
Gradients = dict[str, tuple[Tensor, Tensor]]


def small_space(family: str) -> SearchSpace:
    if family != "pit":
        return isotropic("small", family, embed_dim=[24, 36], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])
    dimensions = [
        Dimension("base_dim", "network", (6, 8)),
        Dimension("mlp_ratio", "network", (1, 2)),
        Dimension("num_heads", "stage", ((1, 2), (2,), (4,))),
        Dimension("depth", "stage", (1, 2)),
    ]
    return SearchSpace("small", family, dimensions, stages=3)


@pytest.fixture(params=["autoformer", "autoprox_vit", "pit"])
def supernet(request: pytest.FixtureRequest) -> Any:
    net = tas.supernet(small_space(request.param), **BUILD).eval()
    own = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=own))
    return net


def inner(family: str) -> Architecture:
    """Smaller than the largest in everything, but at the same depth in the middle stage of a PiT."""
    if family == "pit":
        return Architecture(family, [Stage([Block()] * d, num_heads=h) for d, h in ((1, 1), (2, 2), (1, 4))], **PIT)
    return Architecture.vit(24, [2, 1], [1, 2], family=family)


PIT = {"base_dim": 6, "mlp_ratio": 1}


def gradients(net: nn.Module, loss: str) -> Gradients:
    """(weight, gradient) of every parameter in float64."""
    net = copy.deepcopy(net).double()
    logits = net(IMAGES.double())
    (logits.sum() if loss == "logits" else F.cross_entropy(logits, LABELS)).backward()
    return {name: (p.detach(), p.grad) for name, p in net.named_parameters()}  # type: ignore[misc]


def blocks_of(values: Gradients) -> list[str]:
    return list(dict.fromkeys(name.split(".attn.")[0] for name in values if ".attn." in name))


def eq13(values: Gradients, largest: Gradients) -> list[float]:
    def block(of: Gradients, name: str) -> float:
        return sum((w * g).abs().sum().item() for key, (w, g) in of.items() if key.startswith(f"{name}."))

    return [block(values, name) / block(largest, name) for name in blocks_of(values)]


def l1l1(values: Gradients, largest: Gradients) -> list[float]:
    def matrix(key: str) -> float:
        (w, g), (big_w, big_g) = values[key], largest[key]
        return ((w * g).abs().sum() / (big_w.abs().sum() * big_g.abs().sum())).item()

    kinds = ("attn.qkv", "mlp.fc1", "mlp.fc2")
    return [sum(matrix(f"{name}.{kind}.weight") for kind in kinds) for name in blocks_of(values)]


@pytest.mark.parametrize("loss", ["logits", "ce"])
@pytest.mark.parametrize(("norm", "formula"), [("paper", eq13), ("l1l1", l1l1)])
def test_snip_norm_is_its_formula(
    supernet: Any, norm: str, loss: str, formula: Callable[[Gradients, Gradients], list[float]]
) -> None:
    arch, largest = inner(supernet.space.family), supernet.space.largest()
    expected = formula(*(gradients(supernet.subnet(each), loss) for each in (arch, largest)))
    given = {"images": IMAGES, "labels": LABELS, "norm": norm, "loss": loss}
    found = tas.score_one("snip_norm", supernet, arch, **given)
    assert found.parts == pytest.approx(expected, rel=2e-5)
    assert found.value == pytest.approx(sum(expected), rel=2e-5)


def test_the_largest_network_is_its_own_measure(supernet: Any) -> None:
    largest = supernet.space.largest()
    found = tas.score_one("snip_norm", supernet, largest, images=IMAGES)
    assert found.parts == pytest.approx([1.0] * largest.depth, rel=1e-12)


def test_the_largest_network_is_measured_once(supernet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Architecture] = []
    sibling = scorer._sibling
    monkeypatch.setattr(scorer, "_sibling", lambda net, arch, *rest: (made.append(arch), sibling(net, arch, *rest))[1])
    archs = [inner(supernet.space.family), supernet.space.largest(), supernet.space.smallest()]
    together = tas.score_many("snip_norm", supernet, archs, images=IMAGES, labels=LABELS)
    assert made == [supernet.space.largest()]
    alone = [tas.score_one("snip_norm", supernet, arch, images=IMAGES, labels=LABELS).value for arch in archs]
    assert together.value("snip_norm").tolist() == alone


@pytest.mark.slow
def test_a_network_alone_is_measured_in_the_space_that_holds_it() -> None:
    """Drawn from the same seed: that of the smallest registered space, unless one is named."""
    arch = tas.space("autoformer_tiny").smallest()
    made = scorer.make_probe(None, arch, 0, IMAGES, LABELS, build=BUILD)
    assert made.sibling is not None
    largest = made.sibling(tas.space("autoformer_tiny").largest())
    expected = eq13(gradients(made.net, "logits"), gradients(largest, "logits"))
    given = {"images": IMAGES, "labels": LABELS, "build": BUILD}
    assert tas.score_one("snip_norm", None, arch, **given).parts == pytest.approx(expected, rel=1e-4)
    named = tas.score_one("snip_norm", None, arch, space="autoformer_tiny", **given)
    assert named.value == tas.score_one("snip_norm", None, arch, **given).value


def test_a_network_of_no_known_space_is_measured_by_its_own_choices() -> None:
    arch = Architecture.vit(24, [1, 2], [2, 1])
    net = tas.network(arch, **BUILD).eval()
    made = scorer.make_probe(net, None, 0, IMAGES, LABELS)
    assert made.sibling is not None
    widest = made.sibling(Architecture.vit(24, [2, 2], [2, 2]))
    expected = eq13(gradients(net, "logits"), gradients(widest, "logits"))
    found = tas.score_one("snip_norm", net, images=IMAGES, labels=LABELS)
    assert found.parts == pytest.approx(expected, rel=1e-4)


def test_what_is_refused() -> None:
    arch = Architecture.vit(24, [1], [2])
    cases: list[tuple[dict[str, str], str]] = [
        ({"norm": "l2"}, r"norm of snip_norm.*'l2'"),
        ({"loss": "mse"}, r"loss of snip_norm.*'mse'"),
        ({"space": "autoformer_tinny"}, r"space.*'autoformer_tinny'"),
        ({"space": "pit_ti"}, r"'pit_ti' is of family 'pit', not 'autoformer'"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            tas.score_one("snip_norm", None, arch, build=BUILD, batch_size=2, **options)
    deep = Architecture.vit(24, [1] * 15, [1] * 15)
    with pytest.raises(UserError, match=r"no network of 'autoformer_tiny' has the 15 blocks"):
        tas.score_one("snip_norm", None, deep, build=BUILD, batch_size=1, space="autoformer_tiny")
    other = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=1)
    score = tas.score_one("snip_norm", other, images=IMAGES, labels=LABELS)
    assert not score.valid and "no architecture" in score.reason
