"""Settings of a strategy: a frozen dataclass whose annotations say what is valid, as options of proxies have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.registry import Option, Rule

Probability = Annotated[float, Rule("from 0 to 1", lambda value: bool(0 <= value <= 1))]


@dataclass(frozen=True)
class NoSettings:
    """Of a strategy that has none."""


def defaults(kind: type) -> dict[str, Any]:
    """The default of every setting, by name, in order."""
    found = {}
    for one in fields(kind):
        assert one.default is not MISSING, f"{kind.__name__}.{one.name} has no default"
        found[one.name] = one.default
    return found


def read_settings(strategy: str, kind: Any, given: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `kind`; `UserError` naming the key for an unknown setting or a value not valid.

    A size of ``kind.FOLLOWS`` that is not given is at most the one that it is taken from, which is.
    """
    valid = defaults(kind)
    hints = get_type_hints(kind, include_extras=True)
    settled = {}
    for name, value in given.items():
        if name not in valid:
            raise unknown(f"setting of strategy {strategy!r}", name, valid, valid)
        plain = tuple(value) if isinstance(value, list) else value
        settled[name] = Option.of(hints[name]).settled(f"{name} of {strategy}", plain)
    for name, leader in getattr(kind, "FOLLOWS", {}).items():
        if leader in settled and name not in settled:
            settled[name] = min(valid[name], settled[leader])
    try:
        return kind(**settled)
    except UserError as error:
        raise UserError(f"strategy {strategy!r}: {error}") from error
