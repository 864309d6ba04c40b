"""Which data sets exist, and how users add theirs.

A data set is a function `(config: DataConfig) -> ImageData`, made known by the decorator `register`, by an entry point
of the group `lightning_tas.datasets`, or, decorated, by its place as `data.name=package.module:function`.
"""

from __future__ import annotations

import bisect
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_tas.data.config import BUILT_IN, TIMM_PREFIXES, DataConfig, unknown_name
from lightning_tas.data.config import ENTRY_POINTS as GROUP
from lightning_tas.errors import UserError
from lightning_tas.plugins import resolve

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ArrayImages(Dataset[tuple[Tensor, int]]):
    """Images of one size in memory: uint8 (N, C, H, W), and their classes. Feeds the fast augmentation.

    `images`: uint8 array (N, H, W) or (N, H, W, C), or tensor (N, C, H, W). Items are ((C, H, W) uint8, int).
    """

    def __init__(self, images: np.ndarray | Tensor, targets: Sequence[int] | np.ndarray) -> None:
        if isinstance(images, np.ndarray):
            array = images[:, None] if images.ndim == 3 else np.moveaxis(images, 3, 1)
            images = torch.from_numpy(np.ascontiguousarray(array))
        if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(targets):
            raise UserError(
                f"ArrayImages: got {len(targets)} targets and images of shape {tuple(images.shape)}, {images.dtype}; "
                "valid: as many targets as images, uint8, (N, H, W[, C]) as array or (N, C, H, W) as tensor"
            )
        self.images, self.targets = images, np.asarray(targets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.targets[index])


@dataclass(frozen=True)
class Facts:
    """What is known of a data set without opening it (so that a plan needs no data)."""

    num_classes: int
    img_size: tuple[int, int]
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int | None = None
    num_test: int | None = None


@dataclass
class ImageData:
    """A loaded data set.

    `train`, `test` (and `val`, when the data set brings its own search-validation split) are map-style data sets with
    items (image, class): a PIL image, a uint8 array (H, W[, C]) or a uint8 tensor (C, H, W). `img_size` (H, W) is the
    native size, used when `data.img_size` is not set; `mean` and `std` are per channel of pixels in [0, 1]. `named`:
    False where `class_names` are no names but the classes' numbers.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    class_names: list[str]
    img_size: tuple[int, int] = (224, 224)
    in_chans: int = 3
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    val: Dataset[Any] | None = None
    named: bool = True

    def facts(self) -> Facts:
        """What `Facts` says of a data set that is not loaded."""
        size = (int(self.img_size[0]), int(self.img_size[1]))
        counts = (len(self.train), len(self.test))  # type: ignore[arg-type]
        return Facts(len(self.class_names), size, self.in_chans, tuple(self.mean), tuple(self.std), *counts)


Load = Callable[[DataConfig], ImageData]
FactsOf = Callable[[DataConfig], Facts | None]


@dataclass(frozen=True)
class Entry:
    """A registered data set: how to load it, and what is known before."""

    name: str
    load: Load
    facts: FactsOf


_ENTRIES: dict[str, Entry] = {}


def register(name: str, facts: Facts | FactsOf | None = None) -> Callable[[Load], Load]:
    """Decorator that makes `function(config) -> ImageData` available as `data.name=<name>`."""

    def add(load: Load) -> Load:
        if name in BUILT_IN and not load.__module__.startswith("lightning_tas.data."):
            raise UserError(f"data set {name!r} is registered already, by lightning_tas")
        if name in _ENTRIES and _ENTRIES[name].load is not load:
            raise UserError(f"data set {name!r} is registered already, by {_ENTRIES[name].load.__module__}")
        _ENTRIES[name] = Entry(name, load, facts if callable(facts) else _Known(facts))
        return load

    return add


@dataclass(frozen=True)
class _Known:
    """Facts that do not depend on the settings (a class, not a closure, so that an Entry pickles)."""

    facts: Facts | None

    def __call__(self, config: DataConfig) -> Facts | None:
        return self.facts


def names() -> list[str]:
    """Names of all data sets that `data.name` takes, without the prefixes of timm's factory."""
    _load()
    return sorted({*_ENTRIES, *(point.name for point in entry_points(group=GROUP))})


def find(name: str) -> Entry:
    """The data set called `name`; UserError with the nearest name when there is none."""
    _load()
    if name in _ENTRIES:
        return _ENTRIES[name]
    for point in entry_points(group=GROUP):
        if point.name == name:
            load = point.load()
            # A function that carries the decorator has registered itself, with its facts, under some name.
            return next((e for e in _ENTRIES.values() if e.load is load), Entry(name, load, _Known(None)))
    for prefix in TIMM_PREFIXES:
        if name.startswith(prefix):
            return _ENTRIES[prefix]
    if ":" in name:
        return _ENTRIES[resolve("data.name", name, _loads, "lightning_tas.data.register")]
    raise unknown_name(name, names())


@functools.cache
def _load() -> None:
    for module in ("arrays", "images"):  # they register the built-in data sets
        importlib.import_module(f"lightning_tas.data.{module}")


def _loads() -> dict[str, Load]:
    return {name: entry.load for name, entry in _ENTRIES.items()}


def targets_of(dataset: Any) -> np.ndarray:
    """Classes of all samples (int64), without decoding images where the data set keeps a list of them."""
    if isinstance(dataset, Subset):
        return targets_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([targets_of(part) for part in dataset.datasets])
    for attribute in ("targets", "_labels", "labels"):
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            return np.asarray(values, dtype=np.int64)
    reader = getattr(dataset, "reader", None)  # timm.data.ImageDataset
    for owner in (dataset, reader):
        samples = getattr(owner, "samples", None)
        if samples is not None and getattr(owner, "targets", None) is None and len(samples[0]) == 2:
            return np.asarray([target for _, target in samples], dtype=np.int64)
    if reader is not None and getattr(reader, "targets", None) is not None:
        return np.asarray(reader.targets, dtype=np.int64)
    return np.asarray([int(dataset[i][1]) for i in range(len(dataset))], dtype=np.int64)


def class_names_of(dataset: Any) -> list[str]:
    """Class names as the data set or timm's reader keeps them; numbers when neither has names."""
    return _class_names(dataset) or [str(number) for number in range(int(targets_of(dataset).max()) + 1)]


def has_class_names(dataset: Any) -> bool:
    """Whether the data set or timm's reader keeps names of its classes."""
    return bool(_class_names(dataset))


def _class_names(dataset: Any) -> list[str]:
    owner = getattr(dataset, "reader", dataset)
    for attribute in ("class_to_idx", "class_name_to_idx"):
        mapping = getattr(owner, attribute, None)
        if mapping:
            return [str(name) for name in sorted(mapping, key=mapping.__getitem__)]
    return [str(name) for name in getattr(dataset, "classes", None) or []]


def name_of(dataset: Any, index: int) -> str | None:
    """The file of an image, quoted, where the data set knows it."""
    if isinstance(dataset, Subset):
        return name_of(dataset.dataset, int(dataset.indices[index]))
    if isinstance(dataset, ConcatDataset):
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        return name_of(dataset.datasets[part], index - (dataset.cumulative_sizes[part - 1] if part else 0))
    if hasattr(dataset, "name_of"):
        return repr(str(dataset.name_of(index)))
    samples = getattr(dataset, "samples", None) or getattr(dataset, "_image_files", None)  # torchvision's
    if samples is None:
        return None
    return repr(str(samples[index][0] if isinstance(samples[index], tuple) else samples[index]))
