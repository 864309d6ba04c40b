"""Errors that a user can act on: the key, the bad value, the valid ones, the nearest match."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NAME_BYTES, PATH_BYTES = 240, 3_800
"""The most that a name and a path may have: below what Linux takes, 255 and 4,095, because other names are made of
them."""


class UserError(ValueError):
    """A mistake in what the user asked for. Commands print its message alone and exit with status 2."""


class Stopped(Exception):
    """Ctrl-C or a batch system ended a run; `status` is the exit status that says so (128 + signal)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def nearest(value: object, valid: Iterable[object]) -> str | None:
    """The valid name closest to `value`, or None when nothing resembles it."""
    names = [str(v) for v in valid]
    matches = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    return matches[0] if matches else None


def typed(value: object) -> str:
    """A value as a command line or a recipe has it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(typed, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def unknown(
    key: str, value: object, valid: Iterable[object], defaults: Mapping[str, object] | None = None
) -> UserError:
    """The error for a `value` of `key` that is not among the `valid` ones (raise what this returns).

    defaults: of names that are settings, shown as they would be typed.
    """
    names = [str(v) for v in valid]
    told = [f"{name}={typed(defaults[name])}" for name in names] if defaults is not None else names
    message = f"{key}: {value!r} is not valid; valid: {', '.join(told) if told else '(none)'}"
    match = nearest(value, names)
    return UserError(f"{message}. Did you mean {match!r}?" if match else message)


def check_path(key: str, value: str) -> None:
    """`UserError` for a path of `key` that no file system takes, with room for the names below it."""
    raw = value.encode(errors="surrogateescape")
    if max(map(len, raw.split(b"/"))) > NAME_BYTES or len(raw) > PATH_BYTES or b"\0" in raw:
        raise UserError(
            f"{key}: {value[:40] + '...'!r} is no path ({len(value):,} characters); valid: names of at most "
            f"{NAME_BYTES} bytes, {PATH_BYTES:,} in all"
        )


def neighbour(path: str | Path) -> str | None:
    """An existing path that resembles `path`, which does not exist, in the first part that is not there; or None."""
    path = Path(path)
    part = next((part for part in (path, *path.parents) if os.path.exists(part.parent)), path)
    try:
        names = sorted(name for name in os.listdir(part.parent) if not name.startswith("."))
    except OSError:  # a file, or a folder that is closed to us
        return None
    match = nearest(part.name, names)
    if match is None:
        return None
    found = part.parent / match
    whole = found / path.relative_to(part)
    return str(whole if os.path.exists(whole) else found)


def absent(key: str, path: str | Path, advice: str | None = None) -> UserError:
    """The error for a `path` of `key` that does not exist, with its nearest neighbour (raise what this returns)."""
    message = f"{key}: {str(path)!r} does not exist{f'; {advice}' if advice else ''}"
    match = neighbour(path)
    return UserError(f"{message}. Did you mean {match!r}?" if match else message)


@contextmanager
def as_key(key: str) -> Iterator[None]:
    """Make errors of a checkpoint inside, which begin with that word, begin with the `key` that the user gave it by."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if not text.startswith("checkpoint"):
            raise
        raise UserError(f"{key}: {text.removeprefix('checkpoint: ')}") from error
