"""What a command line names: spaces, data sets, networks, runs, proxies. Unknown ones are told from the text alone.

Nothing here imports torch, which takes seconds: a misspelt name must not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.catalogue import check_name
from lightning_tas.commands import per_phase
from lightning_tas.commands.config import Config
from lightning_tas.errors import UserError, absent, unknown
from lightning_tas.families import check_family
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.spaces import SearchSpace, resolve_space


def check(command: str, config: Config) -> None:
    """Refuse what `command` cannot find or do, as far as the configuration alone tells it. Raises UserError."""
    if command in ("fit", "search", "score"):
        RunFolder.locate(config.output_dir, config.recipe, config.run, config.seed)  # touches nothing
    if command == "search" and config.search.strategy is None:
        raise UserError(f"search.strategy: recipe {config.recipe!r} names none; {_strategies()}")
    if command == "score":
        _bench(config)
    if command in ("fit", "search"):
        _phases(config, ["search"] if command == "search" else config.phases)


def space(config: Config) -> SearchSpace:
    """The search space of the recipe."""
    if config.space is None:
        raise UserError("space: the recipe names no search space; give space=NAME or space=FILE.yaml")
    try:
        return resolve_space(config.space)
    except UserError as error:
        # The reader speaks of what is inside (embed_dim, depth, ...): say where that was given.
        raise UserError(str(error) if str(error).startswith("space") else f"space: {error}") from None


def proxies(key: str, given: Any, options: Any) -> None:
    """Refuse the `given` names of proxies, under `key`.proxies, that there are not, and options they do not have."""
    from lightning_tas.proxies.options import components
    from lightning_tas.proxies.registry import chosen, named

    try:
        asked = chosen(given, named)
    except UserError as error:
        told = str(error).removeprefix("proxy: ").removeprefix("proxies: ")
        raise UserError(f"{key}.proxies: {told}") from None
    try:
        components(asked, {} if options is None else options)
    except UserError as error:
        raise UserError(f"{key}.options: {str(error).removeprefix('options: ')}") from None


def _strategies() -> str:
    from lightning_tas.callbacks.search_check import strategy_names

    return f"give search.strategy=NAME; valid: {', '.join(strategy_names())}"


def _phases(config: Config, phases: Sequence[str]) -> None:
    """What is missing for a phase, or is none of what it needs."""
    if "search" in phases and config.search.strategy is None:
        raise UserError(f"search.strategy: the phase 'search' needs one; {_strategies()}")
    if {"select", "supernet"} & set(phases) or ("search" in phases and config.ckpt is None):
        check_family(space(config).family)
    _searched(per_phase.of_kind(replace(config, phases=list(phases)), "search", "supernet"))
    if "measure" in phases and "supernet" not in phases and config.ckpt is None:
        raise UserError("ckpt: the phase 'measure' needs a trained supernet; add the phase 'supernet' or give ckpt=")
    finds = {"measure", "search"} & set(phases) or ("supernet" in phases and config.search.strategy is not None)
    if "retrain" in phases and config.arch is None and not finds:
        raise UserError("arch: give the architecture to train: arch=RESULT.json, RUN folder, FILE.json or a name")
    if "retrain" in phases and isinstance(config.arch, str):
        check_name(config.arch)
    elif "retrain" in phases and isinstance(config.arch, Mapping):
        Architecture.from_dict(config.arch)


def _searched(config: Config) -> None:
    """What a search is judged by, and has not."""
    from lightning_tas.callbacks.search_check import judges
    from lightning_tas.search.objective import ACCURACY, TRAINED

    if config.search.strategy is None or not {"search", "supernet"} & set(config.phases):
        return
    judging = judges(config.search)
    if ACCURACY in judging and "supernet" not in config.phases and config.ckpt is None:
        raise UserError(
            "search.score: 'accuracy' is of trained weights: give ckpt=RUN, or add the phase 'supernet'; without "
            "training use a proxy, as search.score=dss_pp"
        )
    if TRAINED in judging and "search" not in config.phases:
        raise UserError("search.score: 'trained' trains networks of its own: use the phase 'search'")
    # A data set of the user's may have images for validation of its own: they are seen once it is opened.
    own = config.data.name == "folder" or ":" in config.data.name or "/" in config.data.name
    if {ACCURACY, TRAINED} & set(judging) and config.data.search_val == 0 and not own:
        raise UserError("data.search_val: 0 holds no images out, and networks are never chosen by the test set")


def _bench(config: Config) -> None:
    """Proxies, and how networks are drawn and read, of the score command."""
    from lightning_tas.costs import FORMULAS
    from lightning_tas.proxies.config import check_method

    bench = config.bench
    if bench.path is not None and not os.path.exists(bench.path):
        raise absent("bench", bench.path, "give a file of networks and their accuracies")
    proxies("bench", bench.proxies, bench.options)
    try:
        check_method(bench.init)
    except UserError as error:
        raise UserError(f"bench.{error}") from None
    if bench.family is not None and bench.family not in FORMULAS:
        raise unknown("bench.family", bench.family, FORMULAS)
