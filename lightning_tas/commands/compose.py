"""From the command line to a checked `Config`: Hydra's override grammar, recipes as Hydra config group, no surprises.

Every override is checked on its own before Hydra composes, so that a mistake is one message that names the key, the
bad value and what is valid. Hydra itself is used through its compose API: no working folder, no logging, and
Lightning's relaunch of a DDP script sees an ordinary command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_tas.commands import recipes, smoke
from lightning_tas.commands.config import Config
from lightning_tas.commands.validate import validate
from lightning_tas.errors import UserError, nearest

# Paths and names: taken as typed, where Hydra's grammar would need quotes around spaces, '=' or brackets.
VERBATIM = ("recipe", "config", "run", "output_dir", "resume", "ckpt", "data.root", "train.from_checkpoint")
# What config=RUN/config.yaml does not repeat: which run it was, and how it was started.
NOT_REPEATED = ("config", "run", "resume", "plan")
_CHOICES = ("recipe", "config")


@dataclass(frozen=True)
class Setting:
    """One checked `key=value` of the command line; `text` is what Hydra gets."""

    key: str
    value: Any
    text: str


def config_from(command: str, argv: Sequence[str]) -> Config:
    """The configuration that the arguments of a command ask for.

    Raises:
        UserError: anything that is not right about them.
    """
    schema = OmegaConf.structured(Config)
    settings = {}
    for argument in argv:
        setting = parse(argument, schema)
        if setting.key in settings:
            raise UserError(f"{setting.key}: given twice, as {settings[setting.key].text!r} and {setting.text!r}")
        settings[setting.key] = setting
    base = _base(command, {key: setting.value for key, setting in settings.items()})
    for part in base.lineage():
        for key, value in _leaves(part.values, schema):
            check(schema, key, value, part.origin)
    tree = _compose(base, [setting for key, setting in settings.items() if key not in _CHOICES])
    # A repeated run has its smoke values written out already, also those that its command line overrode.
    if tree.smoke and ("smoke" in settings or not base.repeated):
        for key, value in smoke.overrides(tree).items():
            if key not in settings:
                OmegaConf.update(tree, key, value)
    config = _to_object(tree)
    config.recipe = base.name
    validate(config)
    return config


def parse(argument: str, schema: DictConfig) -> Setting:
    """Check one argument against the grammar and the schema."""
    if argument.startswith("-"):
        raise UserError(f"{argument!r} is not an option; write key=value, as in recipe=quickstart; --help lists the keys")
    key, equals, value = argument.partition("=")
    if key.startswith(("+", "~")):
        find(schema, key.lstrip("+~"))
        raise UserError(f"{argument!r}: keys can be set, not added or removed; write {key.lstrip('+~')}=value")
    if not equals:
        hint = f"recipe={argument}" if argument in recipes.packaged() else f"{argument}=value"
        raise UserError(f"{argument!r} is not of the form key=value; did you mean {hint!r}?")
    if key in VERBATIM:
        return _verbatim(key, value, schema)
    find(schema, key)
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise UserError(f"{key}: {value!r} cannot be read ({_first_line(error)}); quote it: \"{key}='...'\"") from None
    if parsed.is_sweep_override():
        raise UserError(f"{key}: {value!r} is several values, and one run takes one; a list is written [a,b]")
    check(schema, key, parsed.value())
    return Setting(key, parsed.value(), argument)


def _verbatim(key: str, value: str, schema: DictConfig) -> Setting:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if value == "":
        raise UserError(f"{key}: the value is missing; write {key}=..." + (f" or {key}=null" if key != "recipe" else ""))
    if value == "null":
        check(schema, key, None)
        return Setting(key, None, f"{key}=null")
    quoted = value.replace("\\", "\\\\") if value.endswith("\\") else value
    return Setting(key, value, f"{key}='{quoted.replace(chr(39), chr(92) + chr(39))}'")


def find(schema: DictConfig, key: str, origin: str | None = None) -> Any:
    """The node at the dotted `key`; an unknown key is a UserError with the nearest valid one."""
    node: Any = schema
    parts = key.split(".")
    for i, part in enumerate(parts):
        if not OmegaConf.is_dict(node) or part not in node:
            raise UserError(_unknown_key(schema, ".".join(parts[: i + 1]), key, origin))
        child = node._get_node(part)
        if OmegaConf.get_type(node, part) is Any and i + 1 < len(parts):
            return None  # inside a free-form value such as `space`: its own reader checks it
        node = child
    return node


def check(schema: DictConfig, key: str, value: Any, origin: str | None = None) -> None:
    """Refuse a key that does not exist and a value of the wrong type."""
    node = find(schema, key, origin)
    if isinstance(value, str) and "${" in value:
        return  # an interpolation: its type shows when it is resolved
    where = f"{key}: " if origin is None else f"{origin}: {key}: "
    if OmegaConf.is_dict(node) and node._metadata.object_type not in (dict, None) and not isinstance(value, Mapping):
        keys = ", ".join(f"{key}.{name}" for name in node)
        raise UserError(f"{where}{value!r} is not valid: it is a group of keys; valid: {keys}")
    if OmegaConf.is_dict(node) and isinstance(value, Mapping) and node._metadata.object_type not in (dict, None):
        for name, inner in value.items():
            check(schema, f"{key}.{name}", inner, origin)
        return
    trial = OmegaConf.structured(Config)
    try:
        OmegaConf.update(trial, key, value, merge=False)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"{where}{value!r} is not valid; {_expected(schema, key)} ({_first_line(error)})") from None


def _base(command: str, given: Mapping[str, Any]) -> recipes.Recipe:
    """What the overrides are applied to: a recipe, a repeated run, or the run that `ckpt` or `resume` lies in."""
    if given.get("config") is not None and given.get("recipe") is not None:
        raise UserError("config: it already says which recipe; give config=FILE or recipe=NAME, not both")
    if given.get("recipe") is not None:
        return recipes.load(str(given["recipe"]))
    if given.get("config") is not None:
        return _repeated(Path(given["config"]), "config")
    key = "resume" if command == "fit" else "ckpt"
    run = _config_above(Path(str(given[key]))) if given.get(key) is not None else None
    if run is not None:
        base = _repeated(run, key)
        # What a run was started from says nothing about what to evaluate now.
        return base if command == "fit" else _without(base, ("arch", "ckpt", "source", "output_dir"))
    if command == "fit":
        raise UserError(
            f"recipe: nothing to do; name one with recipe=NAME; valid: {', '.join(recipes.packaged())}. "
            "New here? python -m lightning_tas.fit recipe=quickstart"
        )
    if given.get("ckpt") is None:
        raise UserError(f"ckpt: {command} needs a trained network; give ckpt=RUN (folder of a run) or a checkpoint file")
    return recipes.Recipe("", "", {}, ())  # an official checkpoint: the schema's defaults and the command line


def _repeated(path: Path, key: str) -> recipes.Recipe:
    path = path / "config.yaml" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{key}: {str(path)!r} does not exist; give the config.yaml of a run, or its folder")
    values = recipes.read(path.read_text(encoding="utf-8"), str(path))
    label = str(values.get("recipe") or "")
    return _without(recipes.Recipe(label, str(path), values, (), repeated=True), NOT_REPEATED)


def _without(recipe: recipes.Recipe, keys: Sequence[str]) -> recipes.Recipe:
    return replace(recipe, values={key: value for key, value in recipe.values.items() if key not in keys})


def _config_above(path: Path) -> Path | None:
    """The config.yaml of the run that `path` is or lies in."""
    for folder in (path, *path.resolve().parents):
        if (folder / "study.json").is_file() and (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def _leaves(values: Mapping[str, Any], schema: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, down to where the schema's sections end."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        node = schema._get_node(name) if OmegaConf.is_dict(schema) and name in schema else None
        if isinstance(value, Mapping) and OmegaConf.is_dict(node):
            yield from _leaves(value, cast(DictConfig, node), f"{key}.")
        else:
            yield key, value


def _compose(base: recipes.Recipe, settings: Sequence[Setting]) -> DictConfig:
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    names = recipes.register(base)
    store.store(name="config", node={"defaults": ["schema", {recipes.GROUP: names}, "_self_"]})
    try:
        with initialize(config_path=None, version_base="1.3"):
            composed = compose("config", [setting.text for setting in settings])
        tree = OmegaConf.merge(OmegaConf.structured(Config), composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_line(error)) from None
    assert isinstance(tree, DictConfig)
    return tree


def _to_object(tree: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise UserError((f"{key}: " if key else "") + _first_line(error)) from None
    assert isinstance(config, Config)
    return config


def keys_of(schema: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every settable key, dotted."""
    for name in schema:
        node = schema._get_node(name)
        if OmegaConf.is_dict(node) and node._metadata.object_type not in (dict, None):  # type: ignore[union-attr]
            yield from keys_of(cast(DictConfig, node), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _unknown_key(schema: DictConfig, missing: str, key: str, origin: str | None) -> str:
    keys = list(keys_of(schema))
    last = key.rpartition(".")[2]
    # A key typed without its group ("batch_size") is as common as a misspelt one.
    match = nearest(key, keys) or next((k for k in keys if k.rpartition(".")[2] == last), None)
    match = next((k for k in keys if k.rpartition(".")[2] == last), match)
    parent, _, _ = missing.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == parent] if parent else sorted({k.split(".")[0] for k in keys})
    if parent and not siblings:
        return f"{key}: no such key: {parent!r} is not a group" + (f". Did you mean {match!r}?" if match else "")
    where = f"{origin}: " if origin else ""
    text = f"{where}{key}: no such key; valid{f' under {parent}' if parent else ''}: {', '.join(siblings)}"
    return f"{text}. Did you mean {match!r}?" if match else text


def _expected(schema: DictConfig, key: str) -> str:
    parent, _, name = key.rpartition(".")
    kind = OmegaConf.select(schema, parent)._get_node(name) if parent else schema._get_node(name)
    reference = str(kind._metadata.ref_type)
    words = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
    found = next((text for word, text in words.items() if re.search(rf"\b{word}\b", reference, re.IGNORECASE)), "")
    optional = " or null" if kind._metadata.optional else ""
    return f"valid: {found or 'another type'}{optional}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
