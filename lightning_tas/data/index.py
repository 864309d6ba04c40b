"""What lies where in folders and tars of images: found once, in one order, without what is hidden.

Classes are in the order of their names as plain strings, like torchvision's: 0, 1, 10, 11, 2. Images of a class are in
the order of their folders and names as strings, like torchvision's, or by the numbers in their paths, like timm's
(`natural`, and in tars): which images are held out of training follows from it.

What is hidden (a name that begins with a dot, `__MACOSX`, `Thumbs.db` and the like) is neither a class nor an image;
what is not used is counted.
"""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from timm.utils.misc import natural_key

from lightning_tas.errors import UserError

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
_LITTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found"})
_WHOLE = -1  # size of an image that is a file of its own

Advance = Callable[[int], None]


class Place(NamedTuple):
    """A file relative to the root, and the bytes of it that are the image: all of them where `size` is negative."""

    file: str
    offset: int
    size: int


class Stamp(NamedTuple):
    """A folder or a tar as it was when it was read; size 0 for folders."""

    path: str
    size: int
    time: int  # ns


@dataclass
class Unused:
    """What was passed over: how many of each kind, and the first of them."""

    number: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str) -> None:
        self.number[kind] = self.number.get(kind, 0) + 1
        self.first.setdefault(kind, name)

    def __str__(self) -> str:
        return ", ".join(f"{number:,} {kind} ({self.first[kind]})" for kind, number in sorted(self.number.items()))


@dataclass
class Index:
    """Images (N) in order. `named`: classes have names, not only numbers. `files`: the tars; none: plain files."""

    classes: list[str]
    named: bool
    targets: np.ndarray  # int64 (N,)
    text: np.ndarray  # uint8: all names, one after the other
    ends: np.ndarray  # int64 (N,), of the names in `text`
    files: list[str]
    file: np.ndarray  # int32 (N,), number in `files`
    offset: np.ndarray  # int64 (N,)
    size: np.ndarray  # int64 (N,)
    stamps: list[Stamp]
    unused: Unused

    def name(self, number: int) -> str:
        """File below the root, or member of its tar."""
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.text[start : int(self.ends[number])].tobytes())

    def place(self, number: int) -> Place:
        """Where the bytes are."""
        if not self.files:
            return Place(self.name(number), 0, _WHOLE)
        return Place(self.files[int(self.file[number])], int(self.offset[number]), int(self.size[number]))


class _Builder:
    """Collects images one by one, in a tenth of the memory that a list of them takes."""

    def __init__(self) -> None:
        self.labels: list[Any] = []  # name or number of the class
        self.text, self.ends = bytearray(), array("q")
        self.file, self.offset, self.size = array("i"), array("q"), array("q")

    def add(self, label: str | int, name: str, file: int = 0, offset: int = 0, size: int = _WHOLE) -> None:
        self.labels.append(label)
        self.text += os.fsencode(name)
        self.ends.append(len(self.text))
        self.file.append(file)
        self.offset.append(offset)
        self.size.append(size)

    def index(self, classes: list[str] | None, files: Sequence[str], stamps: list[Stamp], unused: Unused) -> Index:
        """The index of all of them; classes None: labels are numbers."""
        if classes is None:
            targets = np.asarray(self.labels, dtype=np.int64)
            names = [str(number) for number in range(int(targets.max()) + 1 if len(targets) else 0)]
        else:
            number = {name: i for i, name in enumerate(classes)}
            targets, names = np.asarray([number[label] for label in self.labels], dtype=np.int64), classes
        return Index(
            classes=names,
            named=classes is not None,
            targets=targets,
            text=np.frombuffer(self.text, np.uint8),
            ends=np.asarray(self.ends),
            files=list(files),
            file=np.asarray(self.file),
            offset=np.asarray(self.offset),
            size=np.asarray(self.size),
            stamps=stamps,
            unused=unused,
        )


def hidden(name: str) -> bool:
    """Whether a file or folder of this name (no path) is none of the user's data."""
    return name.startswith(".") or name.lower() in _LITTER


