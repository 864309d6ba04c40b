"""Read every image once, on request, and remember which files were whole: the next check reads what has changed."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tas.data import kept
from lightning_tas.data.index_cache import digest
from lightning_tas.data.stored import StoredImages
from lightning_tas.data.workers import processors
from lightning_tas.launch import group
from lightning_tas.progress import Progress

_CHUNK = 1024
_NAMED = 5
_NONE = -1

Problem = Callable[[int], str | None]
"""What is wrong with the image of that number, None where nothing is."""


def check(source: Any, problem: Problem, folder: Path) -> dict[int, str]:
    """Bad images of `source` by number, with what is wrong.

    All are read but those that `folder` knows to have been whole, and whose files have not changed since.
    """
    if not isinstance(source, StoredImages):
        return _read(np.arange(len(source)), problem)
    names = zlib.crc32(source.index.ends.tobytes(), zlib.crc32(source.index.text.tobytes()))
    path = folder / f"verified-{digest(os.path.realpath(source.root), names)}.safetensors"
    with kept.alone(path):
        found, began, now = kept.read(path), time.time_ns(), _marks(source)
        before = found[0]["marks"] if found is not None else None
        if before is None or before.shape != now.shape:
            before = np.full_like(now, _NONE)
        whole = (now == before).all(axis=1) & (now[:, 1] != _NONE)
        bad = _read(np.flatnonzero(~whole), problem)
        now[now[:, 1] > began - kept.FRESH] = _NONE
        now[list(bad)] = _NONE
        if not np.array_equal(now, before):
            try:
                kept.write(path, {"marks": now}, {})
            except OSError as error:
                warnings.warn(f"data.cache_dir: what was verified cannot be kept in {folder} ({error})", stacklevel=2)
    return bad


def bad_images(bad: dict[str, str], total: int) -> str:
    """How many of `total` images cannot be read, and the first of them."""
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(bad.items())[:_NAMED])
    more = f"; and {len(bad) - _NAMED:,} more" if len(bad) > _NAMED else ""
    return f"data.verify: {len(bad):,} of {total:,} images cannot be read: {shown}{more}"


def _marks(source: StoredImages) -> np.ndarray:
    """Size and time [ns] of the file that each image lies in, int64 (N, 2); `_NONE` where it is gone."""

    def mark(file: str) -> tuple[int, int]:
        try:
            stat = os.stat(source.root / file)
        except OSError:
            return _NONE, _NONE
        return stat.st_size, stat.st_mtime_ns

    if source.index.files:
        return np.asarray([mark(file) for file in source.index.files], dtype=np.int64)[source.index.file]
    return np.asarray([mark(source.index.name(i)) for i in range(len(source))], dtype=np.int64)


def _read(numbers: np.ndarray, problem: Problem) -> dict[int, str]:
    """Read these images in threads: decoders let others work meanwhile."""
    bad: dict[int, str] = {}
    total = len(numbers)
    bar = Progress("verifying images", "image", total, shown=group.rank() == 0)
    try:
        with ThreadPoolExecutor(processors()) as pool:
            for start in range(0, total, _CHUNK):
                chunk = numbers[start : start + _CHUNK].tolist()
                found = zip(chunk, pool.map(problem, chunk), strict=True)
                bad.update((number, reason) for number, reason in found if reason is not None)
                line = f"verifying images: {start + len(chunk):,} of {total:,}"
                bar.advance(len(chunk), f"{line} after {{}}".format)
    finally:
        bar.close()
    return bad
