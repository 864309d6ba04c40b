"""Augmentation: fast and per-image forms agree, randomness is the sample's own, every kind of image passes."""

from __future__ import annotations

import dataclasses
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval, transforms_imagenet_train

from lightning_tas.data.augment import Pipeline, as_picture, as_tensor
from lightning_tas.data.config import DataConfig
from lightning_tas.data.dataset import AugmentedImages
from lightning_tas.data.draws import preserved, sample_seeds, seeded, uniforms
from lightning_tas.data.loader import CountedLoader
from lightning_tas.data.registry import ArrayImages
from lightning_tas.data.sampling import TrainOrder
from lightning_tas.errors import UserError
from lightning_tas.randomness import numpy_generator

LIGHT = DataConfig(crop="pad", auto_augment=None, color_jitter=0.0, reprob=0.0)


class Listed(torch.utils.data.Dataset):
    """The images of an `ArrayImages`, in a form that only the per-image path takes."""

    def __init__(self, images: ArrayImages) -> None:
        self.images, self.targets = images, images.targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, target = self.images[index]
        return image, target


def arrays(count: int = 12, size: tuple[int, int] = (9, 12), chans: int = 1) -> ArrayImages:
    pixels = numpy_generator(0, "pixels").integers(0, 256, (count, *size, chans), dtype=np.uint8)
    return ArrayImages(pixels, np.arange(count) % 3)


def pipeline(config: DataConfig, chans: int = 1, size: tuple[int, int] = (9, 12), train: bool = True) -> Pipeline:
    mean, std = (0.4, 0.5, 0.6, 0.3)[:chans], (0.2, 0.3, 0.25, 0.22)[:chans]
    return Pipeline(config, size, chans, mean, std, train)


def keys(count: int, epoch: int = 4) -> np.ndarray:
    return np.stack([np.full(count, epoch), np.arange(count), np.arange(count) % 2], axis=1)


@pytest.mark.parametrize("chans", [1, 3, 4])
@pytest.mark.parametrize("size", [(9, 12), (12, 16)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"crop": "none"},
        {"crop_padding": 3, "hflip": 1.0},
        {"reprob": 0.9, "recount": 3},
        {"reprob": 1.0, "remode": "rand"},
    ],
)
def test_batch_form_equals_image_form(chans: int, size: tuple[int, int], changes: dict[str, Any]) -> None:
    images = arrays(chans=chans)
    pipe = pipeline(dataclasses.replace(LIGHT, **changes), chans, size)
    fast = AugmentedImages(images, np.arange(12), pipe, seed=1)
    slow = AugmentedImages(Listed(images), np.arange(12), pipe, seed=1)
    assert fast.pixels is not None and slow.pixels is None
    for epoch in (0, 5):
        (x, y), (u, v) = fast.__getitems__(keys(12, epoch)), slow.__getitems__(keys(12, epoch))
        assert torch.equal(x, u) and torch.equal(y, v)
        assert x.dtype == torch.float32 and x.shape == (12, chans, *size) and y.dtype == torch.int64


def test_pad_crop_and_flip_are_what_they_say() -> None:
    """Against a naive formula on one image at a time."""
    images = arrays(count=40, size=(8, 8))
    pipe = pipeline(LIGHT, size=(8, 8))
    all_keys = keys(40)
    x, _ = AugmentedImages(images, np.arange(40), pipe, seed=2).__getitems__(all_keys)
    draws = uniforms(sample_seeds(2, all_keys), 3)
    offsets = set()
    for i in range(40):
        padded = np.zeros((10, 10), np.uint8)
        padded[1:9, 1:9] = images.images[i, 0].numpy()
        top, left = int(draws[i, 0] * 3), int(draws[i, 1] * 3)
        offsets.add((top, left))
        part = padded[top : top + 8, left : left + 8]
        part = part[:, ::-1] if draws[i, 2] < 0.5 else part
        assert np.allclose(x[i, 0].numpy(), (part / 255 - 0.4) / 0.2, atol=1e-6)
    assert len(offsets) == 9


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("crop", ["rrc", "pad", "none"])
def test_evaluation_in_memory_equals_image_form(train: bool, crop: str) -> None:
    images = arrays()
    config = dataclasses.replace(LIGHT, crop=crop)
    pipe = pipeline(config, size=(14, 10), train=train)
    used = np.array([1, 4, 5, 11])
    fast = AugmentedImages(images, used, pipe, seed=1)
    slow = AugmentedImages(Listed(images), used, pipe, seed=1)
    assert (fast.pixels is None) == (train and crop == "rrc")
    asked = keys(12)[[5, 1, 11]]
    assert torch.equal(fast.__getitems__(asked)[0], slow.__getitems__(asked)[0])


