"""Built-in data sets that fit in memory: digits, Fashion-MNIST, CIFAR-10/100, and synthetic images."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_tas.data.config import DataConfig, size_pair
from lightning_tas.data.registry import ArrayImages, Facts, ImageData, register
from lightning_tas.data.splits import stratified
from lightning_tas.errors import UserError
from lightning_tas.randomness import numpy_generator

# ---- digits ----------------------------------------------------------------------------------------------------------

_DIGITS = Facts(10, (8, 8), 1, (0.3053,), (0.3762,), num_train=1437, num_test=360)


@register("digits", _DIGITS)
def digits(config: DataConfig) -> ImageData:
    """scikit-learn's 1,797 handwritten digits of 8 x 8; 360 of them, a fifth of each class, are the test set."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    targets = data.target.astype(np.int64)
    # A constant seed: the test set is part of the data set, not of the run.
    test = stratified(targets, 360, seed=0, purpose="digits-test")
    train = np.setdiff1d(np.arange(len(targets)), test)
    parts = [ArrayImages(images[part], targets[part]) for part in (train, test)]
    return _image_data(_DIGITS, parts, [str(name) for name in data.target_names])


# ---- Fashion-MNIST ---------------------------------------------------------------------------------------------------

_FASHION = Facts(10, (28, 28), 1, (0.2860,), (0.3530,), num_train=60_000, num_test=10_000)
_FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


@register("fashion_mnist", _FASHION)
def fashion_mnist(config: DataConfig) -> ImageData:
    """Zalando's 60,000 + 10,000 grey clothes of 28 x 28, from IDX files (gzipped or not)."""
    folder = _fashion_folder(config)
    parts: list[Any] = []
    for split in ("train", "t10k"):
        images = read_idx(_idx_file(folder, f"{split}-images-idx3-ubyte"), dimensions=3)
        targets = read_idx(_idx_file(folder, f"{split}-labels-idx1-ubyte"), dimensions=1)
        if len(images) != len(targets):
            raise UserError(f"data.root: {folder} has {len(images)} {split} images, but {len(targets)} labels")
        parts.append(ArrayImages(images, targets))
    return _image_data(_FASHION, parts, _FASHION_CLASSES)


def _fashion_folder(config: DataConfig) -> Path:
    """The first candidate folder that holds the training images."""
    if config.root is None:
        candidates = [_DEBIAN_FASHION]
    else:
        candidates = [Path(config.root), Path(config.root) / "FashionMNIST" / "raw"]
        if config.download and not any(_idx_file(c, "train-images-idx3-ubyte").exists() for c in candidates):
            from torchvision.datasets import FashionMNIST

            FashionMNIST(config.root, download=True)
    for folder in candidates:
        if _idx_file(folder, "train-images-idx3-ubyte").exists():
            return folder
    raise missing(
        config,
        f"train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (IDX, "
        f"plain or .gz) in {' or '.join(map(str, candidates))}",
        "`apt-get install dataset-fashion-mnist` on Debian or Ubuntu (then leave data.root unset), or data.root=FOLDER "
        "data.download=true",
    )


def _idx_file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.exists() else folder / f"{name}.gz"


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """uint8 array of an IDX file (LeCun's format: two zero bytes, type, dimensions, big-endian sizes, data)."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"data.root: cannot read {path}: {error}") from error
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(f"data.root: {path} is no IDX file of bytes in {dimensions} dimensions")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=dimensions, offset=4))
    if len(raw) - header != math.prod(shape):
        raise UserError(f"data.root: {path} should hold {math.prod(shape)} bytes of data, but has {len(raw) - header}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()


# ---- CIFAR -----------------------------------------------------------------------------------------------------------

_CIFAR10 = Facts(10, (32, 32), 3, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 50_000, 10_000)
_CIFAR100 = Facts(100, (32, 32), 3, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), 50_000, 10_000)


@register("cifar10", _CIFAR10)
def cifar10(config: DataConfig) -> ImageData:
    """CIFAR-10 in torchvision's layout."""
    from torchvision.datasets import CIFAR10

    return _cifar(config, CIFAR10, _CIFAR10)


