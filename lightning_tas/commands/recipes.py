"""Finding and reading recipes: those of the package by name, a user's by path, with inheritance through `defaults`."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_tas.commands import per_phase
from lightning_tas.errors import UserError, unknown
from lightning_tas.reading import parse_yaml, read_text

GROUP = "recipe"
# Values that an heir gives anew and never in part: a space of its own must not keep keys of the inherited one.
WHOLE = ("space", "arch")
_SUFFIXES = (".yaml", ".yml")
MAX_RESOLVED = 200_000  # values that interpolations may stand for: some seconds of OmegaConf's time


@dataclass(frozen=True)
class Recipe:
    """One recipe file as read: `values` without its `defaults`, and the files it inherits from, nearest last.

    `repeated`: the values are those of an earlier run, complete and final.
    """

    name: str
    origin: str
    values: dict[str, Any]
    parents: tuple[Recipe, ...]
    repeated: bool = False

    def lineage(self) -> Iterator[Recipe]:
        """All files that make up the recipe, from the first applied to the last."""
        for parent in self.parents:
            yield from parent.lineage()
        yield self


@cache
def packaged() -> dict[str, Traversable]:
    """Name to file of every recipe in `lightning_tas.recipes`, sorted."""
    files = [f for f in importlib.resources.files("lightning_tas.recipes").iterdir() if f.name.endswith(".yaml")]
    return {f.name.removesuffix(".yaml"): f for f in sorted(files, key=lambda f: f.name)}


def description(name: str) -> str:
    """The first line of a packaged recipe, a comment that says what it does."""
    return packaged()[name].read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()


def is_file(value: str) -> bool:
    """Whether `recipe=value` means a file and not the name of a packaged recipe."""
    return value.endswith(_SUFFIXES)


def load(value: str, folder: Path | None = None, seen: tuple[str, ...] = ()) -> Recipe:
    """Read the recipe `value` (a name or a path, relative to `folder`) and what it inherits from.

    Raises:
        UserError: no such recipe or file, a file that is not YAML or not a mapping, recipes that inherit in a circle.
    """
    source: Traversable
    if is_file(value):
        source = (folder or Path()) / Path(value).expanduser()
        if not source.is_file():
            named = f"{seen[-1]}: defaults" if seen else "recipe"
            raise UserError(f"{named}: the file {value!r} does not exist; packaged recipes: {', '.join(packaged())}")
    elif value in packaged():
        source = packaged()[value]
    else:
        raise unknown(f"{seen[-1]}: defaults" if seen else "recipe", value, packaged())
    origin = str(source)
    if origin in seen:
        raise UserError(f"recipe: {value!r} inherits from itself through {' -> '.join((*seen, origin))}")
    values = read(source, origin)
    parents = tuple(
        load(parent, source.parent if isinstance(source, Path) else None, (*seen, origin))
        for parent in _parents(values.pop("defaults", []), origin)
    )
    return Recipe(Path(source.name).stem, origin, values, parents)


def register(recipe: Recipe) -> list[str]:
    """Put the files of a recipe into the group `recipe` of Hydra's ConfigStore; return their names, base first."""
    parts, names = list(recipe.lineage()), []
    for i, part in enumerate(parts):
        # Numbered: a user's file may have the name of the recipe that it inherits from.
        names.append(f"{i:02d}_{part.name}")
        later = {key for other in parts[i + 1 :] for key in WHOLE if key in other.values} | {per_phase.KEY}
        node = {key: value for key, value in part.values.items() if key not in later}
        if isinstance(node.get("search"), dict):  # they go with the strategy: see `search_keys`
            node["search"] = {key: value for key, value in node["search"].items() if key != "options"}
        ConfigStore.instance().store(group=GROUP, name=names[-1], node=node, package="_global_")
    return names


def read(source: Traversable, origin: str, key: str = GROUP) -> dict[str, Any]:
    """The mapping that a recipe or configuration file holds, which was given as `key`; `origin` names it in messages.

    Raises:
        UserError: it cannot be read, or holds no mapping, or what OmegaConf refuses.
    """
    values = parse_yaml(read_text(source, key), origin)
    if not values:
        raise UserError(f"{origin} holds no settings; write keys and values, as `data: {{name: digits}}`")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{origin} must be a mapping of keys to values, as `data: {{name: digits}}`")
    check_interpolations(values, origin)
    try:
        OmegaConf.create(values)
    except OmegaConfBaseException as error:
        raise UserError(f"{origin}: {' '.join(str(error).split())}") from None
    return {str(key): value for key, value in values.items()}


def check_interpolations(values: Any, origin: str, most: int = 100) -> None:
    """Refuse what ``${...}`` could blow up: one that leads to others stands for a value as large as all of them.

    n of them in a chain, several side by side in each link, are resolved at most 3^(n/3) times.
    """
    number = weight = 0
    left = [values]
    while left:
        one = left.pop()
        weight += 1
        if isinstance(one, (dict, list)):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, str):
            number += one.count("${")
            weight += len(one) // 100
    if number and (number > most or weight * 3 ** (number / 3) > MAX_RESOLVED):
        raise UserError(f"{origin}: {number} interpolations (${{...}}) are too many; write values out")


def _parents(defaults: Any, origin: str) -> list[str]:
    """Names and paths in a `defaults` list: `- prenas_tiny`, `- ./base.yaml` or Hydra's `- recipe: prenas_tiny`."""
    entries = [defaults] if isinstance(defaults, str) else defaults
    found: list[str] = []
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict) and list(entry) in (["recipe"], ["/recipe"]):
                entry = next(iter(entry.values()))
            if not isinstance(entry, str):
                break
            if entry != "_self_":
                found.append(entry)
        else:
            return found
    raise UserError(
        f"{origin}: defaults: {defaults!r} is not valid; give a list of recipes, as `defaults: [prenas_tiny]`"
    )
