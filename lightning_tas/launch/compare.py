"""Compare what the processes of a run hold; a difference ends all of them with one message that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_tas.errors import UserError
from lightning_tas.launch import group


def compare(what: str, facts: Mapping[str, str]) -> None:
    """Compare this process's facts with those of rank 0. Every process calls it; nothing happens where there is one.

    Args:
        what: opens the message, for example "launch".
        facts: name to a short text.

    Raises:
        UserError: on every process, naming the facts that differ and one process that has others.
    """
    expected = group.broadcast(dict(facts))

    def check() -> None:
        different = [
            f"{name} {facts.get(name)} (process 0: {expected.get(name)})"
            for name in dict.fromkeys([*expected, *facts])
            if facts.get(name) != expected.get(name)
        ]
        if different:
            raise UserError(
                f"{what}: process {group.rank()} differs from process 0: {'; '.join(different)}. All processes need "
                "the same command, files and versions"
            )

    group.together(check)


def flat(settings: Mapping[str, Any], prefix: str = "", leave_out: Iterable[str] = ()) -> dict[str, str]:
    """Nested settings as dotted keys with their values in JSON, without the keys in `leave_out`."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in leave_out:
            continue
        if isinstance(value, Mapping) and value and not prefix:
            found |= flat(value, f"{name}.", leave_out)
        else:
            found[name] = json.dumps(value, default=str)
    return found


def digest(value: Any) -> str:
    """Short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
