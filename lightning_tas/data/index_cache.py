"""An index made once: by one process, with a bar, and kept for the next start where making it took long."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tas.data.index import Advance, Index, Stamp, Unused, stamps_of
from lightning_tas.launch import group
from lightning_tas.launch.files import write_atomically
from lightning_tas.progress import Progress

VERSION = 1
WORTH = 0.5
"""An index that takes fewer seconds to make is not kept."""
_FRESH = 2 * 10**9
"""ns; what changed so shortly before it was read may change again without a change of its time, as in git's index."""
_ARRAYS = ("targets", "ends", "file", "offset", "size")


def kept(
    kind: str, root: Path, names: Sequence[str], make: Callable[[Advance], Index], total: int, folder: Path
) -> Index:
    """The index of `kind` of what is in `root` (of the tars `names`), from `folder` where it is there and still true.

    Else `make` makes it, on one of all processes that share `folder`; the others wait and read it.

    total: how many steps `make` takes, for the bar.
    """
    path = folder / f"index-{_digest(kind, root, names)}.npz"
    found = _read(path, root)
    if found is not None:
        return found
    lock = path.with_suffix(".lock")
    with _alone(lock):
        found = _read(path, root)  # another process may have made it meanwhile
        if found is None:
            found = _made(path, root, make, total)
        if not path.exists():  # not worth keeping: leave no trace
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)
    return found


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/lightning_tas`, or `~/.cache/lightning_tas`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "lightning_tas"


def _digest(kind: str, root: Path, names: Sequence[str]) -> str:
    text = json.dumps([VERSION, kind, os.path.realpath(root), list(names)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


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
            write_atomically(path, lambda temporary: _write(temporary, index, began))
        except OSError as error:
            warnings.warn(
                f"data.cache_dir: the list of images of {root}, which took {seconds:.0f} s, cannot be kept in "
                f"{path.parent} ({error.strerror or error}) and is made anew at every start",
                stacklevel=2,
            )
    return index


def _write(path: Path, index: Index, began: int) -> None:
    about = {
        "classes": index.classes,
        "named": index.named,
        "files": index.files,
        "stamps": index.stamps,
        "unused": asdict(index.unused),
        "began": began,
    }
    columns: dict[str, Any] = {name: getattr(index, name) for name in _ARRAYS}
    columns["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    columns["text"] = np.frombuffer(index.text, np.uint8)
    with path.open("wb") as file:
        np.savez(file, **columns)


def _read(path: Path, root: Path) -> Index | None:
    """What is kept, None where there is nothing, it is damaged, or the data have changed since."""
    try:
        with np.load(path, allow_pickle=False) as content:
            about: dict[str, Any] = json.loads(content["about"].tobytes())
            stamps = [Stamp(*stamp) for stamp in about["stamps"]]
            if any(stamp.time > about["began"] - _FRESH for stamp in stamps):
                return None
            if stamps_of(root, [stamp.path for stamp in stamps]) != stamps:
                return None
            columns = {name: content[name] for name in _ARRAYS}
            text = content["text"].tobytes()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    unused = Unused(**about["unused"])
    return Index(
        classes=about["classes"], named=about["named"], files=about["files"], text=text, stamps=stamps, unused=unused,
        **columns,
    )  # fmt: skip


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock at `path`, or nothing where the place cannot be written or does not know locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
