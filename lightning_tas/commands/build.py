"""Turn a configuration into objects: data, supernet, modules. Nothing here trains or writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lightning_tas.architecture import Architecture
from lightning_tas.callbacks.search_record import BEST, RECORD, read_found
from lightning_tas.catalogue import PUBLISHED, check_name
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.commands.names import space as space
from lightning_tas.data import TASDataModule
from lightning_tas.errors import UserError, as_key
from lightning_tas.launch.results import YAML, find_checkpoint, pick, read_architectures
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.launch.strategies import unused_semantics
from lightning_tas.launch.study import Study
from lightning_tas.launch.trainer import world_size
from lightning_tas.randomness import derive
from lightning_tas.search import Selection, cut_space
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import ElasticNetwork
from lightning_tas.supernets import network as make_network
from lightning_tas.supernets import supernet as make_supernet
from lightning_tas.supernets.checkpoints import fitted
from lightning_tas.training.checkpoint import Opened, inherit, open_weights
from lightning_tas.training.retrain import RetrainModule
from lightning_tas.training.supernet_module import SupernetModule


def data(config: Config, known: TASDataModule | None = None) -> TASDataModule:
    """The data module, or `known` where that is of the same data; a missing data set is a UserError here."""
    if known is not None and known.config == config.data:
        return known
    return TASDataModule(config.data, seed=config.seed)


def training_space(config: Config, selection: Selection | None) -> SearchSpace:
    """The space that the supernet is built for: the recipe's, or cut to the candidates of `selection`.

    It stays whole where all of it is trained (`sampler.source=space`).
    """
    whole = space(config)
    if selection is None or not config.select.cut_supernet or config.sampler.source == "space":
        return whole
    return cut_space(whole, selection.archs)


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Initialise weights as a function of (seed, purpose), leaving the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, purpose))
        yield


def network_options(config: Config, source: TASDataModule | None = None) -> dict[str, Any]:
    """Build arguments of supernets and stand-alone networks: the model settings and the shape of the data."""
    shape = source if source is not None else data(config)
    return {
        **asdict(config.model),
        "num_classes": shape.num_classes,
        "img_size": tuple(shape.img_size),
        "in_chans": shape.in_chans,
    }


def supernet(config: Config, source: TASDataModule, selection: Selection | None = None) -> ElasticNetwork:
    """The supernet with the initial weights that (recipe, seed, optional checkpoint) determine.

    With `select.cut_supernet` and a `selection` it is cut to what the candidates need.
    """
    with seeded(config.seed, "init"):
        net = make_supernet(training_space(config, selection), **network_options(config, source))
    start(config, net, source)
    return net


def start(config: Config, net: Any, source: TASDataModule) -> None:
    """Give a supernet the weights of `train.from_checkpoint`; one on the meta device is only compared with them."""
    key, path = "train.from_checkpoint", config.train.from_checkpoint
    if path is None:
        return
    with as_key(key):
        found = find_checkpoint(path, key, "supernet")
        _inherit(config, net, opened_weights(config, found, key, tell=config.plan or not _is_meta(net)), source)


def _inherit(config: Config, net: Any, opened: Opened, source: TASDataModule) -> None:
    # A network on the meta device is planned: the data are not opened.
    names = source.known_names if config.data.class_names == "compare" and not _is_meta(net) else None
    with seeded(config.seed, "head"):
        inherit(net, opened, names)
    net.trained_on = None if opened.saved is None else opened.saved.get("trained_on")


def _trained_on(net: Any, source: TASDataModule) -> list[Any]:
    """How the images of every training of these weights were split, see `TASDataModule.check_unseen`."""
    before = [None] if (given := getattr(net, "trained_on", [])) is None else given
    return [*before, source.trained_on]


def _is_meta(net: Any) -> bool:
    return any(parameter.is_meta for parameter in net.parameters())


def opened_weights(config: Config, path: Path, key: str, tell: bool = True) -> Opened:
    """What the file at `path` holds, by `source` and `weights`; of several sets it is told which is read."""
    opened = open_weights(path, config.source, config.weights)
    if tell:
        _tell(key, opened)
    return opened


def _tell(key: str, opened: Opened) -> None:
    if len(opened.sets) > 1:
        say(f"{key}: {opened}")


def global_batch(config: Config) -> int:
    """Images per optimiser step over all processes."""
    return config.data.batch_size * world_size(config.trainer) * config.trainer.accumulate_grad_batches


def supernet_module(config: Config, source: TASDataModule, selection: Selection | None = None) -> SupernetModule:
    """The Lightning module of supernet training, with the candidates of the `selection` where one ran."""
    net = supernet(config, source, selection)
    module = SupernetModule(
        net,
        None,
        replace(config.train, from_checkpoint=None),  # `net` has those weights
        global_batch=global_batch(config),
        seed=config.seed,
        sampler_config=config.sampler,
        class_names=source.known_names,
        compare_classes=config.data.class_names == "compare",
    )
    module.unused = unused_semantics(config.train, config.trainer.strategy)
    module.trained_on = _trained_on(net, source)
    if selection is not None:
        module.set_candidates(selection.candidates)
    return module


def one_architecture(config: Config, study: Study, folder: RunFolder) -> tuple[str, Architecture]:
    """The architecture to retrain: `arch=`, else what this run's search found, else the best network it measured."""
    if config.arch is None:
        inside_training = not folder.result.exists() and (folder.path / RECORD).exists()
        if study.outputs("search") or inside_training:
            found = read_found(folder.path / RECORD)
            if not found:
                raise UserError("search: it handed on no network, so there is none to retrain; see search.json")
            return next(iter(found.items()))
        if not folder.result.exists():
            raise UserError("arch: give the architecture to train: arch=RESULT.json, RUN folder, FILE.json or a name")
        return best_of(folder.result)
    return architecture(config.arch)