@pytest.mark.parametrize("chans", [1, 3])
@pytest.mark.parametrize(
    "auto_augment", ["rand-m9-mstd0.5-inc1", "rand-m10-n3-mstd0.5-inc1", "v0r-mstd0.5", "augmix-m3-w3", "3a"]
)
def test_strong_augmentation_takes_grey_and_colour(auto_augment: str, chans: int) -> None:
    images = arrays(count=60, size=(10, 10), chans=chans)
    config = DataConfig(auto_augment=auto_augment)
    data = AugmentedImages(images, np.arange(60), pipeline(config, chans, (10, 10)), seed=0)
    x, _ = data.__getitems__(keys(60))
    assert x.shape == (60, chans, 10, 10) and bool(torch.isfinite(x).all())
    assert not torch.equal(x, data.__getitems__(keys(60, epoch=5))[0])
    assert torch.equal(x, data.__getitems__(keys(60))[0])


def test_posterise_to_zero_bits_is_black() -> None:
    """Magnitude 10 of the increasing form; newer Pillow refuses 0 bits."""
    config = DataConfig(auto_augment="rand-m10-inc1", crop="none", hflip=0.0, reprob=0.0)
    colours = pipeline(config, 3).colours
    op = next(op for op in colours.transforms[0].ops if op.name == "PosterizeIncreasing")
    op.prob = 1.0
    assert np.asarray(op(Image.new("RGB", (3, 3), (200, 10, 90)))).max() == 0


def test_colours_and_crop_are_those_of_timm() -> None:
    """The whole chain equals timm's own transform under the same seed, its flip aside (that draws from torch)."""
    image = Image.fromarray(numpy_generator(1, "image").integers(0, 256, (40, 50, 3), dtype=np.uint8))
    config = DataConfig(hflip=0.0)
    ours = pipeline(config, 3, (24, 32))
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    theirs = transforms_imagenet_train(
        (24, 32), hflip=0.0, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", mean=mean, std=std,
        re_prob=0.25, re_mode="pixel", re_count=1,
    )  # fmt: skip
    for seed in range(20):
        with preserved():
            mine = ours.item(image, seed)
            seeded(seed)
            assert torch.allclose(mine, theirs(image), atol=1e-6)


