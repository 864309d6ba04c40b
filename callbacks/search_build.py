"""From settings (`search.*`, `limits.*`) and a supernet to a search that is ready to run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_tas.callbacks.latency_limit import LatencyLimit, measured_table
from lightning_tas.callbacks.search_check import EXACT, check_search, check_sources, judges
from lightning_tas.callbacks.search_job import OnGeneration, SearchJob
from lightning_tas.errors import UserError
from lightning_tas.launch import group
from lightning_tas.launch.compare import digest
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.launch.provenance import state_hash
from lightning_tas.limits import Limits, Region
from lightning_tas.proxies.options import components
from lightning_tas.proxies.registry import chosen
from lightning_tas.proxies.shards import share_of
from lightning_tas.search.config import LimitsConfig, SearchConfig
from lightning_tas.search.objective import ACCURACY, OTHERS, TRAINED, Objective
from lightning_tas.search.scorers import AccuracyScorer, ProxyScorer, Scorer, Scorers
from lightning_tas.search.strategy import build_strategy

if TYPE_CHECKING:
    from lightning_tas.callbacks.exact_job import ExactJob
    from lightning_tas.latency import Conditions, LatencyTable

LATENCY = "latency.json"


@dataclass(frozen=True)
class Surroundings:
    """What a search uses besides the supernet and its settings.

    seed: of everything drawn. folder: where results go; None: nowhere. loader: the whole of the held-out images, for
    accuracy. batch: (images, labels) of so many training images, for ``images="data"``. trained: judges networks by
    training them. device, amp_dtype: where and how accuracy and latency are measured. identity: what else decides the
    result, as JSON-able values (the data set): a kept state of another one is not continued.
    """

    seed: int = 0
    folder: Path | None = None
    loader: Callable[[], Any] | None = None
    batch: Callable[[int], tuple[Tensor, Tensor]] | None = None
    trained: Scorer | None = None
    device: torch.device | str | None = None
    amp_dtype: torch.dtype | None = None
    on_generation: OnGeneration | None = None
    progress: bool = False
    identity: Any = None


def read_limits(given: LimitsConfig) -> Limits:
    """The limits of a recipe."""
    return Limits.read(given.stated)


def build_region(
    net: Any,
    given: LimitsConfig,
    folder: Path | None = None,
    measure: bool = True,
    device: torch.device | str | None = None,
    amp_dtype: torch.dtype | None = None,
    write: bool = True,
    progress: bool = True,
) -> Region:
    """The networks of a supernet's space within limits.

    Without `measure` (planning, on the meta device) latency is left out, because it has to be measured: on `device`
    under autocast to `amp_dtype`. `folder` keeps what was measured, if `write`; `progress` shows that it is measured.
    """
    limits = read_limits(given)
    quantities: dict[str, Any] = {}
    if "activations" in limits.bounds:
        from lightning_tas.activations import activation_total

        quantities["activations"] = activation_total(net.space, net)
    if "latency" in limits.bounds:
        cores = os.cpu_count() or 1
        if given.latency_threads is not None and given.latency_threads > cores:
            raise UserError(
                f"limits.latency_threads: {given.latency_threads} is not valid; valid: 1 to {cores}, as this machine "
                "has processors"
            )
        if not measure:
            limits = Limits(tuple(item for item in limits.items if item[0] != "latency"))
        else:
            quantities["latency"] = latency_table(net, given, folder, device, amp_dtype, write, progress)
    return Region(net.space, limits, net, quantities)


def check_space(region: Region, search: SearchConfig) -> None:
    """Refuse limits that nothing meets, and settings that the networks within them rule out, before any work.

    Raises:
        UserError: as of `build_job`.
    """
    region.check()
    if search.strategy == EXACT:
        return
    try:
        build_strategy(str(search.strategy), region, Objective.of(search.score), **dict(search.options or {}))
    except UserError as error:
        raise UserError(f"search.options: {error}") from None


def latency_table(
    net: Any,
    given: LimitsConfig,
    folder: Path | None,
    device: torch.device | str | None = None,
    amp_dtype: torch.dtype | None = None,
    write: bool = True,
    progress: bool = True,
) -> LatencyTable:
    """The latencies of blocks on this device: measured once for a run, and (`write`) kept in its folder.

    With `progress` rank 0 says that it is measured, and how far it is: that may take a minute.

    Raises:
        UserError: it has been measured `MEASUREMENTS` times, and its median error was above ``given.latency_error``.
    """
    from lightning_tas.latency import LatencyTable, conditions

    kept = None if folder is None else folder / LATENCY
    how = latency_settings(given, device, amp_dtype)

    def measured() -> dict[str, Any]:
        repeats, under = given.latency_repeats, conditions(net, **how)
        if kept is not None and kept.exists():
            known = _kept_table(kept, net, repeats, under, given.latency_error)
            if known is not None:
                return known
        # Before Lightning has started a group, all processes measure: one speaks.
        table = measured_table(net, repeats, under, given.latency_error, how, progress and group.rank() == 0)
        if kept is not None and write:
            write_json(kept, table.to_dict())
        return table.to_dict()

    return LatencyTable.from_dict(share_of(None).first(measured))


def latency_settings(
    given: LimitsConfig, device: torch.device | str | None, amp_dtype: torch.dtype | None
) -> dict[str, Any]:
    """How latency is measured, as arguments of `lightning_tas.latency`."""
    threads = given.latency_threads
    return {"batch_size": given.latency_batch, "device": device, "amp_dtype": amp_dtype, "threads": threads}


def _kept_table(path: Path, net: Any, repeats: int, under: Conditions, most: float) -> dict[str, Any] | None:
    """A table as `LatencyTable.to_dict` gives it; None where it was measured under other conditions, or has a median
    error above `most`.

    Raises:
        UserError: it is damaged. With a new table a search that is under way would begin anew.
    """
    from lightning_tas.latency import LatencyTable

    try:
        table = LatencyTable.from_dict(read_json(path, key="limits.latency"))
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, UserError) else f"limits.latency: {str(path)!r} is no table of latencies"
        raise UserError(f"{why}; remove the file to have them measured anew, which begins a search anew") from None
    if not table.fits(net, repeats, under):
        rank_zero_warn(f"{str(path)!r} was measured with other settings or on another device; it is measured anew")
        return None
    if table.median_error > most:
        rank_zero_warn(
            f"{str(path)!r} has a median error of {table.median_error:.1%}, above limits.latency_error={most:g}; it is "
            "measured anew"
        )
        return None
    return table.to_dict()


def build_job(net: Any, search: SearchConfig, limits: LimitsConfig, around: Surroundings) -> SearchJob | ExactJob:
    """The search that `search` describes on the supernet `net`.

    Raises:
        UserError: unknown strategies, settings, scores; limits that nothing meets; accuracy without held-out images.
    """
    check_search(search, limits)
    check_sources(search, around.loader is not None, around.batch is not None, around.trained is not None)
    region = build_region(
        net, limits, around.folder, device=around.device, amp_dtype=around.amp_dtype, progress=around.progress
    )
    region.check()
    weights = state_hash(net.state_dict())
    settings = {
        "strategy": search.strategy,
        "options": dict(search.options or {}),
        "score": search.score,
        "mode": search.mode,
        "proxy_options": _plain(search.proxy_options),
        "init": search.init,
        "images": search.images,
        "batch_size": search.batch_size,
        "seed": around.seed,
        "limits": region.limits.to_dict(),
        "ranges": {name: list(pair) for name, pair in region.ranges().items()},
        "space": {"name": net.space.name, "id": net.space.id, "size": net.space.size()},
        "racing": None,
        "eval_images": search.eval_images,
        "weights_sha256": weights,
    }
    table = region.given("latency")
    if table is not None:
        settings["latency"] = table.facts()
    common: dict[str, Any] = {
        "latency": None if table is None else _latency_limit(net, limits, table, region, around),
        "score": search.score,
        "top": search.top,
        "folder": around.folder,
        "settings": settings,
    }
    batch = _batch(search, around)
    if search.strategy == EXACT:
        return _exact(net, region, search, around, batch, common)
    strategy = build_strategy(
        str(search.strategy), region, Objective.of(search.score), around.seed, **dict(search.options or {})
    )
    special = _special(net, search, around, strategy.protects)
    settings["racing"] = special[ACCURACY].racing if ACCURACY in special else None
    scorer = Scorers(_proxy_scorer(net, search, around, batch), special)
    # Latencies differ from measurement to measurement, and accuracies from device to device.
    tables = {name: total(strategy.space.sample_codes(0, 4)).tolist() for name, total in region.sums.items()}
    where = [str(around.device), str(around.amp_dtype)]
    decides = {**settings, "top": None, "identity": around.identity, "tables": tables, "where": where}
    return SearchJob(
        strategy,
        scorer,
        key=digest(json.loads(json.dumps({**decides, "batch": _hash(batch)}, default=str))),
        on_generation=around.on_generation,
        progress=around.progress,
        piece=1 if search.score == TRAINED else None,
        **common,
    )


def _latency_limit(
    net: Any, limits: LimitsConfig, table: LatencyTable, region: Region, around: Surroundings
) -> LatencyLimit:
    """Measures whole networks as the table's pieces were measured."""
    from lightning_tas.latency import conditions, measure

    how = latency_settings(limits, around.device, around.amp_dtype)
    return LatencyLimit(
        region.limits.bounds["latency"],
        lambda arch: measure(net, arch, repeats=limits.latency_repeats, **how),
        {"repeats": limits.latency_repeats, **asdict(conditions(net, **how)), "options": table.options},
        around.folder,
    )


