"""The `data.*` settings of a recipe, with their meaning and their validation.

`DataConfig` is a plain dataclass (a Hydra structured config); `check` refuses what cannot work before any file is
opened. The defaults are the DeiT recipe that AutoFormer and PreNAS train with.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from lightning_tas.class_names import POLICIES
from lightning_tas.errors import UserError, unknown
from lightning_tas.plugins import check_asked

CROPS = ("rrc", "pad", "none")
OF_A_NODE = ("num_workers", "pin_memory", "cache_dir")  # how images get here, not which
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "random")
TIMM_PREFIXES = ("torch/", "hfds/", "wds/", "tfds/", "hfids/")
"""Names that begin so are of timm's factory."""
ENTRY_POINTS = "lightning_tas.datasets"
BUILT_IN = ("cifar10", "cifar100", "digits", "fashion_mnist", "flowers102", "folder", "imagenet", "synthetic")
ERASE_MODES = ("pixel", "rand", "const")
_AUTO_AUGMENT_NAMES = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")
_AUTO_AUGMENT_WORDS = re.compile(r"(rand|augmix|original|originalr|v0|v0r|3a)(-[a-z]+[0-9.,]*)*")


@dataclass
class DataConfig:
    """Everything about images: which, how they are split, augmented and batched."""

    name: str = "digits"  # digits, synthetic, fashion_mnist, imagenet, folder, ..., MODULE:FUNCTION; timm: hfds/..
    root: str | None = None  # folder (or tar file) of the data; not needed by digits and synthetic
    download: bool = False  # let torchvision fetch what is missing into root
    on_bad_image: str = "error"  # an image that cannot be read: error | skip (train: another one; test: not counted)
    verify: bool = False  # read all images before anything else, and name those that cannot be read
    class_names: str = "compare"  # where trained weights meet the data: compare | ignore (classes by their numbers)
    cache_dir: str | None = None  # where lists of images, and what was verified, are kept; null: ~/.cache/lightning_tas
    exif: bool = True  # turn photographs upright as their EXIF orientation says
    batch_size: int = 128  # per process
    eval_batch_size: int | None = None  # None: batch_size
    num_workers: int | None = None  # null: none for images in memory, else one a processor, at most 8
    pin_memory: bool | None = None  # None: when CUDA is there
    img_size: Any = None  # int or [H, W]; None: the native size
    in_chans: int | None = None  # None: the native channels
    num_classes: int | None = None  # None: as many as the data set has
    search_val: float = 0.1  # training images held out for search and validation: a share of each class (< 1), or
    # a number in all, as many of each class
    leak: bool = False  # train on the images held out for search as well, as some papers do
    train_subset: int | None = None  # train on so many images only, the same share of every class
    crop: str = "rrc"  # rrc: random resized crop; pad: random crop of the padded image; none
    crop_scale: list[float] = field(default_factory=lambda: [0.08, 1.0])  # area that rrc keeps
    crop_ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])  # aspect ratios of rrc
    resize: str = "shorter"  # under pad and none: shorter (side, then crop the centre) | squash (other aspect ratio)
    crop_padding: int | None = None  # pixels on each side for pad; None: an eighth of the side
    crop_pct: float = 0.875  # evaluation under rrc: resize to size / crop_pct, then crop the centre
    interpolation: str = "bicubic"
    hflip: float = 0.5
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"  # a string of timm's: rand-..., augmix-..., original, v0, ...
    color_jitter: float = 0.4  # inactive while auto_augment is on (as in timm and DeiT)
    reprob: float = 0.25  # probability of random erasing
    remode: str = "pixel"
    recount: int = 1
    repeated_aug: int = 1  # how often an image is repeated in an epoch (3 for DeiT), see sampling.TrainOrder
    drop_last: bool = True
    mean: Any = None  # per channel, of pixels in [0, 1]; None: the data set's
    std: Any = None