def architecture(given: Any) -> tuple[str, Architecture]:
    """Read `arch=`: a file or run folder (optionally `FILE@LABEL`), a published name, or a mapping.

    A result.json without a label means what a search found in it, else its most accurate network.
    """
    if not isinstance(given, str):
        return "arch", Architecture.from_dict(given)
    path, _, label = given.rpartition("@") if "@" in given else (given, "", "")
    if path in PUBLISHED:
        return path, PUBLISHED[path]
    check_name(given)
    archs = read_architectures(path)
    return pick(archs, label) if label else best_of(Path(path), archs)


def best_of(path: Path, archs: dict[str, Architecture] | None = None) -> tuple[str, Architecture]:
    """What a search found, else the most accurate network of a result.json.

    Of other files the only one, or an error that lists the labels.
    """
    archs = archs if archs is not None else read_architectures(path)
    if BEST in archs:
        return BEST, archs[BEST]
    top1 = measured_top1(path)
    if top1:
        label = max(top1, key=lambda name: top1[name])
        return label, archs[label]
    if len(archs) == 1:
        return next(iter(archs.items()))
    raise UserError(f"arch: {str(path)!r} holds several architectures; name one: arch={path}@LABEL of {list(archs)}")


def measured_top1(path: Path) -> dict[str, float]:
    """Label to top-1 [%] where the file (or the run folder's result.json) holds measurements."""
    from lightning_tas.launch.files import read_json

    path = path / "result.json" if path.is_dir() else path
    if not path.exists() or path.suffix in YAML:  # we write none
        return {}
    record = read_json(path, key="arch")
    entries = record.get("architectures", []) if isinstance(record, dict) else []
    try:
        top1 = {entry["label"]: entry["metrics"]["top1"] for entry in entries if entry.get("metrics")}
        return {label: float(value) for label, value in top1.items() if value is not None}
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"arch: {str(path)!r} is not a result.json of this version") from None


