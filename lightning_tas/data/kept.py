"""What is found out about images once and kept for the next start: named arrays in a folder of the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lightning_tas.launch.files import write_atomically

FRESH = 2 * 10**9
"""ns; what changed so shortly before it was read may change again without a change of its time, as in git's index."""


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/lightning_tas`, or `~/.cache/lightning_tas`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "lightning_tas"


def write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write `arrays` and what JSON can hold, atomically and with a checksum; OSError where that is not possible."""
    made = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {"about": json.dumps(about), "crc": str(_checksum(made))}

    def save(temporary: Path) -> None:
        try:
            save_file(made, temporary, metadata)
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from error

    write_atomically(path, save)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """What `write` wrote; None where there is nothing, or it is damaged."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata()
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if metadata["crc"] != str(_checksum(arrays)):
            return None
        return arrays, json.loads(metadata["about"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(arrays[name].data if arrays[name].size else b"", zlib.crc32(name.encode(), value))
    return value


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Work that one process does and the others wait for: holds the lock beside `path`, which it writes.

    Nothing is held where the place cannot be written or does not know locks, and nothing stays where nothing is kept.
    """
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        try:
            yield
        finally:
            if not path.exists():
                with contextlib.suppress(OSError):
                    lock.unlink(missing_ok=True)
