"""Images in files, read by an `Index`: a file of a class folder, or a piece of an uncompressed tar."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from lightning_tas.data.config import DataConfig
from lightning_tas.data.index import (
    Advance,
    Index,
    class_folders,
    of_class_tars,
    of_folders,
    of_one_tar,
    of_shards,
    opened,
    sample_key,
    tars_in,
)
from lightning_tas.data.index_cache import index_of
from lightning_tas.data.kept import default_folder
from lightning_tas.errors import UserError


class StoredImages(Dataset[tuple[Image.Image, int]]):
    """The images of `index` below `root`, in its order. An item is a picture as Pillow opens it, and its class."""

    def __init__(self, root: Path, index: Index) -> None:
        self.root, self.index = root, index
        self.classes = index.classes
        self.targets = index.targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        place = self.index.place(number)
        # A tar is opened anew: a file shared with worker processes would share its position.
        with (self.root / place.file).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.size)
        if not content:
            raise ValueError("it is empty")
        try:
            return Image.open(io.BytesIO(content)), int(self.targets[number])
        except UnidentifiedImageError:
            raise ValueError("it is no image of a kind that Pillow knows") from None

    def name_of(self, number: int) -> str:
        """The file of an image, and where that is a tar the member too, as errors name it."""
        place, name = self.index.place(number), self.index.name(number)
        return str(self.root / name) if place.size < 0 else f"{self.root / place.file}: {name}"


def read(root: Path, kind: str, names: Sequence[str], config: DataConfig) -> StoredImages:
    """The images below `root`: in class folders (`kind` "folders" or "natural folders"), or in its tars `names`.

    `kind` of tars: "class tars", "one tar" or "shards", as `index` has them. What is not used is said here.
    """
    make: dict[str, Callable[[Advance], Index]] = {
        "folders": lambda advance: of_folders(root, advance),
        "natural folders": lambda advance: of_folders(root, advance, natural=True),
        "class tars": lambda advance: of_class_tars(root, names, advance),
        "one tar": lambda advance: of_one_tar(root, names[0], advance),
        "shards": lambda advance: of_shards(root, names, advance),
    }
    total = len(names) or len(class_folders(root))
    index = index_of(kind, root, names, make[kind], total, cache_folder(config))
    if not len(index.targets):
        wanted = "no samples (an image with a .cls member)" if kind == "shards" else "no images"
        raise UserError(f"data.root: {wanted} in {root}{': ' if names else ''}{', '.join(names)}")
    if index.unused.number:
        warnings.warn(f"data.root: not used of {root}: {index.unused}", stacklevel=2)
    return StoredImages(root, index)


def cache_folder(config: DataConfig) -> Path:
    """Where what is found out about images is kept."""
    return default_folder() if config.cache_dir is None else Path(config.cache_dir)


def shards_in(folder: Path, pattern: str) -> list[str]:
    """Names of the webdataset shards `pattern`.tar of `folder`: none where they have no .cls members."""
    names = tars_in(folder, pattern)
    if names:
        with opened(folder / names[0]) as tar:
            if not any(sample_key(member.name)[1] == "cls" for member in itertools.islice(tar, 16)):
                return []
    return names
