"""Settings that belong to others: a strategy's options to the strategy, limits to the space.

An heir, or a command line, that names another strategy does not keep the options of the inherited one, which would be
unknown to it; and limits in parameters mean nothing in another space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_tas.errors import UserError
from lightning_tas.search.config import LIMITED

if TYPE_CHECKING:
    from lightning_tas.commands.config import Config

OPTIONS = "search.options"
FOLLOWERS = {
    "population": ("mutations", "crossovers"),
    "mutations": ("crossovers",),
    "crossovers": ("mutations",),
}
"""Sizes that follow from others: who gives another one of these does not keep an inherited one of those."""
AT_MOST = {"top": "population", "first": "first_pool", "keep": "pool"}
"""Sizes that are not kept where one that is given is smaller."""


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
        """Take in the settings of a command line, by dotted key or as whole groups."""
        given = _single(given)
        if "space" in given and given["space"] != self.space:
            self.dropped = any(value is not None for value in self.limits.values())
            self.limits = {}
        named = {"strategy": given["search.strategy"]} if "search.strategy" in given else {}
        self._strategy(named, given.get(OPTIONS))
        self._strategy(
            {}, {key.removeprefix(f"{OPTIONS}."): given[key] for key in given if key != OPTIONS and is_option(key)}
        )
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
        new = {str(key): value for key, value in options.items()}
        for leader, value in new.items():
            gone = FOLLOWERS.get(leader, ()) if value != self.options.get(leader) else ()
            self.options = {key: kept for key, kept in self.options.items() if key not in gone}
        self.options |= new
        for key, leader in AT_MOST.items():
            kept, most = self.options.get(key), new.get(leader)
            if key not in new and isinstance(kept, int) and isinstance(most, int) and kept > most:
                del self.options[key]


def _single(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which ``search={...}`` and ``limits={...}`` are written out key by key."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        whole = key in ("search", "limits") and isinstance(value, Mapping)
        found |= {f"{key}.{name}": one for name, one in value.items()} if whole else {key: value}
    return found


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


_RACING = ("search.racing_error", "search.racing_top")


def without_effect(keys: Iterable[str], config: Config, alone: bool) -> Iterator[tuple[str, str]]:
    """(key, why) of those of `keys`, which the user set, that change nothing of this search; alone: it is no fit's."""
    from lightning_tas.callbacks.search_check import judges
    from lightning_tas.search.objective import ACCURACY, OTHERS, TRAINED

    search, limits = config.search, config.limits
    if search.strategy is None:
        return
    judging = judges(search)
    reasons: dict[str, str] = {}
    if alone or "search" in config.phases:
        reasons |= dict.fromkeys(("search.when", "search.every_n_epochs"), "the search is a phase of its own")
    elif search.when != "every_n_epochs":
        reasons["search.every_n_epochs"] = f"search.when is {search.when}"
    if ACCURACY not in judging:
        images = ("search.racing", *_RACING, "search.eval_images")
        reasons |= dict.fromkeys(images, f"it is of accuracy, and networks are judged by {', '.join(judging)}")
    elif not search.racing:
        reasons |= dict.fromkeys(_RACING, "search.racing is false")
    if TRAINED not in judging:
        reasons["search.train_epochs"] = "it is of search.score=trained"
    if not set(judging) - set(OTHERS):
        proxies = ("search.mode", "search.init", "search.images", "search.batch_size")
        reasons |= dict.fromkeys(proxies, f"it is of proxies, and networks are judged by {', '.join(judging)}")
    if limits.latency is None:
        conditions = (f"limits.latency_{name}" for name in ("batch", "threads", "repeats", "error"))
        reasons |= dict.fromkeys(conditions, "limits.latency limits nothing")
    yield from ((key, reasons[key]) for key in keys if key in reasons)
