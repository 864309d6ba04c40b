"""What is refused before a run begins: phases that cannot work, spaces too small, weights that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn

from lightning_tas import samplers
from lightning_tas.callbacks.preferred_selection import as_setting
from lightning_tas.callbacks.search_check import judges
from lightning_tas.commands import build, per_phase, searching, trained
from lightning_tas.commands.config import Config
from lightning_tas.data import TASDataModule
from lightning_tas.errors import UserError, as_key
from lightning_tas.launch.loggers import check_loggers
from lightning_tas.search.objective import ACCURACY
from lightning_tas.search.preferred import check_bins
from lightning_tas.supernets import supernet as make_supernet


def check_phases(config: Config) -> None:
    """Refuse a list of phases that cannot work, before anything is written."""
    check_loggers(config)
    for label, settings in per_phase.configs(config).items():
        settings.checkpoint.check()
        if per_phase.kind(label) == "supernet":
            samplers.find(settings.sampler.name)
    searching.tell_ignored(per_phase.of_kind(config, "search", "supernet"))
    if config.scoring.proxies and "supernet" not in config.phases:
        rank_zero_warn(f"scoring is ignored: it goes with the phase 'supernet', and phases is {config.phases}")
    if "retrain" in config.phases and config.arch is not None:
        build.architecture(config.arch)  # read when its turn comes, perhaps days later


def needs_data(config: Config) -> bool:
    """Whether the run looks at images: all do but a search by proxies that see Gaussian ones."""
    return config.phases != ["search"] or searching.sees_images(config)


def check_held_out(config: Config, data: TASDataModule) -> None:
    """Refuse to measure networks by images where none are held out (opens the data)."""
    searches = per_phase.of_kind(config, "search", "supernet")
    if searching.needs_held_out(searches) and not build.data(searches, data).chooses:
        raise UserError("data.search_val: 0 holds no images out, and networks are never chosen by the test set")


def check_selection(config: Config, data: TASDataModule, folder: Path) -> dict[str, Any] | None:
    """Refuse bins that the space cannot fill, and limits that nothing meets, before anything is written or trained.

    Returns latencies that had to be measured for it, to be kept.
    """
    searches = per_phase.of_kind(config, "search", "supernet")
    measured = searching.check_limits(searches, build.data(searches, data), folder)
    if "select" in config.phases:
        selects = per_phase.of_kind(config, "select")
        with torch.device("meta"):
            net = make_supernet(build.space(config), **build.network_options(selects, build.data(selects, data)))
        try:
            check_bins(config.select, net)
        except UserError as error:
            raise as_setting(error) from None
    return measured


def check_weights(config: Config) -> None:
    """Open the weights that phases begin with and compare them with their networks; nothing is computed or written.

    `UserError` as the phases themselves would raise, which come to it perhaps days later.
    """
    before: dict[str, Config] = {}
    data = None
    for label, settings in per_phase.configs(config).items():
        data, kind = build.data(settings, data), per_phase.kind(label)
        start = settings.train.from_checkpoint
        if start in before:  # it has no weights yet
            trains = [per_phase.kind(name) == "supernet" for name in (start, label)]
            with as_key(f"per_phase.{label}"):
                build.check_handed_on((before[start], settings), trains)
        elif kind in ("select", "supernet") and start is not None:
            with torch.device("meta"):
                net = make_supernet(build.space(settings), **build.network_options(settings, data))
            build.start(settings, net, data)
        elif kind in ("search", "measure") and "supernet" in config.phases:
            supernets = {name: one for name, one in before.items() if per_phase.kind(name) == "supernet"}
            _check_images(label, settings, data, supernets)
        elif kind in ("search", "measure") and settings.ckpt is not None:
            trained.supernet(settings)
        elif kind == "retrain" and settings.arch is not None:
            build.network(settings, data, build.architecture(settings.arch)[1], planning=True)
        before[label] = settings


def _check_images(label: str, config: Config, data: TASDataModule, supernets: Mapping[str, Config]) -> None:
    """Refuse images of a phase that the supernet, trained by the phases `supernets`, cannot take or has seen."""
    try:
        for name, trains in supernets.items():
            if config.data == trains.data:
                continue
            source = build.data(trains)
            if name == list(supernets)[-1]:
                with torch.device("meta"):
                    net = make_supernet(build.space(trains), **build.network_options(trains, source))
                    names = None if config.plan else source.known_names
                    trained.fitted(net, data, Path(name), names, compare_names=not config.plan)
            if per_phase.kind(label) == "search" and ACCURACY in judges(config.search):
                source.load()
                data.check_unseen([source.trained_on], f"the phase {name!r}")
    except UserError as error:
        key, colon, text = str(error).partition(":")
        inside = f".{key}" if key.startswith("data.") else ""
        raise UserError(f"{per_phase.KEY}.{label}{inside}{colon}{text}") from None