def class_folders(folder: Path) -> list[str]:
    """Names of the folders in `folder` that are classes."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not hidden(entry.name))


def tars_in(folder: Path, pattern: str = "*") -> list[str]:
    """Names of the files `pattern`.tar of `folder`, in the order that folders of these names have."""
    found = (path for path in folder.glob(f"{pattern}.tar") if path.is_file() and not hidden(path.name))
    return [path.name for path in sorted(found, key=lambda path: path.stem)]


def stamps_of(root: Path, paths: Sequence[str]) -> list[Stamp]:
    """How `paths` below `root` are now; OSError where one is gone."""
    found = [(path, os.stat(root / path)) for path in paths]
    return [Stamp(path, 0 if _is_folder(stat) else stat.st_size, stat.st_mtime_ns) for path, stat in found]


def _is_folder(stat: os.stat_result) -> bool:
    return (stat.st_mode & 0o170000) == 0o040000


# ---- class folders ---------------------------------------------------------------------------------------------------


def of_folders(root: Path, advance: Advance, natural: bool = False) -> Index:
    """A folder per class in `root`, with images in it or in folders below it."""
    unused, stamps, found = Unused(), stamps_of(root, ["."]), _Builder()
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if hidden(entry.name) or not entry.is_dir():
                _pass_over(unused, entry.name, entry.name, "beside the class folders")
    classes = class_folders(root)
    for label in classes:
        paths = [f"{folder}/{name}" for folder, names in _below(root, label, unused, stamps) for name in names]
        for path in sorted(paths, key=natural_key) if natural else paths:
            found.add(label, path)
        advance(1)
    return found.index(classes, [], stamps, unused)


def _below(root: Path, label: str, unused: Unused, stamps: list[Stamp]) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its images in order) of the class `label` and what is below, ordered as strings."""
    images: dict[str, list[str]] = {}
    waiting, seen = [label], set()
    while waiting:
        folder = waiting.pop()
        stat = os.stat(root / folder)
        if (stat.st_dev, stat.st_ino) in seen:  # links that lead back
            continue
        seen.add((stat.st_dev, stat.st_ino))
        stamps.append(Stamp(folder, 0, stat.st_mtime_ns))
        images[folder] = []
        with os.scandir(root / folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if hidden(entry.name):
                    _pass_over(unused, entry.name, f"{folder}/{entry.name}")
                elif entry.is_dir():
                    waiting.append(f"{folder}/{entry.name}")
                elif _suffix(entry.name) in IMAGES:
                    images[folder].append(entry.name)
                else:
                    _pass_over(unused, entry.name, f"{folder}/{entry.name}")
    for folder in sorted(images):
        yield folder, images[folder]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _pass_over(unused: Unused, name: str, path: str, otherwise: str | None = None) -> None:
    suffix = _suffix(name)
    unused.note("hidden" if hidden(name) else otherwise or (f"*{suffix}" if suffix else "without a suffix"), path)


# ---- tars ------------------------------------------------------------------------------------------------------------


def of_class_tars(root: Path, names: Sequence[str], advance: Advance) -> Index:
    """Tars `names` of `root`, each with the images of the class that it is named after."""
    unused, found, stamps = Unused(), _Builder(), stamps_of(root, names)
    for number, name in enumerate(names):
        for _, member, offset, size in _members(root / name, unused):
            found.add(name.removesuffix(".tar"), member, number, offset, size)
        advance(1)
    return found.index([name.removesuffix(".tar") for name in names], names, stamps, unused)


def of_one_tar(root: Path, name: str, advance: Advance) -> Index:
    """One tar with a folder per class, or a tar per class, in it."""
    unused, found, stamps = Unused(), _Builder(), stamps_of(root, [name])
    for label, member, offset, size in _members(root / name, unused):
        found.add(label, member, 0, offset, size)
    advance(1)
    return found.index(sorted(set(found.labels)), [name], stamps, unused)


def of_shards(root: Path, names: Sequence[str], advance: Advance) -> Index:
    """Webdataset shards `names` of `root`, in the order of their members.

    Members that share a name up to the first dot of their base name are one sample: KEY.jpg (or another image) and
    KEY.cls (the class number in text).
    """
    unused, found, stamps = Unused(), _Builder(), stamps_of(root, names)
    for number, name in enumerate(names):
        images: dict[str, tuple[str, int, int]] = {}
        labels: dict[str, int] = {}
        with opened(root / name, "shard") as tar:
            for member in tar:
                key, extension = sample_key(member.name)
                if _in_hidden(member.name):
                    unused.note("hidden", f"{name}: {member.name}")
                elif f".{extension}" in IMAGES:
                    images[key] = member.name, member.offset_data, member.size
                elif extension == "cls":
                    content = tar.extractfile(member)
                    labels[key] = int(content.read() if content is not None else b"")
                elif member.isfile():
                    unused.note(f"*.{extension}", f"{name}: {member.name}")
        for key, (member_name, offset, size) in images.items():
            if key in labels:
                found.add(labels[key], member_name, number, offset, size)
            else:
                unused.note("images without a .cls member", f"{name}: {member_name}")
        advance(1)
    return found.index(None, names, stamps, unused)


def sample_key(name: str) -> tuple[str, str]:
    """("folder/key", "jpg") of "folder/key.jpg", at the first dot of the base name as webdataset does."""
    folder, slash, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder + slash + key, extension.lower()


@contextmanager
def opened(path: Path, what: str = "tar") -> Iterator[tarfile.TarFile]:
    """An uncompressed tar; where it is damaged, the UserError names it."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield tar
    except (tarfile.TarError, ValueError, OSError) as error:
        raise UserError(f"data.root: cannot read the {what} {path}: {error}") from error


def _members(path: Path, unused: Unused) -> list[tuple[str, str, int, int]]:
    """(folder, name, offset, size) of the images in a tar, and in tars in it, ordered by these."""
    found: list[tuple[str, str, int, int]] = []

    def read(tar: tarfile.TarFile, base: int, label: str | None) -> None:
        for member in tar:
            last = member.name.rpartition("/")[2]
            if not member.isfile():
                continue
            if _in_hidden(member.name):
                unused.note("hidden", f"{path.name}: {member.name}")
            elif _suffix(last) == ".tar" and label is None:
                with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                    read(inner, base + member.offset_data, last.removesuffix(".tar"))
            elif _suffix(last) in IMAGES:
                folder = member.name.rpartition("/")[0].rpartition("/")[2] if label is None else label
                found.append((folder, member.name, base + member.offset_data, member.size))
            else:
                _pass_over(unused, last, f"{path.name}: {member.name}")

    with opened(path) as tar:
        read(tar, 0, None)
    return sorted(sorted(found), key=lambda one: (one[0], natural_key(one[1])))


def _in_hidden(member: str) -> bool:
    return any(hidden(part) for part in member.removeprefix("./").split("/"))
