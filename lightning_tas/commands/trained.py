"""What `ckpt=` and `arch=` mean where trained weights are used: a run, one of its checkpoints, or a released file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.callbacks.search_record import RECORD, read_found
from lightning_tas.catalogue import PUBLISHED, SPACES
from lightning_tas.class_names import OtherClasses, reordered
from lightning_tas.commands import build
from lightning_tas.commands.config import Config
from lightning_tas.data import TASDataModule
from lightning_tas.errors import UserError, as_key, unknown
from lightning_tas.launch.results import find_checkpoint, read_architectures
from lightning_tas.spaces import SearchSpace, resolve_space
from lightning_tas.supernets import ElasticNetwork, load_weights
from lightning_tas.supernets import network as make_network
from lightning_tas.supernets import supernet as make_supernet
from lightning_tas.supernets.checkpoints import SOURCES
from lightning_tas.supernets.released import build_options, plain_vit, supernet_sizes
from lightning_tas.training.checkpoint import LoadedSupernet, Opened, inherit, load_network, load_supernet

RELEASED = "official"
# Width that a released supernet allocates, and the space it belongs to.
SPACE_OF_WIDTH = {256: "autoformer_tiny", 448: "autoformer_small", 640: "autoformer_base"}


@dataclass(frozen=True)
class Trained:
    """A trained network: a supernet, or (`alone`) a stand-alone one, whose single architecture `archs` holds.

    `archs`: the architectures that have a label here, in the order in which tables list them. `weights`: "live",
    "ema" (averaged during training) or "official". `run`: the folder of the run that `checkpoint` lies in, if any.
    `supernet`: what else a checkpoint of supernet training says.
    """

    net: Any
    archs: dict[str, Architecture]
    alone: bool
    weights: str
    class_names: list[str] | None
    checkpoint: Path
    run: Path | None
    supernet: LoadedSupernet | None = None

    def logits_of(self, arch: Architecture) -> Architecture | None:
        """What `evaluate` takes for `arch`: None means the stand-alone network itself."""
        return None if self.alone else arch


@as_key("ckpt")
def load(config: Config, phase: str | None = None) -> Trained:
    """Load what `ckpt` (with `source`) names, in eval mode on the CPU; `phase`: see `find_checkpoint`.

    Raises:
        UserError: no such run or file, a run without a trained network, a file of another kind.
    """
    assert config.ckpt is not None
    path = Path(config.ckpt)
    run = run_of(path)
    opened = build.opened_weights(config, find_checkpoint(path, phase=phase), "ckpt")
    if opened.saved is None:
        return _foreign(opened, config)
    if opened.kind == "network":
        single = load_network(opened)
        labels = read_architectures(run / "result.json") if run and (run / "result.json").exists() else {}
        label = next((name for name, arch in labels.items() if arch == single.arch), "network")
        return Trained(single.net, {label: single.arch}, True, single.weights, single.class_names, opened.path, run)
    loaded = load_supernet(opened)
    searched = read_found(run / RECORD) if run is not None and (run / RECORD).exists() else {}
    archs = {**searched, **loaded.report}
    return Trained(loaded.net, archs, False, loaded.weights, loaded.class_names, opened.path, run, loaded)


@as_key("ckpt")
def supernet(config: Config, tell: bool = True) -> LoadedSupernet:
    """The supernet that `ckpt` (with `source`) names. Raises UserError as `load`, or where it is one network alone."""
    assert config.ckpt is not None
    opened = build.opened_weights(config, find_checkpoint(config.ckpt, phase="supernet"), "ckpt", tell)
    if opened.saved is not None:
        return load_supernet(opened)
    found = _foreign(opened, config)
    if found.alone:
        raise UserError(f"ckpt: {str(opened.path)!r} is one network alone; give a supernet")
    return LoadedSupernet(found.net, [], found.archs, None, None, None, RELEASED, seed=0, epoch=0, global_step=0)


def run_of(path: Path) -> Path | None:
    """The folder of the run that `path` is or lies in."""
    for folder in (path, *path.resolve().parents):
        if (folder / "study.json").is_file():
            return folder
    return None


def chosen(trained: Trained, given: Any) -> dict[str, Architecture]:
    """Label to architecture of what `arch=` asks for; None is everything that has a label.

    `given`: a label or id of `trained`, a published name, a file or folder (optionally ``@LABEL``), or a mapping.

    Raises:
        UserError: nothing has that name, or the weights cannot hold the architecture.
    """
    if given is None:
        found = dict(trained.archs)
    else:
        label, arch = _named(trained, given)
        found = {label: arch}
    for label, arch in found.items():
        if trained.alone:
            (own,) = trained.archs.values()
            if arch != own:
                raise UserError(f"arch: {label!r} is not the architecture of {str(trained.checkpoint)!r}, {own.id}")
        else:
            trained.net.check(arch)
    return found


def fit_to_data(trained: Trained, data: TASDataModule, compare_names: bool = True) -> Any:
    """The network of `trained` for the images of `data`, see `fitted`."""
    return fitted(trained.net, data, trained.checkpoint, trained.class_names, compare_names)


def fitted(
    net: Any, data: TASDataModule, checkpoint: Path, names: Sequence[str] | None, compare_names: bool = True
) -> Any:
    """`net` of `checkpoint` for the images of `data`: itself, or one of another size with its positions resampled.

    Its classes, `names`, are put into the order of those of the data; without `compare_names` the data are not opened.

    Raises:
        UserError: it has other classes or channels.
    """
    for key, own, theirs in (
        ("num_classes", net.num_classes, data.num_classes),
        ("in_chans", net.options["in_chans"], data.in_chans),
    ):
        if own != theirs:
            raise UserError(
                f"data.{key}: data.name={data.config.name} gives {theirs}, but the network of {str(checkpoint)!r} "
                f"has {own}"
            )
    if compare_names:
        net = with_classes_of(net, names, data, checkpoint)
    if tuple(net.img_size) == tuple(data.img_size):
        return net
    options = {**net.options, "img_size": list(data.img_size)}
    if isinstance(net, ElasticNetwork):
        resized: Any = make_supernet(net.space, **options)
        resized.bias_rule = net.bias_rule
    else:
        resized = make_network(net.arch, **options)
    load_weights(resized, net.state_dict(), net.grid_size)
    return resized.eval()


def with_classes_of(net: Any, names: Sequence[str] | None, data: TASDataModule, checkpoint: Path) -> Any:
    """`net`, which tells the classes `names` apart, or a copy of it with them in the order of those of `data`.

    Raises:
        UserError: the data have other classes.
    """
    try:
        order = data.order_of(names, f"the weights of {str(checkpoint)!r}")
    except OtherClasses as error:
        raise UserError(f"ckpt: {error}") from None
    if order is None:
        return net
    net = copy.deepcopy(net)
    net.load_state_dict(reordered(net.state_dict(), order))
    return net


def _named(trained: Trained, given: Any) -> tuple[str, Architecture]:
    if isinstance(given, str):
        for label, arch in trained.archs.items():
            if given in (label, arch.id):
                return label, arch
        if given not in PUBLISHED and not Path(given.rpartition("@")[0] or given).exists():
            raise unknown("arch", given, [*trained.archs, *PUBLISHED])
    label, arch = build.architecture(given)
    return label, arch


def _foreign(opened: Opened, config: Config) -> Trained:
    """A network that others trained, or a plain state dict: what it is stands in its names and shapes, or is asked for.

    A released supernet is one of its own space; other weights are those of a supernet where `space` is given, else of
    one network: `arch`, or what the names tell.
    """
    assert config.ckpt is not None
    where = f"{str(opened.path)!r}"
    try:
        options = {**asdict(config.model), **build_options(opened.state)}
        if opened.kind == "supernet":
            sizes = supernet_sizes(opened.state)
        elif config.space is None and config.arch is None and opened.source == "timm":
            label, arch = "network", plain_vit(opened.state)
        elif config.space is None:
            label, arch = _given_arch(config, where)
    except KeyError as missing:
        named = f"no network of source={config.source}" if config.source else "no network that is known by its names"
        raise UserError(f"ckpt: {where} is {named}: no {missing}; {_SOURCES}") from None
    if opened.source is not None:
        options["pool"] = SOURCES[opened.source].pool or options["pool"]
    if opened.kind == "network" or (opened.kind is None and config.space is None):
        net = make_network(arch, **options)
        inherit(net, opened)
        return Trained(net.eval(), {label: arch}, True, RELEASED, None, opened.path, None)
    space = _space(config.space, sizes) if opened.kind == "supernet" else build.space(config)
    net = make_supernet(space, **options)
    inherit(net, opened)
    source = str(config.source)
    own = [name for name in PUBLISHED if name.startswith(source) and SPACES[name] == space.name]
    archs = {name: PUBLISHED[name] for name in own} or {"smallest": space.smallest(), "largest": space.largest()}
    return Trained(net.eval(), archs, False, RELEASED, None, opened.path, None)


_SOURCES = "source=autoformer or source=prenas are released supernets, source=autoprox or source=timm networks"


def _given_arch(config: Config, where: str) -> tuple[str, Architecture]:
    if config.arch is None:
        raise UserError(f"ckpt: {where} does not say which network its weights are of; give arch=FILE, or: {_SOURCES}")
    return build.architecture(config.arch)


def _space(given: Any, sizes: Mapping[str, Any]) -> SearchSpace:
    """The space, cut to what the weights hold: PreNAS's supernets are allocated for their candidates only."""
    if given is None:
        if sizes["embed_dim"] not in SPACE_OF_WIDTH:
            raise UserError(f"space: the weights are {sizes['embed_dim']} wide, which no named space is; give space=")
        given = SPACE_OF_WIDTH[sizes["embed_dim"]]
    space = resolve_space(given)
    held: dict[str, Any] = {key: [c for c in space.choices(key) if c <= size] for key, size in sizes.items()}
    for key, choices in held.items():
        if not choices:
            raise UserError(f"space: {space.name!r} has {key} of {space.choices(key)}, the weights hold {sizes[key]}")
    return space.with_choices(allocated=dict(sizes), **held)
