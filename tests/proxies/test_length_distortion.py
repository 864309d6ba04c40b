"""Length distortion equals a backward pass per coordinate and the length of a polygon; positions are resampled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies.length_distortion import circle, one_patch_twin, remove_norms
from lightning_tas.randomness import torch_generator


def pooled(net: Any, images: Tensor) -> Tensor:
    return net.forward_head(net.forward_features(images), pre_logits=True)  # type: ignore[no-any-return]


def of_turn(seed: int, turn: int) -> torch.Generator:
    return torch_generator(seed, "proxy", "length_distortion", turn)


def by_backward(net: nn.Module, generator: torch.Generator, points: int, shape: tuple[int, ...]) -> float:
    """As the released code: for every point and coordinate of the features one backward pass to theta."""
    start, along = circle(generator, 1, shape)  # the point at theta = 0 and the one a quarter on
    length = 0.0
    for at in torch.linspace(0, 2 * math.pi, points, dtype=torch.float64):
        theta = at.clone().requires_grad_()
        z = pooled(net, theta.cos() * start + theta.sin() * along)[0]
        jacobian = [torch.autograd.grad(coordinate, theta, retain_graph=True)[0].item() for coordinate in z]
        length += math.sqrt(sum(j * j for j in jacobian))
    return length


@pytest.mark.parametrize("norms", ["identity", "keep"])
def test_equals_a_backward_pass_per_coordinate(small: Any, norms: str) -> None:
    found = small.score("length_distortion", seed=2, points=4, repeat=2, norms=norms)
    twin, side = one_patch_twin(small.net)
    if norms == "identity":
        remove_norms(twin)
        assert not any(isinstance(module, nn.LayerNorm) for module in twin.modules())
    assert side == (16, 16)
    lengths = [by_backward(twin.double(), of_turn(2, turn), 4, (3, 16, 16)) for turn in range(2)]
    assert found.value == pytest.approx(sum(lengths) / 2, rel=1e-5)


def test_equals_the_length_of_a_polygon(small: Any) -> None:
    """The sum times the step is the curve's length; a polygon on it is shorter by O(step^2)."""
    points = 1001
    found = small.score("length_distortion", points=points, repeat=1).value
    twin = one_patch_twin(small.net)[0].double()
    remove_norms(twin)
    x, dx = circle(of_turn(0, 0), points, (3, 16, 16))
    with torch.no_grad():
        corners = pooled(twin, x)
        first = (pooled(twin, x[:1] + 1e-6 * dx[:1]) - pooled(twin, x[:1] - 1e-6 * dx[:1])).norm().item() / 2e-6
    # 0 and 2 pi are the same point, which the sum has twice.
    assert (found - first) * 2 * math.pi / (points - 1) == pytest.approx(
        corners.diff(dim=0).norm(dim=1).sum().item(), rel=1e-4
    )


def test_circle_is_a_circle() -> None:
    x, dx = circle(torch.Generator().manual_seed(0), 9, (2, 3, 4))
    flat, tangent = x.flatten(1), dx.flatten(1)
    torch.testing.assert_close(flat.norm(dim=1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close((flat * tangent).sum(1), torch.zeros(9, dtype=torch.float64))
    torch.testing.assert_close(tangent[:7], flat[2:])  # a quarter of the circle ahead
    torch.testing.assert_close(x[0], x[8])


def test_twin_of_a_network_for_one_patch_is_the_network(small: Any) -> None:
    net = tas.network(small.arch, num_classes=5, img_size=16, patch_size=16).eval()
    twin, _ = one_patch_twin(net)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(twin(images), net(images), rtol=0, atol=0)


def test_takes_timm_s_networks_and_refuses_others() -> None:
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=1, num_heads=2, num_classes=5, dynamic_img_size=False
    )
    found = tas.score_one("length_distortion", net, images=torch.randn(2, 3, 32, 32), points=5)
    assert found.valid and found.value > 0 and net.patch_embed.img_size == (32, 32)
    other = nn.Sequential()
    other.head = nn.Linear(4, 4)
    with pytest.raises(UserError, match="length_distortion: Sequential has no set_input_size"):
        tas.score_one("length_distortion", other, images=torch.randn(2, 3, 4, 4))


def test_large_weights_without_norms_are_finite(small: Any) -> None:
    """Their product leaves the range of float32; the length in float64 is still a number."""
    with torch.no_grad():
        for name, parameter in small.net.named_parameters():
            if name.endswith("weight") and "norm" not in name:
                parameter.mul_(1e6)
    found = small.score("length_distortion", points=7)
    assert found.valid and found.value > torch.finfo(torch.float32).max


def test_mistakes_are_refused(small: Any) -> None:
    with pytest.raises(UserError, match=r"norms of length_distortion: 'kept' is not valid.*keep"):
        small.score("length_distortion", norms="kept")
    with pytest.raises(UserError, match="points of length_distortion: 0 is not valid"):
        small.score("length_distortion", points=0)
