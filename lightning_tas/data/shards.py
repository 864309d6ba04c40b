"""Random access to webdataset shards, so that they are split, shuffled and resumed like any other data set.

A shard is an uncompressed tar; members that share a name up to the first dot of their base name are one sample:
KEY.jpg (or another image) and KEY.cls (the class number in text). The headers are read once; an image is then one
seek and one read.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from lightning_tas.errors import UserError

_IMAGES = {"jpg", "jpeg", "png", "webp", "ppm", "bmp"}


@dataclass(frozen=True)
class _Place:
    """Where the bytes of an image lie."""

    shard: int
    offset: int
    size: int


class ShardImages(Dataset[tuple[Image.Image, int]]):
    """Images and classes of `shards`, in the order of the files and of the members in them."""

    def __init__(self, shards: list[Path]) -> None:
        self.shards = sorted(shards)
        self._places: list[_Place] = []
        targets: list[int] = []
        for number, shard in enumerate(self.shards):
            targets.extend(self._index(number, shard))
        if not targets:
            raise UserError(
                f"data.root: no samples (an image with a .cls member) in {', '.join(map(str, self.shards))}"
            )
        self.targets = np.asarray(targets, dtype=np.int64)

    @classmethod
    def find(cls, folder: Path, pattern: str) -> ShardImages | None:
        """The shards `pattern`.tar of `folder`; None when there are none, or when they hold no .cls members."""
        shards = sorted(folder.glob(f"{pattern}.tar"))
        return cls(shards) if shards and _is_shard(shards[0]) else None

    def _index(self, number: int, shard: Path) -> list[int]:
        images: dict[str, _Place] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(shard, "r:") as tar:
                for member in tar:
                    key, extension = _split(member.name)
                    if extension in _IMAGES:
                        images[key] = _Place(number, member.offset_data, member.size)
                    elif extension == "cls":
                        content = tar.extractfile(member)
                        assert content is not None
                        labels[key] = int(content.read())
        except (tarfile.TarError, ValueError, OSError) as error:
            raise UserError(f"data.root: cannot read the shard {shard}: {error}") from error
        keys = [key for key in images if key in labels]
        self._places.extend(images[key] for key in keys)
        return [labels[key] for key in keys]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        place = self._places[index]
        # Opened anew: a file shared with worker processes would share its position.
        with self.shards[place.shard].open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
        return Image.open(io.BytesIO(data)).convert("RGB"), int(self.targets[index])


def _split(name: str) -> tuple[str, str]:
    """("folder/key", "jpg") of "folder/key.jpg", at the first dot of the base name as webdataset does."""
    folder, slash, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder + slash + key, extension.lower()


def _is_shard(path: Path) -> bool:
    """Whether one of the first members is a .cls file."""
    with tarfile.open(path, "r:*") as tar:
        return any(_split(member.name)[1] == "cls" for _, member in zip(range(16), tar, strict=False))
