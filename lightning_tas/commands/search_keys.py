"""Settings that belong to others: a strategy's options to the strategy, limits to the space.

An heir, or a command line, that names another strategy does not keep the options of the inherited one, which would be
unknown to it; and limits in parameters mean nothing in another space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_tas.errors import UserError

OPTIONS = "search.options"
LIMITED = ("params", "macs", "latency", "activations")


@dataclass
class Belongings:
    """What a recipe and a command line come to: `options` of the strategy, `limits` by quantity; `dropped` limits."""

    strategy: Any = None
    space: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    dropped: bool = False

    def recipe(self, values: Mapping[str, Any]) -> None:
        """Take in one file of a recipe's lineage, base first."""
        search, limits = values.get("search") or {}, values.get("limits") or {}
        if "space" in values and values["space"] != self.space:
            self.space, self.limits = values["space"], {}
        if isinstance(search, Mapping):
            self._strategy(search, search.get("options"))
        self.limits |= {key: limits[key] for key in LIMITED if isinstance(limits, Mapping) and key in limits}

    def command(self, given: Mapping[str, Any]) -> None:
        """Take in the settings of a command line, by dotted key."""
        if "space" in given and given["space"] != self.space:
            self.dropped = any(value is not None for value in self.limits.values())
            self.limits = {}
        named = {"strategy": given["search.strategy"]} if "search.strategy" in given else {}
        self._strategy(named, given.get(OPTIONS))
        for key, value in given.items():
            group, _, name = key.partition(f"{OPTIONS}.")
            if not group and name:
                self.options[name] = value
        self.limits |= {name: given[f"limits.{name}"] for name in LIMITED if f"limits.{name}" in given}
        if any(f"limits.{name}" in given for name in LIMITED):
            self.dropped = False

    def _strategy(self, search: Mapping[str, Any], options: Any) -> None:
        if "strategy" in search and search["strategy"] != self.strategy:
            self.strategy, self.options = search["strategy"], {}
        if options is None:
            return
        if not isinstance(options, Mapping):
            raise UserError(f"{OPTIONS}: {options!r} is not valid; valid: a mapping, as {{population: 50}}")
        self.options |= {str(key): value for key, value in options.items()}


def is_option(key: str) -> bool:
    """Whether a key is the options of the strategy, or one of them."""
    return key == OPTIONS or key.startswith(f"{OPTIONS}.")


def belongings(lineage: Iterable[Mapping[str, Any]], given: Mapping[str, Any]) -> Belongings:
    """Options and limits of a recipe under the settings of a command line."""
    found = Belongings()
    for values in lineage:
        found.recipe(values)
    found.command(given)
    return found
