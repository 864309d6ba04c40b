"""GradSign, NTK trace, TE-NAS, KNAS, ZiCo, Jacobian covariance: against loops over single images, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.jacob_cov import spread
from lightning_tas.proxies.roles import find_layers
from lightning_tas.proxies.sample_norms import weight_norms
from lightning_tas.proxies.te_nas import condition_number, te_nas
from lightning_tas.proxies.zico import inverse_variation

FAMILIES = ("autoformer", "autoprox_vit", "pit")
BATCH = 5
LABELS = torch.tensor([0, 3, 3, 5, 6])


def network(family: str, scale: float = 0.1) -> nn.Module:
    """A small network in which no parameter has a special value."""
    if family == "pit":
        arch = Architecture.from_dict({"base_dim": 8, "mlp_ratio": 2, "depth": [1, 2, 1], "num_heads": [1, 2, 4]})
    else:
        arch = Architecture.vit(12, [1, 2], [1, 2.5], family=family)
    net: nn.Module = tas.network(arch, num_classes=7, img_size=32, patch_size=16, in_chans=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + 0.05)
    return net.eval()


def images() -> Tensor:
    return torch.randn(BATCH, 2, 32, 32, generator=torch.Generator().manual_seed(1))


def score(name: str, net: nn.Module, **options: Any) -> tas.Score:
    return tas.score_one(name, net, images=images(), labels=LABELS, **options)


def matrices(net: nn.Module) -> dict[str, Tensor]:
    """The weights that count, by name: of linear layers and convolutions."""
    return {layer.weight: layer.module.weight for layer in find_layers(net) if layer.role != "norm"}  # type: ignore[misc]


def gradients(
    net: nn.Module, kind: str, names: Sequence[str] | None = None, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """For every image the gradients by all weights, or by `names`: of its loss, its own logit, or the sum of logits."""
    net = copy.deepcopy(net).to(dtype)
    of = list(matrices(net).values()) if names is None else [net.get_parameter(name) for name in names]
    found = []
    for image, label in zip(images().to(dtype), LABELS, strict=True):
        logits = net(image[None])[0]
        objective = {"loss": F.cross_entropy(logits, label), "own": logits[label], "sum": logits.sum()}[kind]
        found.append(list(torch.autograd.grad(objective, of)))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gradsign(family: str) -> None:
    net = network(family)
    singles = zip(*gradients(net, "loss"), strict=True)
    naive = sum(float(torch.stack(single).sign().sum(0).abs().sum()) for single in singles)
    found = score("gradsign", net)
    # Float32 may turn the sign of a gradient that is zero but for rounding, which moves the sum by 2.
    assert abs(found.value - naive) <= 4 < 1e-3 * naive
    assert found.value == int(found.value) and 0 < sum(found.parts) < found.value


@pytest.mark.parametrize("family", FAMILIES)
def test_ntk_trace(family: str) -> None:
    net = network(family)
    rows = torch.stack([torch.cat([g.flatten() for g in single]) for single in gradients(net, "own")])
    found = score("ntk_trace", net)
    assert found.value == pytest.approx(math.sqrt(torch.trace(rows @ rows.t()) / BATCH), rel=1e-5)
    assert 0 < sum(found.parts) < found.value


@pytest.mark.parametrize("family", FAMILIES)
def test_te_ntk(family: str) -> None:
    net = network(family)
    rows = torch.stack([torch.cat([g.flatten() for g in single]) for single in gradients(net, "sum")])
    values = np.linalg.svd(rows.numpy(), compute_uv=False) ** 2
    assert score("te_ntk", net).value == pytest.approx(-values[0] / values[-1], rel=1e-4)


def test_condition_numbers_are_clamped_or_invalid() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    assert condition_number(torch.diag(torch.tensor([4.0, 2.0, 1.0]).double())).item() == 4
    ones = torch.ones(3, 3, dtype=torch.float64)
    assert condition_number(ones).item() == pytest.approx(1e12)
    for broken in (eye * torch.nan, eye * torch.inf, eye * 0):
        assert condition_number(broken).isnan()


def test_te_regions() -> None:
    net = network("autoformer")
    batch = images()
    assert score("te_regions", net).value == BATCH
    batch[3], batch[4] = batch[0], batch[1]
    assert tas.score_one("te_regions", net, images=batch).value == BATCH - 2
    # Naive: patterns as rows, at the inputs of the GELUs.
    seen: list[Tensor] = []
    handles = [
        net.get_submodule(f"blocks.{i}.mlp.fc1").register_forward_hook(lambda *a: seen.append(a[2] > 0)) for i in (0, 1)
    ]
    net(batch)
    for handle in handles:
        handle.remove()
    patterns = torch.cat([y.flatten(1) for y in seen], dim=1)
    assert len(torch.unique(patterns, dim=0)) == BATCH - 2


def test_regions_of_equal_signs_are_one() -> None:
    """Inputs that no GELU tells apart share a region."""
    net = network("autoformer")
    with torch.no_grad():
        for i in (0, 1):
            net.get_submodule(f"blocks.{i}.mlp.fc1").bias.fill_(1e4)  # type: ignore[operator, union-attr]
    assert score("te_regions", net).value == 1


def test_te_nas_adds_ranks_of_the_comparison_set() -> None:
    table = {"te_ntk.value": np.array([-9.0, -2.0, -2.0, -5.0]), "te_regions.value": np.array([4.0, 4.0, 1.0, 2.0])}
    assert te_nas(table).tolist() == [1 + 3.5, 3.5 + 3.5, 3.5 + 1, 2 + 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_knas(family: str) -> None:
    net = network(family)
    rows = torch.stack([torch.cat([g.flatten() for g in single]) for single in gradients(net, "loss")])
    found = score("knas", net)
    assert found.value == pytest.approx((rows @ rows.t()).mean().item(), rel=1e-5)
    assert 0 < sum(found.parts) < found.value


@pytest.mark.parametrize("family", FAMILIES)
def test_knas_as_released(family: str) -> None:
    """Coordinate by coordinate, as the released code goes; the fifth image has no partner."""
    net = network(family)
    chosen = [name for name, parameter in net.named_parameters() if parameter.numel() >= 50][:11]
    assert not set(chosen) <= set(matrices(net)), "positions, biases or norms are among them"
    singles = gradients(net, "loss", chosen)
    naive = 0.0
    for i in range(len(chosen)):
        for entry in range(50):
            values = [single[i].flatten()[entry] for single in singles]
            first, second = torch.stack(values[:2]), torch.stack(values[2:4])
            naive += float(torch.dot(first - first.mean(), second - second.mean())) / 4**2
    assert score("knas", net, variant="reference").value == pytest.approx(naive, rel=1e-4)


def inverse_variation_by_hand(single: tuple[Tensor, ...], batches: int) -> float:
    groups = np.array_split(np.arange(len(single)), batches)
    means = [torch.stack(single)[torch.tensor(group)].mean(0) for group in groups]
    center, average = sum(means) / batches, sum(mean.abs() for mean in means) / batches
    deviation = (sum((mean - center) ** 2 for mean in means) / batches) ** 0.5  # type: ignore[operator]
    kept = deviation > 0
    return float((average[kept] / deviation[kept]).sum().log())


def inverse_variation_bounds(single: tuple[Tensor, ...], rounded: tuple[Tensor, ...]) -> tuple[float, float]:
    """Between what a layer's term of two batches lies if its gradients are known as well as float32 knows them.

    A weight's share is (|a| + |b|) / |a - b| for its gradients a and b, so an error of both by e gives at least
    (|a| + |b| - 2 e) / (|a - b| + 2 e) and at most the same with the signs of e turned. e is four times what these
    gradients are wrong by in autograd's float32, at the row's worst weight: other orders of summing round as much.
    """
    groups = np.array_split(np.arange(len(single)), 2)
    a, b = (torch.stack(single)[torch.tensor(group)].mean(0) for group in groups)
    wrong = torch.stack([(x - y).abs() for x, y in zip(single, rounded, strict=True)]).amax(0)
    e = 4 * wrong.flatten(1).amax(1).view(-1, *[1] * (wrong.ndim - 1))
    seen = a.abs() + b.abs() > 0  # a kernel's margin may look at nothing but padding
    size, apart, e = (a.abs() + b.abs())[seen], (a - b).abs()[seen], e.expand_as(a)[seen]
    assert (apart > 2 * e).all(), "the bounds of a weight whose difference is rounding would be infinitely far"
    low, high = (((size - s * e).clamp(min=0) / (apart + s * e)).sum().log() for s in (2, -2))
    return float(low), float(high)


# Scales at which no difference between two batches is near rounding, on any processor: the bounds are then far closer
# than the last line asks for.
@pytest.mark.parametrize(("family", "scale"), [("autoformer", 0.1), ("autoprox_vit", 0.1), ("pit", 0.15)])
def test_zico(family: str, scale: float) -> None:
    net = network(family, scale)
    exact = list(zip(*gradients(net, "loss"), strict=True))
    found = score("zico", net, batches=3)
    assert found.value == pytest.approx(sum(inverse_variation_by_hand(single, 3) for single in exact), rel=1e-4)
    assert 0 < sum(found.parts) < found.value
    rounded = zip(*gradients(net, "loss", dtype=torch.float32), strict=True)
    bounds = [inverse_variation_bounds(*pair) for pair in zip(exact, rounded, strict=True)]
    low, high = (sum(ends) for ends in zip(*bounds, strict=True))
    assert low <= score("zico", net).value <= high, "two batches, the default"
    # Another divisor in the variance (n - 1 for n) moves every layer by log sqrt 2: the bounds are much closer.
    assert high - low < 0.1 * len(bounds) * math.log(2) / 2


def test_zico_of_two_batches() -> None:
    """On given gradients, as float32 decides the smallest differences between two; a weight without any is left out."""
    grads = torch.randn(BATCH, 30, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads[:, 0] = 0.25
    assert inverse_variation(grads, 2).item() == pytest.approx(inverse_variation_by_hand(grads.unbind(), 2), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_jacob_cov(family: str) -> None:
    net = network(family)
    twin, rows = copy.deepcopy(net).double(), []
    for image in images().double():
        image.requires_grad_()
        rows.append(torch.autograd.grad(twin(image[None]).sum(), image)[0].flatten().numpy())
    eigenvalues = np.linalg.eigvalsh(np.corrcoef(np.stack(rows))) + 1e-5
    naive = -np.sum(np.log(eigenvalues) + 1 / eigenvalues)
    assert score("jacob_cov", net).value == pytest.approx(naive, rel=1e-3)


def test_equal_jacobians_have_the_worst_finite_spread() -> None:
    row = torch.randn(9, generator=torch.Generator().manual_seed(0))
    worst = spread(torch.stack([row, row, row])).item()
    assert worst == pytest.approx(-(math.log(3 + 1e-5) + 1 / (3 + 1e-5) + 2 * (math.log(1e-5) + 1e5)), rel=1e-9)
    assert spread(torch.stack([row, torch.ones(9)])).isnan()


@pytest.mark.parametrize(("tokens", "width", "out"), [(3, 40, 50), (60, 7, 9)])
def test_both_ways_to_a_norm(tokens: int, width: int, out: int) -> None:
    """Few tokens: by Gram matrices of tokens; many: by the gradient itself."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, tokens, width, generator=generator, dtype=torch.float64)
    grad = torch.randn(4, tokens, out, generator=generator, dtype=torch.float64)
    naive = [float((grad[b].t() @ x[b]).square().sum()) for b in range(4)]
    found = weight_norms(nn.Linear(width, out), x, grad)
    assert found.tolist() == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("name", ["gradsign", "ntk_trace", "te_ntk", "zico", "knas", "jacob_cov"])
