"""Families of networks: which classes realise an architecture's family, and the two factories that outsiders use.

A family is a supernet class, built from a space, and a class of stand-alone networks, built from an architecture.
Further ones register by the decorator or by an entry point of the group "lightning_tas.families" (a module to import).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from torch import nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import unknown
from lightning_tas.families import ENTRY_POINTS
from lightning_tas.spaces import SearchSpace
from lightning_tas.spaces import space as resolve_space

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


class Family(NamedTuple):
    """``supernet(space, **options)`` and ``network(arch, **options)``."""

    supernet: Callable[..., nn.Module]
    network: Callable[..., nn.Module]


_FAMILIES: dict[str, Family] = {}


def register_family(name: str, network: Callable[..., nn.Module]) -> Callable[[Builder], Builder]:
    """Class decorator: the class builds supernets of family `name`, `network` its stand-alone networks."""

    def register(supernet_class: Builder) -> Builder:
        _FAMILIES[name] = Family(supernet_class, network)
        return supernet_class

    return register


def family(name: str, key: str = "family") -> Family:
    """The registered family, or `UserError` with the nearest one, about the `key` that named it."""
    if name not in _FAMILIES:
        for entry in entry_points(group=ENTRY_POINTS):
            entry.load()
    if name not in _FAMILIES:
        raise unknown(key, name, sorted(_FAMILIES))
    return _FAMILIES[name]


def supernet(space: SearchSpace | str | Mapping[str, Any], **options: Any) -> Any:
    """The supernet of a space, given as a value, a name, a mapping or a path; options as in `NetOptions`.

    ``net(x, arch)`` gives logits (B, num_classes) for images (B, in_chans, H, W). `UserError` for unknown spaces and
    options and for impossible values.
    """
    resolved = resolve_space(space)
    return family(resolved.family).supernet(resolved, **options)


def network(arch: Architecture | Mapping[str, Any], **options: Any) -> Any:
    """The stand-alone network of one architecture with fresh weights; options as in `supernet`.

    A mapping may be any layout that `Architecture.from_dict` reads. `UserError` as for `supernet`.
    """
    resolved = Architecture.from_dict(arch) if isinstance(arch, Mapping) else arch
    if not isinstance(resolved, Architecture):
        raise unknown("arch", type(resolved).__name__, ["Architecture", "mapping"])
    return family(resolved.family, "arch: family").network(resolved, **options)
