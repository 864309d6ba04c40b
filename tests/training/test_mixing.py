"""Mixing equals timm's under the same NumPy seed, and is a function of its seed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torch import Tensor

from lightning_tas.training.mixing import Mixing

MODES = ["batch", "pair", "elem"]
SETTINGS = [(0.8, 1.0, 1.0), (0.8, 0.0, 1.0), (0.0, 1.0, 1.0), (0.8, 1.0, 0.5)]


def batch(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, 9, 7, generator=generator), torch.randint(5, (n,), generator=generator)


def mixing(mode: str, mixup: float = 0.8, cutmix: float = 1.0, prob: float = 1.0) -> Mixing:
    return Mixing(Mixup(mixup, cutmix, prob=prob, mode=mode, label_smoothing=0.1, num_classes=5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mixup", "cutmix", "prob"), SETTINGS)
def test_equals_timm(mode: str, mixup: float, cutmix: float, prob: float) -> None:
    theirs = Mixup(mixup, cutmix, prob=prob, mode=mode, label_smoothing=0.1, num_classes=5)
    images, targets = batch(8)
    mixed = 0
    for seed in range(20):
        np.random.seed([0, seed])
        want_images, want_targets = theirs(images.clone(), targets)
        got_images, got_targets = mixing(mode, mixup, cutmix, prob)(images, targets, seed)
        torch.testing.assert_close(got_images, want_images, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_targets, want_targets, rtol=1e-6, atol=1e-6)
        mixed += not torch.equal(got_images, images)
    assert mixed > 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_odd_batches_work_and_their_middle_sample_is_left_alone(mode: str, n: int) -> None:
    images, targets = batch(n)
    plain = torch.nn.functional.one_hot(targets, 5) * 0.9 + 0.02
    for seed in range(10):
        got_images, got_targets = mixing(mode)(images, targets, seed)
        assert got_images.shape == images.shape and got_targets.shape == (n, 5)
        torch.testing.assert_close(got_targets.sum(1), torch.ones(n))
        if n % 2:
            torch.testing.assert_close(got_images[n // 2], images[n // 2])
            torch.testing.assert_close(got_targets[n // 2], plain[n // 2])


@pytest.mark.parametrize("mode", MODES)
def test_depends_on_its_seed_alone_and_leaves_no_trace(mode: str) -> None:
    images, targets = batch(6)
    kept = images.clone()
    np.random.seed(1)
    state = np.random.get_state(legacy=False)["state"]["key"].copy()
    first = mixing(mode)(images, targets, 2**62 + 5)
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], state) and torch.equal(images, kept)
    np.random.seed(2)
    torch.manual_seed(2)
    again = mixing(mode)(images, targets, 2**62 + 5)
    other = mixing(mode)(images, targets, 2**62 + 6)
    high_bits = mixing(mode)(images, targets, 5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], high_bits[0])


def test_targets_carry_the_share_of_pixels() -> None:
    images = torch.zeros(2, 1, 10, 10)
    images[1] = 1
    cut = Mixing(Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.0, num_classes=2))
    shares = []
    for seed in range(10):
        got, targets = cut(images, torch.tensor([0, 1]), seed)
        torch.testing.assert_close(targets[0, 1], got[0].mean())
        shares.append(float(got[0].mean()))
    assert min(shares) < 0.2 and max(shares) > 0.5