def test_a_network_without_gradient_is_invalid(name: str) -> None:
    net = network("autoformer")
    with torch.no_grad():
        net.get_submodule("head").weight.zero_()  # type: ignore[operator, union-attr]
    found = score(name, net)
    assert not found.valid and found.value == -math.inf
    assert "no gradient reaches layer" in found.reason or (name == "jacob_cov" and "nan" in found.reason)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("zico", {"batches": 1}, "batches of zico: 1"),
        ("zico", {"batches": 6}, "at least 6 images, and its batch has 5"),
        ("knas", {"variant": "released"}, "reference"),
        ("knas", {"layers": 3}, "variant"),
    ],
)
def test_mistakes(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(name, network("autoformer"), **options)


def test_too_few_images() -> None:
    net = network("autoformer")
    with pytest.raises(UserError, match="at least 2"):
        tas.score_one("jacob_cov", net, batch_size=1)
    with pytest.raises(UserError, match="at least 4 images"):
        tas.score_one("knas", net, batch_size=3, variant="reference")


@pytest.mark.slow
def test_the_largest_base_network_is_finite_in_float32() -> None:
    names = ["gradsign", "ntk_trace", "te_ntk", "te_regions", "knas", "zico", "jacob_cov", "ntkt", "sept"]
    arch = tas.space("autoformer_base").largest()  # 76 million parameters
    found = tas.score_many(names, None, [arch], batch_size=2, build={"img_size": 32, "patch_size": 16})
    for name in names:
        assert np.isfinite(found.value(name)).all(), name