@pytest.mark.parametrize("size", [(24, 24), (24, 32)])
def test_evaluation_is_that_of_timm(size: tuple[int, int]) -> None:
    image = Image.fromarray(numpy_generator(1, "image").integers(0, 256, (60, 50, 3), dtype=np.uint8))
    ours = pipeline(DataConfig(), 3, size, train=False)
    theirs = transforms_imagenet_eval(size, 0.875, interpolation="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    assert torch.allclose(ours.item(image, 0), theirs(image), atol=1e-6)


def test_colour_jitter_is_inactive_under_auto_augment() -> None:
    names = [type(t).__name__ for t in pipeline(DataConfig(), 3).colours.transforms]
    assert names == ["RandAugment"]
    names = [type(t).__name__ for t in pipeline(DataConfig(auto_augment=None), 3).colours.transforms]
    assert names == ["ColorJitter"]
    assert pipeline(DataConfig(auto_augment=None, color_jitter=0.0), 3).colours is None


def test_four_channels_need_plain_augmentation() -> None:
    with pytest.raises(UserError, match="auto_augment=null"):
        pipeline(DataConfig(), 4)
    config = dataclasses.replace(LIGHT, crop="rrc", reprob=0.5)
    data = AugmentedImages(arrays(chans=4), np.arange(12), pipeline(config, 4), seed=0)
    assert data.__getitems__(keys(12))[0].shape == (12, 4, 9, 12)


def test_channel_conversions() -> None:
    grey, colour = arrays(chans=1), arrays(chans=3)
    three = as_tensor(as_picture(grey[0][0], 3))
    assert torch.equal(three, grey[0][0].expand(3, -1, -1))
    assert as_tensor(as_picture(colour[0][0], 1)).shape == (1, 9, 12)
    assert torch.equal(as_tensor(as_picture(colour[0][0].permute(1, 2, 0).numpy(), 3)), colour[0][0])
    with pytest.raises(UserError, match="4 channels"):
        as_picture(arrays(chans=4)[0][0], 3)


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


@pytest.mark.parametrize("config", [DataConfig(), dataclasses.replace(LIGHT, reprob=1.0)], ids=["strong", "light"])
def test_global_generators_are_untouched_and_unused(config: DataConfig) -> None:
    data = AugmentedImages(arrays(), np.arange(12), pipeline(config), seed=0)
    before = states()
    loader = CountedLoader(data, TrainOrder(np.arange(12), 4, seed=0))
    first = list(loader)
    assert states() == before
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for (x, y), (u, v) in zip(first, list(loader), strict=True):
        assert torch.equal(x, u) and torch.equal(y, v)


@pytest.mark.parametrize("config", [DataConfig(), LIGHT], ids=["strong", "light"])
def test_batches_do_not_depend_on_workers(config: DataConfig) -> None:
    data = AugmentedImages(arrays(count=23), np.arange(23), pipeline(config), seed=0)

    def run(num_workers: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        loader = CountedLoader(data, TrainOrder(np.arange(23), 4, seed=0, repeats=2), num_workers=num_workers)
        epochs = []
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            epochs.append([(x.clone(), y.clone()) for x, y in loader])
        return epochs

    alone, helped = run(0), run(2)
    assert len(alone[0]) == 5
    for a, b in zip(alone[0] + alone[1], helped[0] + helped[1], strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(alone[0][0][0], alone[1][0][0])


def test_an_image_is_augmented_alike_in_any_company() -> None:
    data = AugmentedImages(arrays(), np.arange(12), pipeline(DataConfig()), seed=0)
    together = data.__getitems__(keys(12))[0]
    for i in (0, 7):
        assert torch.equal(data.__getitems__(keys(12)[i : i + 1])[0][0], together[i])
    assert torch.equal(data[tuple(keys(12)[3])][0][0], together[3])


def test_padding_is_black_and_marked() -> None:
    for source in (arrays(), Listed(arrays())):
        data = AugmentedImages(source, np.arange(12), pipeline(LIGHT, train=False), seed=0)
        x, y = data.__getitems__(np.array([[0, 2, 0], [0, -1, 0]]))
        assert y.tolist() == [2, -1]
        assert torch.allclose(x[1], torch.tensor((0 - 0.4) / 0.2))


def test_pipelines_pickle() -> None:
    """Workers started by spawn or forkserver get the data set by pickle."""
    data = AugmentedImages(arrays(), np.arange(12), pipeline(DataConfig()), seed=0)
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.__getitems__(keys(12))[0], data.__getitems__(keys(12))[0])


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    many = uniforms(sample_seeds(0, keys(20_000)), 3)
    assert many.min() >= 0 and many.max() < 1
    assert np.abs(many.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(many.T) - np.eye(3)).max() < 0.03
    assert np.array_equal(uniforms(sample_seeds(0, keys(5)), 3), many[:5])
    assert len({int(s) for s in sample_seeds(0, keys(20_000))}) == 20_000
    assert (sample_seeds(0, keys(9)) != sample_seeds(1, keys(9))).all()
    assert (sample_seeds(0, keys(9, epoch=0)) != sample_seeds(0, keys(9, epoch=1))).all()