def _exact(
    net: Any,
    region: Region,
    search: SearchConfig,
    around: Surroundings,
    batch: tuple[Tensor | None, Tensor | None],
    common: Mapping[str, Any],
) -> ExactJob:
    from lightning_tas.callbacks.exact_job import ExactJob

    return ExactJob(
        region,
        net,
        proxy_options=dict((search.proxy_options or {}).get(search.score, {})),
        seed=around.seed,
        batch=batch,
        batch_size=search.batch_size,
        init=None if search.init == "inherited" else search.init,
        device=around.device,
        **dict(search.options or {}),
        **common,
    )


def _plain(options: Any) -> Any:
    return {} if options is None else {name: dict(own) for name, own in options.items()}


def _batch(search: SearchConfig, around: Surroundings) -> tuple[Tensor | None, Tensor | None]:
    """Images and labels that proxies see; None for Gaussian ones."""
    if search.images != "data":
        return None, None
    assert around.batch is not None  # see check_sources
    return around.batch(search.batch_size)


def _hash(batch: tuple[Tensor | None, Tensor | None]) -> str | None:
    """Of the images and labels that proxies see, which decide the scores as weights do."""
    images, labels = batch
    return None if images is None or labels is None else state_hash({"images": images, "labels": labels})


def _proxy_scorer(
    net: Any, search: SearchConfig, around: Surroundings, batch: tuple[Tensor | None, Tensor | None]
) -> ProxyScorer:
    images, labels = batch
    names = [name for name in judges(search) if name not in OTHERS]
    options: dict[str, Any] = {}
    if names:
        _, options = components(chosen(names), search.proxy_options or {})
    init = None if search.init == "inherited" else search.init
    return ProxyScorer(
        net,
        mode=search.mode,
        seed=around.seed,
        images=images,
        labels=labels,
        batch_size=search.batch_size,
        init=init,
        options=options,
        device=around.device,
    )


def _special(net: Any, search: SearchConfig, around: Surroundings, protects: int | None) -> dict[str, Any]:
    """Scorers that are no proxies. protects: how many of the best must have seen all images; None: every network."""
    special: dict[str, Any] = {}
    if ACCURACY in judges(search):
        assert around.loader is not None  # see check_sources
        from lightning_tas.population import Population

        population = Population(
            net, around.loader(), around.device, around.amp_dtype, search.eval_images, seed=around.seed
        )
        best = max(search.racing_top, search.top, protects or 1)
        racing = search.racing and protects is not None
        special[ACCURACY] = AccuracyScorer(population, racing, best, search.racing_error, around.seed)
    if around.trained is not None:
        special[TRAINED] = around.trained
    return special
