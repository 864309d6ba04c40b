"""An index made once: by one process, with a bar, and kept for the next start where making it took long."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_tas.data import kept
from lightning_tas.data.index import Advance, Index, Stamp, Unused, stamps_of
from lightning_tas.launch import group
from lightning_tas.progress import Progress

VERSION = 1
WORTH = 0.5
"""An index that takes fewer seconds to make is not kept."""
_ARRAYS = ("targets", "ends", "file", "offset", "size")


def index_of(
    kind: str, root: Path, names: Sequence[str], make: Callable[[Advance], Index], total: int, folder: Path
) -> Index:
    """The index of `kind` of what is in `root` (of the tars `names`), from `folder` where it is there and still true.

    Else `make` makes it, on one of all processes that share `folder`; the others wait and read it.

    total: how many steps `make` takes, for the bar.
    """
    path = folder / file_name(kind, root, names)
    found = _read(path, root)
    if found is not None:
        return found
    with kept.alone(path):
        found = _read(path, root)  # another process may have made it meanwhile
        return found if found is not None else _made(path, root, make, total)


def file_name(kind: str, root: Path, names: Sequence[str]) -> str:
    """Under which name the index is kept."""
    return f"index-{digest(VERSION, kind, os.path.realpath(root), list(names))}.safetensors"


def digest(*about: object) -> str:
    """A name for what JSON can hold."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def _made(path: Path, root: Path, make: Callable[[Advance], Index], total: int) -> Index:
    began, since = time.time_ns(), time.monotonic()
    bar = Progress(f"listing {root}", "it", total, shown=group.rank() == 0)
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        bar.advance(number, lambda after: f"listing {root}: {done:,} of {total:,} after {after}")

    try:
        index = make(advance)
    finally:
        bar.close()
    seconds = time.monotonic() - since
    if seconds >= WORTH:
        try:
            write(path, index, began)
        except OSError as error:
            warnings.warn(
                f"data.cache_dir: the list of images of {root}, which took {seconds:.0f} s, cannot be kept in "
                f"{path.parent} ({error.strerror or error}) and is made anew at every start",
                stacklevel=2,
            )
    return index


def write(path: Path, index: Index, began: int) -> None:
    """Keep `index`, which was begun at the time `began` [ns]; OSError where that is not possible."""
    about = {
        "classes": index.classes,
        "named": index.named,
        "files": index.files,
        "stamps": index.stamps,
        "unused": asdict(index.unused),
        "began": began,
    }
    kept.write(path, {"text": index.text, **{name: getattr(index, name) for name in _ARRAYS}}, about)


def _read(path: Path, root: Path) -> Index | None:
    """What is kept, None where there is nothing, it is damaged, or the data have changed since."""
    found = kept.read(path)
    if found is None:
        return None
    arrays, about = found
    stamps = [Stamp(*stamp) for stamp in about["stamps"]]
    if any(stamp.time > about["began"] - kept.FRESH for stamp in stamps):
        return None
    try:
        if stamps_of(root, [stamp.path for stamp in stamps]) != stamps:
            return None
    except OSError:
        return None
    unused = Unused(**about["unused"])
    return Index(
        classes=about["classes"],
        named=about["named"],
        files=about["files"],
        stamps=stamps,
        unused=unused,
        **arrays,
    )
