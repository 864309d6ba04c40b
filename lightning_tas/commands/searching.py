"""The phase `search`, and the search callback of the phase `supernet`, from `search.*` and `limits.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.utilities import rank_zero_warn

from lightning_tas.architecture import Architecture
from lightning_tas.callbacks import search_record
from lightning_tas.callbacks.search_build import Surroundings, build_job, build_region, check_space
from lightning_tas.callbacks.search_check import judges
from lightning_tas.callbacks.search_record import Found, generations_table, networks_table
from lightning_tas.callbacks.searches import SearchCallback
from lightning_tas.commands import build, trained
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.data import TASDataModule
from lightning_tas.data.config import OF_A_NODE
from lightning_tas.errors import UserError
from lightning_tas.evaluator import AUTOCAST
from lightning_tas.launch.checkpoints import handed_on
from lightning_tas.launch.trainer import start_processes
from lightning_tas.search.objective import ACCURACY, TRAINED
from lightning_tas.supernets import supernet as make_supernet
from lightning_tas.training.checkpoint import load_supernet

if TYPE_CHECKING:
    from lightning_tas.commands.phases import Context


def inside_fit(config: Config) -> bool:
    """Whether the search runs as a callback of the phase `supernet`."""
    return config.search.strategy is not None and "supernet" in config.phases and "search" not in config.phases


def tell_ignored(config: Config) -> None:
    """Warn of a search, or of limits, that change nothing."""
    asked, phases = config.search.strategy is not None, config.phases
    if not asked:
        if config.limits.stated:
            rank_zero_warn("limits are ignored: they are of a search, and search.strategy names none")
    elif "search" not in phases and "supernet" not in phases:
        rank_zero_warn(f"search is ignored: it goes with the phases 'search' or 'supernet', and phases is {phases}")


def needs_held_out(config: Config) -> bool:
    """Whether networks are measured on held-out images: by a search, or by scoring while a supernet trains."""
    searches = config.search.strategy is not None and bool({"search", "supernet"} & set(config.phases))
    scored = bool(config.scoring.proxies) and "supernet" in config.phases
    return scored or (searches and bool({ACCURACY, TRAINED} & set(judges(config.search))))


def check_images(config: Config, data: TASDataModule, trained_on: Any) -> None:
    """Refuse to measure networks while a supernet trains, by images that it was trained on or by the test set."""
    by_accuracy = inside_fit(config) and ACCURACY in judges(config.search)
    if by_accuracy or config.scoring.proxies:
        if not data.chooses:
            raise UserError("data.search_val: 0 holds no images out, and networks are never chosen by the test set")
        data.check_unseen(trained_on, "the supernet")


def sees_images(config: Config) -> bool:
    """Whether the search looks at the images of the data set."""
    return config.search.images == "data" or bool({ACCURACY, TRAINED} & set(judges(config.search)))


def check_limits(config: Config, data: TASDataModule, folder: Path) -> dict[str, Any] | None:
    """Refuse limits that no network meets, before anything is written or computed.

    Latency has to be measured for it; what was measured is returned, to be kept, unless `folder` has it already.
    """
    if config.search.strategy is None or not {"search", "supernet"} & set(config.phases):
        return None
    if config.limits.latency is None and config.ckpt is None:
        with torch.device("meta"):
            net = make_supernet(build.space(config), **build.network_options(config, data))
        check_space(build_region(net, config.limits, measure=False), config.search)
        return None
    real = build.supernet(config, data) if config.ckpt is None else _of_checkpoint(config, data)
    device, amp = place(config)
    region = build_region(real, config.limits, folder, device=device, amp_dtype=amp, write=False)
    check_space(region, config.search)
    known = region.given("latency")
    return None if known is None else dict(known.to_dict())


def search(context: Context) -> dict[str, Any]:
    """Search among the sub-networks of this run's supernet, of `ckpt`, or of a fresh one (training-free)."""
    config = context.config
    start_processes(config.trainer)
    net = _supernet(context).to(build.device(config))
    around = replace(surroundings(context), trained=_trained(context))
    job = build_job(net, config.search, config.limits, around)
    found = job.run()
    if context.main:
        show(context, found)
    if found.why_none:
        raise UserError(f"limits.latency: {found.why_none}")
    if context.main and not {"measure", "retrain"} & set(config.phases):
        _report(context, found, job.settings)
    return {"search": search_record.RECORD}


def callback(context: Context) -> SearchCallback:
    """The search inside supernet training."""
    config = context.config
    made = SearchCallback.of(config.search, config.limits, seed=config.seed, folder=context.folder.path)
    made.identity = identity(config)

    def shown(found: Found) -> None:
        done = made.visits[-1]["epoch"]
        # Epochs are counted from 0, as by progress bars, metrics.csv and names of checkpoints.
        heading = f"search after epoch {done - 1}:" if done else "search before training:"
        show(context, found, log=False, heading=heading)

    made.on_found = shown
    return made


