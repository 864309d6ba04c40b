"""Files that are whole or absent: every write goes to a temporary neighbour, then replaces the target.

And that are read whole or not at all: JSON that we write carries a digest of its content, a file of torch the checksums
of zip, which torch itself does not look at. Every reader of such a file goes through `read_json` or `read_torch`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_tas.errors import UserError
from lightning_tas.reading import DIGEST, digest
from lightning_tas.reading import read_json as read_json


class Damaged(ValueError):
    """A file is not as it was written."""


def make_folder(path: Path, key: str = "output_dir") -> Path:
    """Make a folder that a user named under `key`, with its parents; UserError when it cannot be made or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:  # of many kinds: a file in the way, no permission, a name too long, a full disk
        raise UserError(f"{key}: cannot create {str(path)!r} ({error.strerror})") from None
    if not writable:
        raise UserError(f"{key}: {str(path)!r} may not be written")
    return path


def take_lock(handle: int, seconds: float, waiting: Callable[[], object] = lambda: None) -> bool:
    """Lock an open file or folder for this process, and those that inherit `handle`, within so many seconds.

    waiting: called once where it has to wait. True also on file systems without locks.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waiting()
            waiting = _nothing
        except OSError:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.25)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def writing(path: Path | str, key: str = "output_dir") -> Iterator[None]:
    """Inside, a system that refuses to write (a full disk, a folder that is gone) is a UserError that names `path`.

    key: what the user has named the file or its folder by.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise UserError(f"{key}: {str(path)!r} cannot be written ({reason})") from error


def refusal(error: BaseException) -> str | None:
    """What the system said when it refused to write; None where `error` is none of that.

    torch's writer ends with an error of its own after the system's.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    if found is None:
        return None
    return "its folder does not exist" if isinstance(found, FileNotFoundError) else found.strerror or str(found)


def write_atomically(path: Path | str, write: Callable[[Path], object]) -> Path:
    """Call `write(temporary_path)`, then move the result onto `path`, so that no reader sees half a file.

    The temporary file keeps the suffix of `path` (some writers choose their format by it) and is removed on failure.
    The folder must be there: one that was removed while a run was writing into it does not come back as a fragment.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        # mkstemp makes private files; what a run writes is meant to be read by colleagues.
        temporary.chmod(0o644)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def remove_temporaries(folder: Path) -> None:
    """Delete what `write_atomically` had begun in `folder` when its process was killed; nobody else may be writing."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\.[\w.=-]+-\w{8}\.\w+", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` as UTF-8, atomically; UserError when the system refuses."""
    with writing(path):
        return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path | str, value: Any) -> Path:
    """Write `value` as indented JSON, atomically, a mapping with the digest of its content.

    NaN and infinity are refused: JSON has none.
    """
    text = json.dumps(value, indent=2, allow_nan=False)
    if isinstance(value, dict):
        content = json.loads(text)
        text = json.dumps({**content, DIGEST: digest(content)}, indent=2)
    return write_text(path, text + "\n")


def write_torch(path: Path | str, content: Any, key: str = "output_dir") -> Path:
    """Write `content` by `torch.save`, atomically; UserError with what the system says when it refuses."""
    import torch

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:  # given a path, torch's writer does not say what the system said
            torch.save(content, file)

    with writing(path, key):
        return write_atomically(path, save)


def damage(path: Path | str) -> str | None:
    """What is wrong with a file of `torch.save` by its checksums; None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds for a broken directory
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return None if bad is None else f"the checksum of {bad} in it is wrong"


def read_torch(path: Path | str, classes: Sequence[Any] = ()) -> Any:
    """The content of a file of `torch.save`, on the CPU, checked whole, without running code from it.

    Files of torch's format of before 1.6, which has no checksums, are read as they are; we write none.

    classes: allowed besides tensors and plain values, as `torch.serialization.safe_globals` takes them.

    Raises:
        Damaged: the file is not as it was written.
        Exception: of many kinds, by torch, where it is another file.
    """
    import torch

    with open(path, "rb") as file:
        archive = file.read(4) == b"PK\3\4"
    reason = damage(path) if archive else None
    if reason is not None:
        raise Damaged(f"it is damaged: {reason}")
    with torch.serialization.safe_globals(list(classes)):
        return torch.load(path, map_location="cpu", weights_only=True)
