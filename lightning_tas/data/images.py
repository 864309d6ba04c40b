"""Built-in data sets that are read from image files: Flowers-102, folders, ImageNet, and timm's data set factory."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import ConcatDataset, Dataset

from lightning_tas.data.arrays import missing
from lightning_tas.data.config import DataConfig
from lightning_tas.data.index import class_folders, hidden, tars_in
from lightning_tas.data.registry import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Facts,
    ImageData,
    class_names_of,
    has_class_names,
    register,
)
from lightning_tas.data.stored import StoredImages, read, shards_in
from lightning_tas.errors import UserError

# ---- Flowers-102 -----------------------------------------------------------------------------------------------------

_FLOWERS = Facts(102, (224, 224), 3, IMAGENET_MEAN, IMAGENET_STD, num_train=2040, num_test=6149)


@register("flowers102", _FLOWERS)
def flowers102(config: DataConfig) -> ImageData:
    """Oxford Flowers-102 in torchvision's layout; training and validation images together train (2,040)."""
    from torchvision.datasets import Flowers102

    expected = "flowers-102/jpg/*.jpg, flowers-102/imagelabels.mat and flowers-102/setid.mat (unchanged) in data.root"
    get = "data.root=FOLDER data.download=true, or the files from https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
    if config.root is None:
        raise missing(config, expected, get)
    try:
        train, val, test = (
            Flowers102(config.root, split, download=config.download) for split in ("train", "val", "test")
        )
    except RuntimeError as error:  # torchvision: not found, or checksums differ
        raise missing(config, expected, get) from error
    return ImageData(ConcatDataset([train, val]), test, list(Flowers102.classes))


# ---- folder ----------------------------------------------------------------------------------------------------------


@register("folder")
def folder(config: DataConfig) -> ImageData:
    """A folder per class under train/, and under test/ or val/.

    With test/ and val/ both there, val/ is the search-validation split and nothing is held out of train/. Classes are
    the folders of train/, ordered as strings; other splits must not have others.
    """
    expected = "train/CLASS/*.jpg and test/CLASS/*.jpg or val/CLASS/*.jpg (also png, webp, ...) in data.root"
    get = "one folder of images for each class; data.root=FOLDER"
    root = Path(config.root) if config.root is not None else None
    found = [s for s in ("train", "val", "test") if root is not None and (root / s).is_dir()]
    if root is None or "train" not in found or len(found) < 2:
        raise missing(config, expected, get)
    if not class_folders(root / "train"):
        raise missing(config, expected, get)
    splits = {split: read(root / split, "folders", (), config) for split in found}
    _say_unused(root, *splits.values())
    classes = splits["train"].classes
    for split, dataset in splits.items():
        _same_classes(root / split, dataset.classes, classes)
    test = splits.get("test", splits.get("val"))
    val = splits["val"] if len(splits) == 3 else None
    assert test is not None
    return ImageData(splits["train"], test, list(classes), val=val)


def _say_unused(root: Path, *splits: StoredImages) -> None:
    """Say what lies in `root` beside the folders or tars that were read."""
    used: set[str] = set()
    for split in splits:
        used.update(split.index.files if split.root == root else [split.root.name])
    others = [name for name in sorted(os.listdir(root)) if name not in used and not hidden(name)]
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        warnings.warn(f"data.root: not used of {root}: {len(others)} beside the splits ({shown})", stacklevel=3)


def _same_classes(where: Path | str, found: list[str], wanted: list[str]) -> None:
    if set(found) != set(wanted):
        extra, lacking = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
        differences = [f"not in training: {', '.join(extra[:5])}"] if extra else []
        differences += [f"missing: {', '.join(lacking[:5])}"] if lacking else []
        raise UserError(f"data.root: {where} has other classes than the training images ({'; '.join(differences)})")
    assert found == wanted, "all readers have one order"


# ---- ImageNet --------------------------------------------------------------------------------------------------------

_IMAGENET = Facts(1000, (224, 224), 3, IMAGENET_MEAN, IMAGENET_STD, num_train=1_281_167, num_test=50_000)
_IMAGENET_EXPECTED = (
    "in data.root, for train and for val (or validation): a folder with one folder or one .tar file per class, or one "
    "train.tar and val.tar with a folder per class, or webdataset shards (*train*.tar with .jpg and .cls members)"
)
_IMAGENET_GET = "sign up at https://image-net.org, download ILSVRC2012 (classification) and set data.root=FOLDER"


