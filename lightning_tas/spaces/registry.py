"""Spaces by name: the decorator, the entry points, and `resolve_space`, which reads whatever a user may write."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from lightning_tas.errors import UserError, unknown
from lightning_tas.reading import read_data
from lightning_tas.spaces.plain import isotropic
from lightning_tas.spaces.published import read_published
from lightning_tas.spaces.searchspace import SearchSpace

ENTRY_POINTS = "lightning_tas.spaces"

Builder = Callable[..., SearchSpace]
_B = TypeVar("_B", bound=Builder)
_BUILDERS: dict[str, Builder] = {}


def register(name: str) -> Callable[[_B], _B]:
    """Decorator: make ``tas.space(name)`` call the decorated function, whose parameters are the overrides it takes.

    A package offers spaces without being imported by an entry point of the group ``lightning_tas.spaces``.
    """

    def add(builder: _B) -> _B:
        if name in _BUILDERS:
            raise UserError(f"space: {name!r} is registered already")
        _BUILDERS[name] = builder
        return builder

    return add


def space_names() -> list[str]:
    """The names that `resolve_space` knows, sorted."""
    return sorted({*_BUILDERS, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def _builder(name: str) -> Builder:
    if name not in _BUILDERS:
        for point in entry_points(group=ENTRY_POINTS):
            if point.name == name:
                # Loading may run `register` itself; what the entry point names is the builder either way.
                loaded = point.load()
                _BUILDERS.setdefault(name, loaded)
    if name not in _BUILDERS:
        raise unknown("space", name, space_names())
    return _BUILDERS[name]


# Files being read, outermost first: one that is met again extends itself.
_OPEN: list[Path] = []


def resolve_space(source: str | os.PathLike[str] | SearchSpace | Mapping[str, Any], **overrides: Any) -> SearchSpace:
    """The space that `source` means: a registered name, a `SearchSpace`, a mapping, or the path of a YAML/JSON file.

    A mapping is `SearchSpace.to_dict`'s form, or the keywords of `isotropic`, or ``{"extends": NAME, **overrides}``, or
    AutoFormer's and PreNAS's ``{"SEARCH_SPACE": ..., "SUPERNET": ...}``.
    Overrides are parameters of the named builder (``depths``, ``base_heads``), choices of a dimension by its name,
    ``allocated`` or ``name``.
    """
    if isinstance(source, SearchSpace):
        return _override(source, overrides)
    if isinstance(source, Mapping):
        return _override(_from_mapping(source), overrides)
    if isinstance(source, os.PathLike) or _looks_like_path(source):
        return _override(_from_file(Path(source)), overrides)
    if not isinstance(source, str):
        raise UserError(f"space: expected a name, a SearchSpace, a mapping or a path, got {source!r}")
    builder = _builder(source)
    parameters = inspect.signature(builder).parameters
    own = {key: value for key, value in overrides.items() if key in parameters}
    rest = {key: value for key, value in overrides.items() if key not in parameters}
    space = builder(**own)
    for key in rest:
        valid = [*parameters, *(d.name for d in space.dimensions), "name", "allocated"]
        if key not in valid:
            raise unknown(f"override of space {source!r}", key, valid)
    return _override(space, rest)


def _override(space: SearchSpace, changes: Mapping[str, Any]) -> SearchSpace:
    return space.with_choices(**changes) if changes else space


def _looks_like_path(source: object) -> bool:
    return isinstance(source, str) and (source.endswith((".yaml", ".yml", ".json")) or os.sep in source)


def _from_file(path: Path) -> SearchSpace:
    if not path.is_file():
        raise UserError(f"space: no file {str(path)!r}; registered names are {', '.join(space_names())}")
    data = read_data(path, "space")
    if not isinstance(data, Mapping):
        raise UserError(f"space: {str(path)!r} must hold a mapping, got {type(data).__name__}")
    file = path.resolve()
    if file in _OPEN:
        raise UserError(f"space: {str(path)!r} extends itself, through {[str(other) for other in _OPEN]}")
    _OPEN.append(file)
    try:
        return _from_mapping({"name": path.stem, **data})
    finally:
        _OPEN.pop()


def _from_mapping(data: Mapping[str, Any]) -> SearchSpace:
    if "extends" in data:
        changes = {str(key): value for key, value in data.items() if key != "extends"}
        return resolve_space(data["extends"], **changes)
    if "dimensions" in data:
        return SearchSpace.from_dict(data)
    if "SEARCH_SPACE" in data or "SUPERNET" in data:
        return read_published(data)
    keywords = inspect.signature(isotropic).parameters
    for key in data:
        if key not in keywords:
            raise unknown("space", key, [*keywords, "dimensions", "extends", "SEARCH_SPACE"])
    for key in ("embed_dim", "depth", "num_heads", "mlp_ratio"):
        if key not in data:
            raise UserError(f"space: {key} is missing; got {sorted(map(str, data))}")
    return isotropic(**{"name": "unnamed", **{str(key): value for key, value in data.items()}})