def surroundings(context: Context) -> Surroundings:
    """What a search of this run uses."""
    config, data = context.config, context.data
    device, amp = place(config)

    def row(stats: Mapping[str, Any]) -> None:
        context.loggers.log_generation(stats)

    return Surroundings(
        seed=config.seed,
        folder=context.folder.path,
        loader=lambda: data.search_loader(),
        batch=data.selection_batch,
        device=device,
        amp_dtype=amp,
        on_generation=row,
        progress=context.main,
        identity=identity(config),
    )


def identity(config: Config) -> dict[str, Any]:
    """What decides scores besides supernet and search: the images, and how networks are trained to be judged."""
    data = {key: value for key, value in asdict(config.data).items() if key not in OF_A_NODE}
    trains = TRAINED in judges(config.search)
    return {"data": data, "train": [asdict(config.train), asdict(config.trainer)] if trains else None}


def show(context: Context, found: Found, log: bool = True, heading: str | None = None) -> None:
    """Print what was found, and (`log`) show it on W&B; `heading` says which search it was of several in a fit."""
    if heading is not None:
        say(heading, bar=True)
    folder, score = context.folder.path, context.config.search.score
    if found.generations:
        say(generations_table(found.generations, score))
    say(f"{found.evaluations:,} networks evaluated; {found.stopped}")
    if "labels" in found.more:
        say(_exact_text(found.more))
    say(networks_table(found, score))
    if not log:
        return
    paths = [folder / name for name in (search_record.RECORD, search_record.TABLE)]
    context.loggers.log_search(found.to_dict(), paths, folder / search_record.PICTURE)


def winners(context: Context) -> dict[str, Architecture]:
    """Label to architecture of what this run's search found; empty where there was none."""
    path = context.folder.path / search_record.RECORD
    return search_record.read_found(path) if path.exists() else {}


def _exact_text(facts: Mapping[str, Any]) -> str:
    """What an exact search took, and what is known of its Pareto front."""
    text = f"{facts['labels']:,} partial networks told apart; Pareto front"
    if facts["front_size"] is None:
        return f"{text} left out: {facts['front_left_out']}"
    lacks = "an unknown amount" if facts["front_lacks"] is None else f"at most {facts['front_lacks']:.6g}"
    whole = "complete" if facts["front_complete"] else f"a network that is not on it may score more by {lacks}"
    return f"{text} of score, params and MACs: {facts['front_size']:,} networks, {whole}"


def _supernet(context: Context) -> Any:
    config = context.config
    outputs = context.study.outputs("supernet")
    if "checkpoint" in outputs:
        path = handed_on(context.folder.path / outputs["checkpoint"])
        loaded = load_supernet(path)
        if ACCURACY in judges(config.search):
            context.data.check_unseen(loaded.trained_on, str(path))
        return trained.fitted(loaded.net, context.data, path, loaded.class_names, sees_images(config))
    return build.supernet(config, context.data) if config.ckpt is None else _of_checkpoint(config, context.data)


def _of_checkpoint(config: Config, data: TASDataModule) -> Any:
    source = trained.load(config, "supernet")
    if source.alone:
        raise UserError(f"ckpt: {str(source.checkpoint)!r} is one network alone; a search needs a supernet")
    if ACCURACY in judges(config.search) and source.supernet is not None:
        data.check_unseen(source.supernet.trained_on, str(source.checkpoint))
        if source.supernet.trained is not None and source.supernet.trained.source != "space":
            rank_zero_warn(
                f"search.score=accuracy compares networks of the space, and {str(source.checkpoint)!r} was trained on "
                f"{source.supernet.trained}: others share weights that were not trained for them"
            )
    return trained.fit_to_data(source, data, compare_names=sees_images(config))


def place(config: Config, planning: bool = False) -> tuple[torch.device, torch.dtype | None]:
    """Where networks are measured, and under which autocast."""
    device = build.device(config, planning)
    return device, AUTOCAST.get(str(config.trainer.precision)) if device.type == "cuda" else None


def _trained(context: Context) -> Any:
    from lightning_tas.commands.train_scorer import TrainedScorer

    return TrainedScorer(context.config, context.data)


def _report(context: Context, found: Found, settings: Mapping[str, Any]) -> None:
    """`result.json` of a run that ends with its search: nothing is measured on the test set."""
    config, folder = context.config, context.folder
    record = search_record.write_winners(
        folder.result, found, settings, recipe=config.recipe, checkpoint=config.ckpt, run=folder.path.name
    )
    context.loggers.log_result(record, None)


def found_limits(context: Context) -> dict[str, Any]:
    """The limits in force, as `result.json` keeps them."""
    from lightning_tas.callbacks.search_build import read_limits

    return read_limits(context.config.limits).to_dict()
