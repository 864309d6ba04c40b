"""From the command line to a checked `Config`: Hydra's override grammar, recipes as Hydra config group, no surprises.

Every override is checked on its own before Hydra composes, so that a mistake is one message that names the key, the
bad value and what is valid. Hydra itself is used through its compose API: no working folder, no logging, and
Lightning's relaunch of a DDP script sees an ordinary command line.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_tas import plugins
from lightning_tas.commands import names, per_phase, recipes, retraining, schema, score_keys, search_keys, smoke
from lightning_tas.commands.config import Config
from lightning_tas.commands.validate import validate
from lightning_tas.errors import UserError, absent, check_path, typed
from lightning_tas.launch import environment
from lightning_tas.reading import check_argument
from lightning_tas.search.config import LIMITED

# Paths and names: taken as typed, where Hydra's grammar would need quotes around spaces, '=' or brackets.
_PATHS = ("ckpt", "data.root", "train.from_checkpoint", "bench.path")
VERBATIM = ("recipe", "config", "run", "output_dir", "resume", *_PATHS)
# The same, unless they are written out as a mapping.
VERBATIM_OR_MAPPING = ("arch", "space")
# What config=RUN/config.yaml does not repeat: which run it was, and how it was started.
NOT_REPEATED = ("config", "run", "resume", "plan", "trust")
NOT_OF_CKPT = ("arch", "ckpt", "source", "weights", "output_dir")
# What a command looks for in a run; evaluate and export take what was trained last.
WANTED = {"search": "supernet", "score": "supernet"}
_CHOICES = ("recipe", "config")
RESUMABLE = ("fit", "search", "score")
# One of these beside its config.yaml makes a folder that of a run.
_RECORDS = ("study.json", "bench.json")


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
    settings: dict[str, Setting] = {}
    for argument in argv:
        setting = parse(argument)
        if setting.key in settings:
            raise UserError(f"{setting.key}: given twice, as {settings[setting.key].text!r} and {setting.text!r}")
        settings[setting.key] = setting
    base = _base(command, {key: setting.value for key, setting in settings.items()})
    plugins.allow({key: setting.value for key, setting in settings.items()}, base.origin)
    for part in base.lineage():
        if part.values.get("trust"):
            raise UserError(f"{part.origin}: trust: no file can say this of itself; say it on the command line")
        for key, value in part.values.items():
            schema.check(key, value, part.origin)
    given = [setting for key, setting in settings.items() if key not in _CHOICES]
    values = {setting.key: setting.value for setting in given}
    own = search_keys.belongings((part.values for part in base.lineage()), values)
    phased = per_phase.settings(base.lineage(), values, Config().phases)
    tree = _compose(base, given, own, phased)
    # A repeated run has its smoke values written out already, also those that its command line overrode.
    if tree.smoke and ("smoke" in settings or not base.repeated):
        smoke.apply(tree, settings)
    config = _to_object(tree)
    config.recipe = base.name
    validate(config)
    remarks = list(_remarks(command, settings, config, own))
    if remarks and config.space is not None and any(key.partition(".")[0] == "space" for key in settings):
        names.space(config)  # an invalid space is the one error to show
    if environment.rank() == 0:
        for text in remarks:
            warnings.warn(text, stacklevel=2)
    return config


def _remarks(command: str, keys: Iterable[str], config: Config, own: search_keys.Belongings) -> Iterator[str]:
    """What of the arguments and the recipe changes nothing."""
    if own.dropped:
        yield f"limits of the recipe are dropped: they are of the space {own.space!r}; give limits.params=[LOW,HIGH]"
    for key, reason in _without_effect(command, keys, config):
        yield f"{key} is ignored: {reason}"
    for key, reason in per_phase.overridden(keys, config):
        yield f"{key} is not that of every phase: {reason}"


def _without_effect(command: str, keys: Iterable[str], config: Config) -> Iterable[tuple[str, str]]:
    if command == "score":
        return score_keys.without_effect(keys, config)
    if command in ("fit", "search"):
        given, alone = list(keys), command == "search"
        return [*_unread(given, config, alone), *search_keys.without_effect(given, config, alone)]
    return [(key, f"{command} writes into the run of ckpt, or into output_dir") for key in keys if key == "run"]


def _unread(keys: Iterable[str], config: Config, alone: bool) -> Iterator[tuple[str, str]]:
    """Which of `keys` name a network, or weights, that no phase of a fit takes; alone: the command search."""
    phases = ["search"] if alone else config.phases
    reasons: dict[str, str] = {}
    if "retrain" not in phases:
        reasons["arch"] = "it is of the phase 'retrain'"
        if "supernet" in phases or not {"search", "measure"} & set(phases):
            reasons["ckpt"] = f"no phase of {typed(phases)} takes it; train.from_checkpoint=FILE begins with weights"
    starts = [one.train.from_checkpoint for one in per_phase.configs(config).values()]
    if (config.ckpt is None or "ckpt" in reasons) and not any(starts):
        reasons |= dict.fromkeys(("source", "weights"), "there is no ckpt and no train.from_checkpoint that it is of")
    for key in keys:
        if key in reasons and getattr(config, key) not in (None, "auto"):
            yield key, reasons[key]


def parse(argument: str) -> Setting:
    """Check one argument against the grammar and the schema."""
    if argument.startswith("-"):
        raise UserError(f"{argument!r} is not an option; write key=value, as recipe=quickstart; --help lists the keys")
    key, equals, value = argument.partition("=")
    if key.startswith(("hydra/", "hydra.")):
        raise UserError(f"{argument!r} is for sweeps: give -m as well, as in -m seed=1,2 hydra/launcher=joblib")
    if key.startswith(("+", "~")):
        schema.check_key(key.lstrip("+~"))
        raise UserError(f"{argument!r}: keys can be set, not added or removed; write {key.lstrip('+~')}=value")
    if not equals:
        hint = f"recipe={argument}" if argument in recipes.packaged() else f"{argument}=value"
        if isinstance(getattr(Config(), argument, None), bool):
            hint = f"{argument}=true"
        raise UserError(f"{argument!r} is not of the form key=value; did you mean {hint!r}?")
    if key == "bench" and not value.startswith("{"):
        key = "bench.path"  # the one key of this group that every bench has
    schema.check_key(key)
    inner = per_phase.split(key)[1] if per_phase.is_per_phase(key) else key
    if inner in VERBATIM or (key in VERBATIM_OR_MAPPING and not value.startswith("{")):
        return _verbatim(key, value)
    check_argument(argument)
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = schema.first_line(error)
        raise UserError(f"{key}: {value!r} cannot be read ({reason}); quote it: \"{key}='...'\"") from None
    if parsed.is_sweep_override():
        raise UserError(
            f"{key}: {value!r} is several values, and one run takes one; a list is written [a,b]; -m runs each value"
        )
    schema.check(key, parsed.value())
    return Setting(key, parsed.value(), argument)


def _verbatim(key: str, value: str) -> Setting:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if value == "":
        raise UserError(f"{key}: the value is missing; write {key}=VALUE (null for none)")
    if value == "null":
        schema.check(key, None)
        return Setting(key, None, f"{key}=null")
    check_path(key, value)
    # Inside Hydra's quotes a quote is escaped, and so are the backslashes before it or before the end.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return Setting(key, value, f"{key}='{escaped}'")


def _base(command: str, given: Mapping[str, Any]) -> recipes.Recipe:
    """What the overrides are applied to: a recipe, a repeated run, or the run that `ckpt` or `resume` lies in."""
    if given.get("config") is not None and given.get("recipe") is not None:
        raise UserError("config: it already says which recipe; give config=FILE or recipe=NAME, not both")
    if given.get("resume") not in (None, "auto") and not os.path.exists(str(given["resume"])):
        raise absent("resume", str(given["resume"]), "give a run folder, or a checkpoint of one")
    if given.get("recipe") is not None:
        return _of_its_run(recipes.load(str(given["recipe"])), command, given)
    if given.get("config") is not None:
        return _repeated(Path(given["config"]), "config")
    for key in ("resume", "ckpt"):
        run = _config_above(Path(str(given[key]))) if given.get(key) is not None else None
        if run is not None and key == "resume" and command in RESUMABLE:
            return _repeated(run, key)
        if run is None and key == "resume" and given.get(key) not in (None, "auto"):
            raise UserError(
                f"resume: {str(given[key])!r} is not a run, nor lies in one (config.yaml beside one of "
                f"{', '.join(_RECORDS)}); give the folder of a run, or a checkpoint of one"
            )
        if run is not None and key == "ckpt" and command != "fit":
            # What a run was started from says nothing about what to evaluate now.
            return _without(_as_trained(_repeated(run, key), given[key], command), NOT_OF_CKPT)
    if command == "fit":
        raise UserError(
            f"recipe: nothing to do; name one with recipe=NAME; valid: {', '.join(recipes.packaged())}. "
            "New here? python -m lightning_tas.fit recipe=quickstart"
        )
    if command == "search" and given.get("ckpt") is None:
        raise UserError(
            f"recipe: nothing to search; name one with recipe=NAME; valid: {', '.join(recipes.packaged())}; "
            "or ckpt=RUN, a trained supernet"
        )
    if given.get("ckpt") is None and command == "score":
        raise UserError(
            "recipe: none is named, and it says how large images are and how many classes; give recipe=vit_bench_pit, "
            "vit_bench_autoformer or one of your own with bench=FILE (networks with known accuracies), or ckpt=RUN (a "
            "trained supernet)"
        )
    if given.get("ckpt") is None:
        raise UserError(
            f"ckpt: {command} needs a trained network; give ckpt=RUN (folder of a run) or a checkpoint file"
        )
    # A released checkpoint: ImageNet, and the space that its width tells.
    return recipes.Recipe("", "", {"space": None, "data": {"name": "imagenet", "exif": False}}, ())


def _of_its_run(recipe: recipes.Recipe, command: str, given: Mapping[str, Any]) -> recipes.Recipe:
    """A retraining, on the images of the run that its architecture, or its first weights, come from."""
    arch = given.get("arch")
    for place in (arch.rpartition("@")[0] or arch if isinstance(arch, str) else None, given.get("ckpt")):
        run = _config_above(Path(place)) if place is not None and command == "fit" else None
        if run is not None:
            return retraining.with_data_of(recipe, _repeated(run, "arch"))
    return recipe


def settings_of_run(run: Path) -> Mapping[str, Any]:
    """What a command with `ckpt=RUN` begins with; empty where the run has no config.yaml."""
    return _base("evaluate", {"ckpt": str(run)}).values if (run / "config.yaml").is_file() else {}


def _repeated(path: Path, key: str) -> recipes.Recipe:
    path = path / "config.yaml" if path.is_dir() else path
    if not path.is_file():
        raise absent(key, path, "give the config.yaml of a run, or its folder")
    values = recipes.read(path, str(path), key)
    recipes.check_interpolations(
        values, str(path), most=0
    )  # a run writes values; these could read its reader's secrets
    label = str(values.get("recipe") or "")
    return _without(recipes.Recipe(label, str(path), values, (), repeated=True), NOT_REPEATED)


def _as_trained(recipe: recipes.Recipe, ckpt: Any, command: str) -> recipes.Recipe:
    """The settings of the phase whose checkpoint `ckpt` means, as those of the run; a search has a phase of its own."""
    own = recipe.values.get(per_phase.KEY)
    if not own or command == "search":
        return recipe
    from lightning_tas.launch.results import find_checkpoint

    place = find_checkpoint(str(ckpt), phase=WANTED.get(command)).resolve().parents[1].name
    groups = own.get(place.partition("-")[2]) or {}
    merged = {name: {**recipe.values[name], **values} for name, values in groups.items()}
    return replace(recipe, values={**recipe.values, **merged, per_phase.KEY: None})


def _without(recipe: recipes.Recipe, keys: Sequence[str]) -> recipes.Recipe:
    return replace(recipe, values={key: value for key, value in recipe.values.items() if key not in keys})


def _config_above(path: Path) -> Path | None:
    """The config.yaml of the run that `path` is or lies in."""
    for folder in (path, *path.resolve().parents):
        if (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in _RECORDS):
            return folder / "config.yaml"
    return None


def _compose(
    base: recipes.Recipe, settings: Sequence[Setting], found: search_keys.Belongings, phased: Mapping[str, Any] | None
) -> DictConfig:
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    names = recipes.register(base)
    store.store(name="config", node={"defaults": ["schema", {recipes.GROUP: names}, "_self_"]})
    free = [setting for setting in settings if setting.key.partition(".")[0] in VERBATIM_OR_MAPPING]
    own = [s for s in settings if search_keys.is_option(s.key) or per_phase.is_per_phase(s.key)]
    try:
        with initialize(config_path=None, version_base="1.3"):
            composed = compose("config", [setting.text for setting in settings if setting not in free + own])
        beside = [found.options, phased, *(setting.value for setting in free)]
        recipes.check_interpolations([OmegaConf.to_container(composed), beside], base.origin or "command line")
        tree = OmegaConf.merge(OmegaConf.structured(Config), composed)
        assert isinstance(tree, DictConfig)
        # Hydra would merge `space={...}` into the recipe's and refuse what that one lacks: here it is the whole space.
        for setting in sorted(free, key=lambda setting: setting.key.count(".")):
            _set_free(tree, setting)
        OmegaConf.update(tree, search_keys.OPTIONS, found.options or None, merge=False)
        OmegaConf.update(tree, per_phase.KEY, phased, merge=False)
        for name in LIMITED:
            OmegaConf.update(tree, f"limits.{name}", found.limits.get(name), merge=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(schema.first_line(error)) from None
    return tree


def _set_free(tree: DictConfig, setting: Setting) -> None:
    """Set `space` or `arch`, or a key inside one, whatever is there: only their readers know what is valid."""
    top, inside, _ = setting.key.partition(".")
    if inside and not isinstance(tree[top], DictConfig):
        raise UserError(f"{setting.key}: {top} is {tree[top]!r} here, which has no keys; give {top}={{...}} as a whole")
    OmegaConf.update(tree, setting.key, setting.value, merge=False, force_add=True)


def _to_object(tree: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise UserError((f"{key}: " if key else "") + schema.first_line(error)) from None
    assert isinstance(config, Config)
    return config