def size_pair(value: Any, key: str = "data.img_size") -> tuple[int, int]:
    """(H, W) from an int or a pair of ints."""
    pair = (value, value) if isinstance(value, int) else value
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise UserError(f"{key}: {value!r} is not valid; valid: an integer or [height, width]")
    height, width = pair
    for side in (height, width):
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            raise UserError(f"{key}: {value!r} is not valid; valid: positive integers")
    return int(height), int(width)


def check(config: DataConfig) -> None:
    """Raise UserError for settings that no data set can satisfy."""
    _check_name(config.name)
    for key, least in _LEAST.items():
        value = getattr(config, key)
        if value is not None and (isinstance(value, bool) or value < least or value != int(value)):
            raise UserError(f"data.{key}: {value!r} is not valid; valid: integers from {least}")
    for key in ("hflip", "reprob"):
        if not 0.0 <= getattr(config, key) <= 1.0:
            raise UserError(f"data.{key}: {getattr(config, key)!r} is not valid; valid: probabilities from 0 to 1")
    if not 0.0 < config.crop_pct <= 1.0:
        raise UserError(f"data.crop_pct: {config.crop_pct!r} is not valid; valid: above 0, up to 1")
    if config.search_val < 0 or (config.search_val >= 1 and config.search_val != int(config.search_val)):
        raise UserError(
            f"data.search_val: {config.search_val!r} is not valid; valid: a share of the training images below 1, "
            "or a whole number of images"
        )
    if config.color_jitter < 0:
        raise UserError(f"data.color_jitter: {config.color_jitter!r} is not valid; valid: 0 (off) or above")
    for key, choices in _CHOICES.items():
        if getattr(config, key) not in choices:
            raise unknown(f"data.{key}", getattr(config, key), choices)
    _check_range("crop_scale", config.crop_scale, upper=1.0)
    _check_range("crop_ratio", config.crop_ratio, upper=float("inf"))
    if config.auto_augment is not None and not _AUTO_AUGMENT_WORDS.fullmatch(config.auto_augment):
        raise unknown("data.auto_augment", config.auto_augment, [*_AUTO_AUGMENT_NAMES, "rand-m9-mstd0.5-inc1", "null"])
    if config.img_size is not None:
        size_pair(config.img_size)


_CHOICES: dict[str, tuple[str, ...]] = {
    "class_names": POLICIES,
    "crop": CROPS,
    "interpolation": INTERPOLATIONS,
    "on_bad_image": ("error", "skip"),
    "remode": ERASE_MODES,
    "resize": ("shorter", "squash"),
}


def _check_name(name: str) -> None:
    """Refuse a data set that there is not, without importing those that there are: they need torch."""
    if name.startswith(TIMM_PREFIXES):
        return
    if ":" in name:
        check_asked("data.name", name)  # imported where it is loaded
        return
    registry = sys.modules.get("lightning_tas.data.registry")  # knows what a program has registered
    own = {point.name for point in entry_points(group=ENTRY_POINTS)}
    known = sorted({*BUILT_IN, *own} if registry is None else registry.names())
    if name not in known:
        raise unknown_name(name, known)


def unknown_name(name: str, known: Iterable[str]) -> UserError:
    """The error for a data set that is not among the `known` ones (raise what this returns)."""
    listed = [one for one in known if one not in TIMM_PREFIXES]
    return unknown("data.name", name, [*listed, "torch/...", "hfds/...", "wds/...", "package.module:function"])


_LEAST = {
    "batch_size": 1,
    "eval_batch_size": 1,
    "num_workers": 0,
    "in_chans": 1,
    "num_classes": 1,
    "train_subset": 1,
    "crop_padding": 0,
    "recount": 1,
    "repeated_aug": 1,
}
assert set(_LEAST) | set(_CHOICES) <= {f.name for f in dataclasses.fields(DataConfig)}


def _check_range(key: str, value: Sequence[float], upper: float) -> None:
    if len(value) != 2 or not 0 < value[0] <= value[1] <= upper:
        raise UserError(f"data.{key}: {value!r} is not valid; valid: [low, high] with 0 < low <= high <= {upper:g}")
