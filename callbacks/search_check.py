"""Settings of a search that a value alone, or two together, tell to be wrong; no network is needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_tas.errors import UserError, unknown
from lightning_tas.limits import Limits
from lightning_tas.proxies.config import check_method
from lightning_tas.proxies.options import COSTS, TABLES, check_additive, components
from lightning_tas.proxies.registry import chosen, named
from lightning_tas.search.config import AT_LEAST, CHOICES, LimitsConfig, SearchConfig
from lightning_tas.search.objective import ACCURACY, OTHERS, TRAINED, Objective
from lightning_tas.search.settings import read_settings
from lightning_tas.search.strategy import settings_of, strategies, strategy_class

EXACT, EXACT_SETTINGS = "exact", ("front",)


def strategy_names() -> list[str]:
    """What `search.strategy` may be."""
    return sorted({*strategies(), EXACT})


def check_search(search: SearchConfig, limits: LimitsConfig | None = None) -> None:
    """Refuse unknown strategies, scores and settings, limits that are none, and settings that contradict each other.

    Raises:
        UserError: names the key of `search` or `limits` that is wrong, and what is valid.
    """
    limits = limits or LimitsConfig()
    _check_values({"search": search, "limits": limits})
    Limits.read(limits.stated)
    if ":" not in str(search.strategy) and search.strategy not in strategy_names():
        raise unknown("search.strategy", search.strategy, strategy_names())
    options = {} if search.options is None else search.options
    if not isinstance(options, Mapping):
        raise UserError(f"search.options: {options!r} is not valid; valid: a mapping, as {{population: 50}}")
    if search.strategy == EXACT:
        _check_exact(search, options)
    else:
        _check_score("search.score", search.score)
        kind = strategy_class(str(search.strategy))
        try:
            kind.check(read_settings(str(search.strategy), kind.Settings, options), Objective.of(search.score))
        except UserError as error:
            raise UserError(f"search.options: {error}") from None
        _check_tables(search)
    _check_proxy_options(search)
    try:
        check_method(search.init, inherited=True)
    except UserError as error:
        raise UserError(f"search.{error}") from None


def _check_values(groups: Mapping[str, Any]) -> None:
    """Refuse values that commands refuse too, where they come from Python."""

    def value(key: str) -> Any:
        group, _, name = key.partition(".")
        return getattr(groups[group], name)

    for key, choices in CHOICES.items():
        if value(key) not in choices:
            raise unknown(key, value(key), choices)
    defaults = {"search": SearchConfig, "limits": LimitsConfig}
    for key, least in AT_LEAST.items():
        group, _, name = key.partition(".")
        number = value(key)
        if number is None and getattr(defaults[group], name) is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UserError(f"{key}: {number!r} is not valid; valid: {least} or above")
    error = groups["search"].racing_error
    if not isinstance(error, (int, float)) or not 0 < error < 1:
        raise UserError(f"search.racing_error: {error!r} is not valid; valid: above 0, below 1")
    error = groups["limits"].latency_error
    if not isinstance(error, (int, float)) or not error > 0:
        raise UserError(f"limits.latency_error: {error!r} is not valid; valid: above 0, as 0.15 for 15 %")


def check_sources(search: SearchConfig, held_out: bool, images: bool, trains: bool = False) -> None:
    """Refuse a search that needs what is not there: held-out images, training images, a way to train networks.

    Raises:
        UserError: names the key of `search` and what is valid without.
    """
    judging = judges(search)
    if ACCURACY in judging and not held_out:
        raise UserError(
            "search.score: 'accuracy' needs held-out images: validation data, or loader=; valid without: proxies"
        )
    if TRAINED in judging and not trains:
        raise UserError("search.score: 'trained' trains networks of its own, which only the phase 'search' does")
    if search.images == "data" and not images:
        raise UserError("search.images: 'data' needs a data set to draw the batch from; valid here: gaussian")


def _check_exact(search: SearchConfig, options: Mapping[str, Any]) -> None:
    try:
        if search.score in OTHERS:
            raise UserError(f": {search.score!r} is no sum over blocks; exact search takes {', '.join(TABLES)}")
        check_additive(search.score)
    except UserError as error:
        raise UserError(f"search.score: {str(error).partition(': ')[2]}") from None
    if search.mode != "inherited":
        raise UserError(
            f"search.mode: {search.mode!r} is not valid with search.strategy=exact: every network's own gradients "
            "would have to be computed; valid: inherited"
        )
    for key in options:
        if key not in EXACT_SETTINGS:
            raise unknown("search.options", key, EXACT_SETTINGS)
        if not isinstance(options[key], bool):
            raise UserError(f"search.options: {key}: {options[key]!r} is not valid; valid: true or false")


def _check_tables(search: SearchConfig) -> None:
    """With one gradient for all networks only proxies that become tables can judge."""
    if search.mode != "inherited":
        return
    valid = [*COSTS, *TABLES]
    for name, key in _judging(search).items():
        if name in OTHERS:
            continue
        one = named(name)
        lacking = ", ".join(part.name for part in one.parts if part.name not in valid)
        if lacking:
            raise UserError(
                f"{key}: {name!r}{f' (its {lacking})' if one.combines else ''} has no tables of inherited weights; "
                f"valid with search.mode=inherited: {', '.join(valid)} and what is combined from them; others with "
                "search.mode=exact"
            )


def _check_score(key: str, name: Any) -> None:
    try:
        Objective.of(name)
    except UserError as error:
        raise UserError(f"{key}: {str(error).partition(': ')[2]}") from None


def judges(search: SearchConfig) -> list[str]:
    """All that networks are judged by: the objective, ETAS's filter, the guide of blocks, NSGA-II's objectives."""
    return list(_judging(search))


def _judging(search: SearchConfig) -> dict[str, str]:
    """What networks are judged by, and the key of each that says so."""
    name = str(search.strategy)
    more = {**(settings_of(name) if name != EXACT else {}), **(search.options or {})}
    named: dict[str, list[Any]] = {"search.score": [search.score]}
    named |= {f"search.options: {key}": [more.get(key)] for key in ("filter", "guide")}
    if name == "blockwise" and more.get("guide") is None:
        named["search.options: guide"] = ["dss"]  # whose blocks are ranked
    named["search.options: objectives"] = list(more.get("objectives") or ())
    judging: dict[str, str] = {}
    for key, names in named.items():
        for one in names:
            if one is not None:
                judging.setdefault(str(one), key)
    return judging


def _check_proxy_options(search: SearchConfig) -> None:
    names = [name for name in judges(search) if name not in OTHERS]
    if search.proxy_options and not names:
        raise UserError("search.proxy_options: no proxy judges here; valid: null")
    try:
        components(chosen(names, named) if names else [], search.proxy_options or {})
    except UserError as error:
        raise UserError(f"search.proxy_options: {str(error).removeprefix('options: ')}") from None
