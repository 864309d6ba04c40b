"""Errors that a user can act on: the key, the bad value, the valid ones, the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


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
