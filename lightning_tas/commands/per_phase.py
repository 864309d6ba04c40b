"""`per_phase.*`: settings of one phase; whatever a phase does not set is the recipe's.

    phases: [supernet, search, retrain]
    per_phase: {retrain: {train: {warmup_epochs: 5}, data: {img_size: 384}, trainer: {max_epochs: 300}}}

A repeated phase is named with its number (`supernet-2`) and goes on from the weights of the one before. Everything that
a phase does reads the configuration that `configs` resolves for it, and never `per_phase` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from lightning_tas.errors import UserError, typed, unknown
from lightning_tas.launch.study import phase_labels

if TYPE_CHECKING:
    from lightning_tas.commands.config import Config
    from lightning_tas.commands.recipes import Recipe

KEY = "per_phase"
PHASES = ("select", "supernet", "search", "measure", "retrain")
"""In the order in which they run."""
REPEATABLE = ("supernet", "retrain")
SECTIONS: dict[str, tuple[str, ...]] = {
    "select": ("data",),
    "supernet": ("data", "model", "train", "trainer", "sampler", "checkpoint"),
    "search": ("data", "train", "trainer"),
    "measure": ("data",),
    "retrain": ("data", "model", "train", "trainer", "checkpoint"),
}
"""The groups of keys that a phase reads and that others read too: the settings that it can have of its own."""
OF_THE_RUN = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy")
"""Processes are started once for all phases."""


def split(key: str) -> tuple[str, str]:
    """The phase and the key inside of `per_phase.PHASE.KEY`; empty where there is none."""
    _, _, below = key.partition(".")
    label, _, inner = below.partition(".")
    return label, inner


def is_per_phase(key: str) -> bool:
    """Whether a dotted key is `per_phase` or lies below it."""
    return key.partition(".")[0] == KEY


def kind(label: str) -> str:
    """The phase that a label means: `supernet-2` is a `supernet`."""
    return label.partition("-")[0]


def check_label(label: str, where: str) -> None:
    """Refuse what is no label of any phase."""
    name, dash, number = label.partition("-")
    if name not in PHASES:
        raise unknown(where, label, PHASES)
    if dash and not (number.isdecimal() and int(number) > 1):
        raise UserError(f"{where}: {label!r} is not valid; a repeated phase is named with its number, as {name}-2")


def check_inner(label: str, key: str, where: str) -> None:
    """Refuse a known key that the phase cannot have of its own."""
    valid = SECTIONS[kind(label)]
    group = key.partition(".")[0]
    if key in OF_THE_RUN:
        raise UserError(f"{where}: {key} is of the whole run, whose processes are started once; set {key} itself")
    if group not in valid:
        groups = ", ".join(f"{name}.*" for name in valid)
        raise UserError(
            f"{where}: {group} is not valid here: the phase {kind(label)!r} has no settings of its own for it; "
            f"valid: {groups}"
        )


def configs(config: Config) -> dict[str, Config]:
    """Label of every phase, in order, to the configuration that it runs under (its own `per_phase` is None)."""
    labels = phase_labels(config.phases)
    return {label: _resolve(config, label, labels[:i]) for i, label in enumerate(labels)}


def _resolve(config: Config, label: str, before: Sequence[str]) -> Config:
    given = (config.per_phase or {}).get(label) or {}
    sections: dict[str, Any] = {
        name: OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(getattr(config, name)), values))
        for name, values in given.items()
    }
    found = replace(config, per_phase=None, **sections)
    same = [other for other in before if kind(other) == kind(label)]
    if same and "from_checkpoint" not in given.get("train", {}):
        found.train = replace(found.train, from_checkpoint=same[-1])
    return found


def of_kind(config: Config, *names: str) -> Config:
    """The configuration of the first phase that is one of `names`, tried in this order; without one, `config`."""
    found = configs(config)
    return next((found[name] for name in names if name in found), config)


def dotted(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """`per_phase` key by key: `{"retrain.train.lr": 1e-3, ...}`."""
    return {
        f"{label}.{group}.{key}": value
        for label, groups in (settings or {}).items()
        for group, values in (groups or {}).items()
        for key, value in values.items()
    }


def overridden(keys: Iterable[str], config: Config) -> Iterator[tuple[str, str]]:
    """(key, why) of those of `keys` that the command line sets for the whole run, and a phase has of its own."""
    own, asked = dotted(config.per_phase), tuple(keys)
    for key in asked:
        for label in config.per_phase or {}:
            whole = f"{KEY}.{label}.{key}"
            if f"{label}.{key}" in own and not any(f"{whole}.".startswith(f"{other}.") for other in asked):
                yield key, f"the phase {label!r} has its own, {whole}={typed(own[f'{label}.{key}'])}"


@dataclass
class PerPhase:
    """What a recipe and a command line come to: `phases`, and `settings` by label.

    Settings go with their phases: a child recipe, or a command line, that names other phases loses those of the rest.
    """

    phases: list[str]
    settings: dict[str, Any] = field(default_factory=dict)

    def take(self, values: Mapping[str, Any], origin: str = "") -> None:
        """Take in one file of a recipe's lineage, or the command line as nested mappings."""
        phases = values.get("phases")
        if isinstance(phases, list):
            self.phases = phases
            self.settings = {k: v for k, v in self.settings.items() if k in phase_labels(phases)}
        if KEY not in values:
            return
        if values[KEY] is None:
            self.settings = {}
        for label, groups in (values[KEY] or {}).items():
            if label not in phase_labels(self.phases):
                raise UserError(
                    f"{origin}{KEY}.{label}: phases={typed(self.phases)} has no such phase; "
                    f"valid: {', '.join(phase_labels(self.phases))}"
                )
            if groups is None:
                self.settings.pop(label, None)
                continue
            mine = self.settings.setdefault(label, {})
            for group, inner in groups.items():
                mine[group] = {**mine.get(group, {}), **inner}


def settings(lineage: Iterable[Recipe], given: Mapping[str, Any], phases: list[str]) -> dict[str, Any] | None:
    """`per_phase` of a recipe under the settings of a command line (dotted keys); `phases`: the default."""
    found = PerPhase(phases)
    for part in lineage:
        found.take(part.values, f"{part.origin}: ")
    found.take(_nested(given))
    return {label: groups for label, groups in found.settings.items() if groups} or None


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a command line that matter here, those below `per_phase` as nested mappings."""
    tree: dict[str, Any] = {key: value for key, value in given.items() if key in ("phases", KEY)}
    for key, value in sorted(given.items()):
        if not is_per_phase(key) or key == KEY:
            continue
        *path, last = key.split(".")
        node = tree
        for name in path:
            node[name] = dict(node.get(name) or {})
            node = node[name]
        node[last] = {**node[last], **value} if isinstance(node.get(last), dict) and isinstance(value, dict) else value
    return tree
