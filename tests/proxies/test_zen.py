"""Zen equals its formula with weights and images drawn by hand, and counts what batch norms hide."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.randomness import torch_generator


def draw(net: nn.Module, seed: int, turn: int) -> None:
    """Layer by layer N(0, 1), biases 0; layer norms, tokens, positions and tables keep their values."""
    weights = torch_generator(seed, "proxy", "zen", "weights", turn)
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=weights))
                assert layer.bias is not None
                layer.bias.zero_()


def images_of(shape: tuple[int, ...], seed: int, turn: int) -> tuple[Tensor, Tensor]:
    generator = torch_generator(seed, "proxy", "zen", "images", turn)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def test_equals_formula(small: Any) -> None:
    found = small.score("zen", seed=4, repeat=3, alpha=0.02)
    scores = []
    for turn in range(3):
        draw(small.net, 4, turn)
        x, e = images_of(small.images.shape, 4, turn)
        with torch.no_grad():
            moved = (small.net.forward_features(x) - small.net.forward_features(x + 0.02 * e)).abs().double()
        scores.append(math.log(sum(image.sum().item() for image in moved) / len(x)))
    assert found.value == pytest.approx(sum(scores) / 3, rel=1e-6)


def test_neither_weights_nor_images_matter(small: Any) -> None:
    """It draws its own."""
    before = small.score("zen").value
    with torch.no_grad():
        for layer in small.net.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(3.0)
    small.images += 1
    assert small.score("zen").value == before != small.score("zen", seed=1).value


class WithBatchNorm(nn.Module):
    """A convolution and a batch norm before the head."""

    def __init__(self) -> None:
        super().__init__()
        # momentum None: the running variance is the mean of those of the forwards so far.
        self.conv, self.bn, self.head = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Linear(3, 4)

    def layer_roles(self) -> dict[str, str]:
        return {"conv": "patch_embed"}

    def forward_features(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x).mean((2, 3)))  # type: ignore[no-any-return]


def test_batch_norms_give_back_the_scale_that_they_hide() -> None:
    net = WithBatchNorm().train()
    with torch.no_grad():
        net.bn.weight.fill_(2.0)  # put to 1, as the reference does
    found = tas.score_one("zen", net, images=torch.randn(5, 2, 6, 6), repeat=1)
    draw(net, 0, 0)
    x, e = images_of((5, 2, 6, 6), 0, 0)
    with torch.no_grad():
        before, after = net.conv(x), net.conv(x + 0.01 * e)
        variance = (before.var((0, 2, 3)) + after.var((0, 2, 3))) / 2
        moved = (net.bn(before) - net.bn(after)).div(2.0).abs().flatten(1).sum(1).mean()
    assert found.value == pytest.approx((moved.log() + variance.mean().sqrt().log()).item(), rel=1e-5)


def test_no_repeat_is_refused(small: Any) -> None:
    with pytest.raises(UserError, match="repeat of zen: 0 is not valid"):
        small.score("zen", repeat=0)