@register("imagenet", _IMAGENET)
def imagenet(config: DataConfig) -> ImageData:
    """ImageNet-1k, or any set laid out like it (then with `data.num_classes`)."""
    if config.root is None or not Path(config.root).is_dir():
        raise missing(config, _IMAGENET_EXPECTED, _IMAGENET_GET)
    train, val = (_imagenet_split(config, split) for split in ("train", "val"))
    _same_classes(config.root, val.classes, train.classes)
    _say_unused(Path(config.root), train, val)
    return ImageData(train, val, train.classes, named=train.index.named)


def _imagenet_split(config: DataConfig, split: str) -> StoredImages:
    """One split, from whichever layout is there."""
    root = Path(config.root or "")
    synonyms = ["train", "training"] if split == "train" else ["val", "validation", "valid"]
    for name in synonyms:
        place = root / name
        if place.is_dir():
            if class_folders(place):
                return read(place, "natural folders", (), config)
            if shards := shards_in(place, "*"):
                return read(place, "shards", shards, config)
            if tars := tars_in(place):
                return read(place, "class tars", tars, config)
        if place.with_suffix(".tar").is_file():
            return read(root, "one tar", (f"{name}.tar",), config)
        if shards := shards_in(root, f"*{name}*"):
            return read(root, "shards", shards, config)
    raise missing(config, _IMAGENET_EXPECTED, _IMAGENET_GET)


# ---- names with a prefix of timm's factory ---------------------------------------------------------------------------


@register("torch/")
@register("hfds/")
def from_timm(config: DataConfig) -> ImageData:
    """`torch/NAME` and `hfds/NAME` through `timm.data.create_dataset`: splits train and validation."""
    from timm.data import create_dataset

    try:
        train, test = (
            _as_opened(create_dataset(config.name, config.root, split, download=config.download))
            for split in ("train", "validation")
        )
    except (ImportError, RuntimeError, AssertionError, ValueError, OSError) as error:
        raise missing(
            config, f"what timm.data.create_dataset({config.name!r}) reads ({error})", "see timm's documentation"
        ) from error
    return ImageData(train, test, class_names_of(train), named=has_class_names(train))


def _as_opened(dataset: Any) -> Any:
    """The data set with pictures as Pillow opens them: torchvision's folders and timm turn 16 bits white."""
    if hasattr(dataset, "loader"):
        dataset.loader = Image.open
    return _Read(dataset.reader) if hasattr(dataset, "reader") else dataset


class _Read(Dataset[tuple[Image.Image, int]]):
    """What a reader of timm's gives. Its own data set leaves out what cannot be read, and takes the next for it."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image, target = self.reader[index][:2]
        return Image.open(image), int(target)


@register("wds/")
def webdataset(config: DataConfig) -> ImageData:
    """`wds/NAME`: webdataset shards `*train*.tar` and `*val*.tar` (or `*test*.tar`) in `data.root`, random access."""
    expected = "uncompressed shards *train*.tar and *val*.tar or *test*.tar with .jpg (or .png, ...) and .cls members"
    root = Path(config.root or "")
    train = shards_in(root, "*train*") if config.root is not None else []
    test = (shards_in(root, "*val*") or shards_in(root, "*test*")) if train else []
    if not train or not test:
        raise missing(config, expected, "write them with webdataset's ShardWriter and set data.root=FOLDER")
    parts = [read(root, "shards", shards, config) for shards in (train, test)]
    names, last = parts[0].classes, len(parts[1].classes) - 1
    if last >= len(names):
        raise UserError(f"data.root: {config.root} has test class {last}, training ends at {len(names) - 1}")
    _say_unused(root, *parts)
    return ImageData(parts[0], parts[1], names, named=False)


@register("tfds/")
@register("hfids/")
def refuse_streams(config: DataConfig) -> ImageData:
    """Streams cannot be split, shuffled by a seed, or resumed in the middle of an epoch."""
    prefix = config.name.split("/")[0]
    raise UserError(
        f"data.name: {config.name!r} is not valid; {prefix}/ gives a stream without random access, which can neither "
        "be split nor resumed exactly; valid: folder, imagenet, torch/..., hfds/..., wds/... (shards on disk)"
    )