@register("cifar100", _CIFAR100)
def cifar100(config: DataConfig) -> ImageData:
    """CIFAR-100 in torchvision's layout."""
    from torchvision.datasets import CIFAR100

    return _cifar(config, CIFAR100, _CIFAR100)


def _cifar(config: DataConfig, kind: Any, facts: Facts) -> ImageData:
    expected = f"the folder {kind.base_folder} (python version, as from {kind.url}), unchanged, in data.root"
    get = "data.root=FOLDER data.download=true, or unpack that archive in FOLDER"
    if config.root is None:
        raise missing(config, expected, get)
    try:
        parts = [kind(config.root, train=train, download=config.download) for train in (True, False)]
    except RuntimeError as error:  # torchvision: not found, or checksums differ
        raise missing(config, expected, get) from error
    return _image_data(facts, [ArrayImages(part.data, part.targets) for part in parts], list(parts[0].classes))


# ---- synthetic -------------------------------------------------------------------------------------------------------

_SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 512, 128
_IN_MEMORY = 32 * 2**20  # bytes


class SyntheticImages(Dataset[tuple[np.ndarray, int]]):
    """Noise over one fixed random pattern per class: learnable, any size, each image a function of its index."""

    def __init__(self, size: tuple[int, int], in_chans: int, num_classes: int, count: int, purpose: str) -> None:
        self.size, self.in_chans, self.purpose = size, in_chans, purpose
        self.targets = np.arange(count, dtype=np.int64) % num_classes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        target = int(self.targets[index])
        shape = (*self.size, self.in_chans)
        pattern = numpy_generator(0, "synthetic-class", target).integers(0, 128, (4, 4, self.in_chans), dtype=np.uint8)
        rows = np.arange(self.size[0]) * 4 // self.size[0]
        columns = np.arange(self.size[1]) * 4 // self.size[1]
        noise = numpy_generator(0, self.purpose, index).integers(0, 128, shape, dtype=np.uint8)
        image = pattern[rows][:, columns] + noise
        return (image[..., 0] if self.in_chans == 1 else image), target


def _synthetic_facts(config: DataConfig) -> Facts:
    size = (32, 32) if config.img_size is None else size_pair(config.img_size)
    chans = config.in_chans or 3
    classes = config.num_classes or 10
    counts = (max(_SYNTHETIC_TRAIN, 4 * config.batch_size), _SYNTHETIC_TEST)
    return Facts(classes, size, chans, (0.5,) * chans, (0.25,) * chans, *counts)


@register("synthetic", _synthetic_facts)
def synthetic(config: DataConfig) -> ImageData:
    """Made-up images of `data.img_size`, `data.in_chans` and `data.num_classes`; no files needed."""
    facts = _synthetic_facts(config)
    parts: list[Any] = []
    for purpose, count in (("train", facts.num_train), ("test", facts.num_test)):
        assert count is not None
        part = SyntheticImages(facts.img_size, facts.in_chans, facts.num_classes, count, f"synthetic-{purpose}")
        small = count * facts.in_chans * math.prod(facts.img_size) <= _IN_MEMORY
        parts.append(ArrayImages(np.stack([part[i][0] for i in range(count)]), part.targets) if small else part)
    data = _image_data(facts, parts, [f"class_{i}" for i in range(facts.num_classes)])
    return replace(data, named=False)


# ---- shared ----------------------------------------------------------------------------------------------------------


def _image_data(facts: Facts, parts: list[Any], class_names: list[str]) -> ImageData:
    return ImageData(parts[0], parts[1], class_names, facts.img_size, facts.in_chans, facts.mean, facts.std)


def missing(config: DataConfig, expected: str, get: str) -> UserError:
    """The one message for data that are not there."""
    there = config.root is None or os.path.exists(config.root)
    where = "data.root is not set" if config.root is None else f"nothing usable in data.root={config.root}"
    where += "" if there else ", which does not exist"
    return UserError(f"data.name={config.name}: {where}. Expected: {expected}. To get it: {get}.")