def retrain_module(config: Config, source: TASDataModule, arch: Architecture) -> RetrainModule:
    """The Lightning module that trains `arch` alone: see `network`."""
    key, path = start_of(config)
    say(f"training from {'scratch' if path is None else f'the weights of {key}={path}, resampled where sizes differ'}")
    module = RetrainModule(
        network(config, source, arch),
        replace(config.train, from_checkpoint=None),  # the network has those weights
        global_batch=global_batch(config),
        seed=config.seed,
        class_names=source.known_names,
        compare_classes=config.data.class_names == "compare",
    )
    module.unused = unused_semantics(config.train, config.trainer.strategy)
    module.trained_on = _trained_on(module.net, source)
    return module


def start_of(config: Config) -> tuple[str, str | None]:
    """The key and the path of the weights that a retraining starts from; None: from scratch.

    In a run that searches or measures, `ckpt` is the supernet for that, and what is found starts afresh, as published.
    """
    if config.train.from_checkpoint is not None or {"search", "measure"} & set(config.phases):
        return "train.from_checkpoint", config.train.from_checkpoint
    return "ckpt", config.ckpt


def network(config: Config, source: TASDataModule, arch: Architecture, planning: bool = False) -> Any:
    """The network of `arch` for the images of `source`: fresh, or with weights of `train.from_checkpoint`, else `ckpt`.

    What is inherited is resampled where sizes differ. `planning`: weights are compared, and the network has none.
    """
    key, path = start_of(config)
    options = network_options(config, source)
    with as_key(key):
        opened = _inherited(config, path, key, arch) if path is not None else None
        if opened is not None and (config.plan or not planning):
            _tell(key, opened)
        if opened is not None and opened.saved is not None:
            options["allocated"] = _allocated(opened.saved)
        with torch.device("meta") if planning else nullcontext(), seeded(config.seed, "init"):
            net = make_network(arch, **options)
        if opened is not None:
            _inherit(config, net, opened, source)
    return net


def check_handed_on(phases: Sequence[Config], supernets: Sequence[bool]) -> None:
    """`UserError` where a phase cannot start from the weights of an earlier one, whose settings come first.

    supernets: whether each trains one, else a network alone, for which any of the space will do.
    """
    arch = space(phases[0]).smallest() if phases[0].arch is None else architecture(phases[0].arch)[1]
    with torch.device("meta"):
        one, other = (
            make_supernet(space(config), **network_options(config))
            if elastic
            else make_network(arch, **network_options(config))
            for config, elastic in zip(phases, supernets, strict=True)
        )
        state = one.subnet_state(arch) if supernets[0] and not supernets[1] else one.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told when it happens
        fitted(other, state, one.grid_size)


def _inherited(config: Config, path: str, key: str, arch: Architecture) -> Opened:
    """The weights at `path` for `arch`: of a run that trained another network last, those of its supernet."""
    opened = opened_weights(config, find_checkpoint(path, key), key, tell=False)
    if opened.saved is None or opened.kind != "network" or Architecture.from_dict(opened.saved["arch"]) == arch:
        return opened
    whole = find_checkpoint(path, key, "supernet")
    return opened if whole == opened.path else opened_weights(config, whole, key, tell=False)


def _allocated(saved: Mapping[str, Any]) -> Any:
    """The supernet that weights are of: dropout, drop path and `model.scale` go on referring to it."""
    if saved["kind"] == "supernet":
        return dict(SearchSpace.from_dict(saved["space"]).allocated)
    return saved["model"].get("allocated")


def device(config: Config, planning: bool = False) -> torch.device:
    """Where plain functions (selection, measuring) compute: this process's GPU if the trainer may use one.

    Raises:
        UserError: a GPU was asked for and there is none, unless this is `planning` for another machine.
    """
    wanted = config.trainer.accelerator
    if wanted in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if wanted in ("gpu", "cuda") and not planning:
        raise UserError(f"trainer.accelerator: {wanted!r} is not valid here: torch finds no GPU; valid: auto, cpu")
    return torch.device("cpu")
