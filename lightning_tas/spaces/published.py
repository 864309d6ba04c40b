"""Search spaces as AutoFormer's and PreNAS's YAML files have them: SEARCH_SPACE, and SUPERNET, what is allocated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_tas.errors import UserError, unknown
from lightning_tas.spaces.plain import isotropic
from lightning_tas.spaces.searchspace import SearchSpace

KEYS = ("EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO")
SECTIONS = ("SEARCH_SPACE", "SUPERNET", "RETRAIN", "name")


def read_published(data: Mapping[str, Any]) -> SearchSpace:
    """The space of a file; its RETRAIN, a network, is not looked at.

    PreNAS's cut supernets list choices by width and block. Those are united, with a warning: the space has all their
    combinations, on the same allocated weights.
    """
    for key in data:
        if key not in SECTIONS:
            raise unknown("space", key, SECTIONS)
    choices = _section(data, "SEARCH_SPACE")
    lists: dict[str, Any] = {key.lower(): sorted(set(_flat(choices[key], f"SEARCH_SPACE.{key}"))) for key in KEYS}
    mixed = [key for key in KEYS if isinstance(choices[key], Mapping)]
    if mixed:
        warnings.warn(
            f"space: the choices of {', '.join(mixed)} differ by width or block and are united: the space is larger "
            "than the one in the file",
            stacklevel=2,
        )
    allocated = (
        {key.lower(): value for key, value in _section(data, "SUPERNET").items()} if "SUPERNET" in data else None
    )
    return isotropic(str(data.get("name", "unnamed")), **lists, allocated=allocated)


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    if not isinstance(section, Mapping):
        raise UserError(
            f"space: {name} is {'missing' if section is None else 'not a mapping'}; it has {', '.join(KEYS)}"
        )
    for key in section:
        if key not in KEYS:
            raise unknown(f"space: {name}", key, KEYS)
    for key in KEYS:
        if key not in section:
            raise UserError(f"space: {name}.{key} is missing; got {sorted(map(str, section))}")
    return section


def _flat(value: Any, place: str) -> Iterator[int | float]:
    """The numbers in a number, lists of lists, or mappings of them."""
    if isinstance(value, (list, tuple, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(inner, place)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"space: {place}: {value!r} is not a number")
    else:
        yield int(value) if float(value).is_integer() else value
