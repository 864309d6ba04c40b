"""Networks out of training checkpoints: everything needed to rebuild one is inside, nothing is retyped.

A checkpoint is Lightning's file (or, under DeepSpeed, a folder that is read like one) plus one entry, `KEY`, of
primitives: the kind of network, its space or architecture, its build options, the recipe, seed, candidates and class
names; ``torch.load(weights_only=True)`` reads it. Where the weights were averaged, the entry `EMA` holds the average;
``state_dict`` always holds the live weights. What is loaded here says which of the two it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.class_names import OtherClasses, class_order, reordered
from lightning_tas.errors import UserError, as_key, typed, unknown
from lightning_tas.reading import read_json
from lightning_tas.search import Candidate
from lightning_tas.spaces import SearchSpace, isotropic
from lightning_tas.supernets import ElasticNetwork, NetOptions, load_weights, network, supernet
from lightning_tas.supernets.checkpoints import SOURCES, adopt_rule, check_source, fitted, our_names
from lightning_tas.supernets.checkpoints import weights_of as any_weights_of
from lightning_tas.supernets.released import build_options, interleaved, supernet_sizes
from lightning_tas.supernets.weight_sets import AUTO, LIVE, sets_in, unwrapped
from lightning_tas.supernets.weight_sets import EMA as EMA_SET
from lightning_tas.training.entries import EMA, KEY
from lightning_tas.training.sharded import read_checkpoint
from lightning_tas.training.trained import Trained

VERSION = 1
EXPORTED = "model.safetensors"
"""The weights in a folder that the command `export` wrote; its config.json says of which network they are."""
PREFIX = "net."
"""How the LightningModules name the network's parameters in ``state_dict``."""

Weights = Literal["auto", "ema", "live"]


@dataclass(frozen=True)
class LoadedSupernet:
    """A trained supernet; `weights` is "ema" or "live", `report` the networks that training measured, by label.

    trained: which networks were trained; trained_on: how the images of each training of the weights were split, see
        `TASDataModule.check_unseen`. Both are None in files of earlier versions.
    """

    net: ElasticNetwork
    candidates: list[Candidate]
    report: dict[str, Architecture]
    trained: Trained | None
    trained_on: list[dict[str, Any] | None] | None
    class_names: list[str] | None
    weights: str
    seed: int
    epoch: int
    global_step: int

    @property
    def ema(self) -> bool:
        """Whether the weights are averages."""
        return self.weights == "ema"


@dataclass(frozen=True)
class LoadedNetwork:
    """A trained stand-alone network and the architecture it realises."""

    net: nn.Module
    arch: Architecture
    class_names: list[str] | None
    weights: str
    seed: int
    epoch: int
    global_step: int

    @property
    def ema(self) -> bool:
        """Whether the weights are averages."""
        return self.weights == "ema"


@dataclass(frozen=True)
class Opened:
    """The weights that were read of a file, under our names, and what is known of their network.

    weights: "live", "ema", or the entry that they were in; `sets`: all that there are. `saved`: what our training wrote
    about the network, None in other files. `source`: whose it is where it is not ours, see `checkpoints.SOURCES`.
    """

    path: Path
    state: dict[str, Tensor]
    weights: str
    sets: tuple[str, ...]
    saved: dict[str, Any] | None
    source: str | None
    content: Mapping[str, Any]

    @property
    def kind(self) -> str | None:
        """ "supernet" or "network"; None where the file does not tell."""
        if self.saved is not None:
            return str(self.saved["kind"])
        known = SOURCES[self.source].supernets if self.source is not None else None
        return None if known is None else "supernet" if known else "network"

    def __str__(self) -> str:
        if len(self.sets) < 2:
            return str(self.path)
        return f"{self.path}: weights {self.weights!r} of {', '.join(map(repr, self.sets))} (weights=NAME chooses)"


def open_weights(path: str | Path, source: str | None = None, weights: str = AUTO) -> Opened:
    """Read weights of any kind: a training checkpoint (file or DeepSpeed folder), a released one, a plain state dict.

    source: whose networks they are where they have names of their own; weights: which of several sets.

    Raises:
        UserError: it is missing, damaged or of another kind, or needs another `source` or `weights`.
    """
    path = Path(path)
    content = read_checkpoint(path)
    saved = content.get(KEY)
    exported = _exported(path) if source is None else None
    if exported is not None:
        which = exported["weights"]
        return Opened(path, any_weights_of(content)[0], which, (which,), exported, None, exported)
    if isinstance(saved, dict):
        if source is not None:
            raise UserError(
                f"source: {source!r} is not valid for {str(path)!r}, which lightning_tas wrote; leave it out"
            )
        state, which = weights_of(content, weights, path)
        return Opened(path, state, which, (LIVE, EMA_SET) if EMA in content else (LIVE,), saved, None, content)
    if source is not None and source not in SOURCES:
        raise unknown("source", source, SOURCES)
    state, entry = any_weights_of(content, weights)
    if source is not None:
        state = our_names(state, source)
    elif any(name.startswith("patch_embed_super.") for name in state):
        raise UserError(
            f"source: null is not valid for {str(path)!r}, which has the names of released supernets; "
            "set source=autoformer or source=prenas"
        )
    elif any(name.startswith("transformers.") for name in state):
        raise UserError(
            f"source: null is not valid for {str(path)!r}, which has the names of released PiTs; "
            "set source=timm or source=autoprox"
        )
    return Opened(path, state, entry, tuple(filter(None, sets_in(content))), None, source, content)


def _exported(path: Path) -> dict[str, Any] | None:
    """What training would have written about a network that was exported to `path`, from the config.json beside it."""
    beside = path.with_name("config.json")
    content = read_json(beside, "ckpt") if path.name == EXPORTED and beside.is_file() else None
    if not isinstance(content, dict) or content.get("architecture") != "tas_vit":
        return None
    try:
        model = {**content["model_args"], "num_classes": content["num_classes"]}
        names, weights = content["pretrained_cfg"].get("label_names"), content["weights"]
        own = {"kind": "network", "arch": model.pop("arch"), "model": model, "class_names": names, "weights": weights}
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"ckpt: {str(beside)!r} is not a config.json that lightning_tas.export wrote") from None
    return {**own, "seed": 0, "epoch": 0, "global_step": 0}


def description(opened: Opened, kind: str) -> dict[str, Any]:
    """What training wrote about the network; UserError when the file is not a checkpoint of this `kind`."""
    if opened.saved is None:
        raise UserError(f"ckpt: {opened.path} was not written by lightning_tas training")
    if opened.saved["kind"] != kind:
        raise UserError(f"ckpt: {opened.path} holds a {opened.saved['kind']!r}, but a {kind!r} is needed")
    return opened.saved


def weights_of(content: Mapping[str, Any], weights: str, path: str | Path) -> tuple[dict[str, Tensor], str]:
    """The state dict of our own checkpoint, and which it is: "ema" or "live". "auto" is EMA where there is one."""
    if weights not in (AUTO, EMA_SET, LIVE):
        raise unknown("weights", weights, (AUTO, EMA_SET, LIVE))
    if weights == EMA_SET and EMA not in content:
        raise UserError(f"ckpt: {path} holds no averaged weights (train.ema was off)")
    which = EMA_SET if EMA in content and weights != LIVE else LIVE
    source = content[EMA]["average"] if which == EMA_SET else content["state_dict"]
    own = {k.removeprefix(PREFIX): v for k, v in source.items() if k.startswith(PREFIX)}
    return unwrapped(own), which


@as_key("ckpt")
def load_supernet(path: str | Path | Opened, weights: Weights = "auto") -> LoadedSupernet:
    """Rebuild the supernet of a training checkpoint, in eval mode on the CPU.

    Raises:
        UserError: it is missing, broken, or not a supernet's; or EMA weights are asked for and there are none.
    """
    opened = path if isinstance(path, Opened) else open_weights(path, weights=weights)
    saved = description(opened, "supernet")
    net = supernet(SearchSpace.from_dict(saved["space"]), **saved["model"])
    net.load_state_dict(opened.state)
    return LoadedSupernet(
        net=net.eval(),
        candidates=[Candidate.from_dict(candidate) for candidate in saved["candidates"]],
        report={label: Architecture.from_dict(arch) for label, arch in saved["report"].items()},
        trained=Trained.from_dict(saved["trained"]) if "trained" in saved else None,
        trained_on=saved.get("trained_on"),
        class_names=saved["class_names"],
        weights=opened.weights,
        seed=saved["seed"],
        epoch=opened.content["epoch"],
        global_step=opened.content["global_step"],
    )


@as_key("ckpt")
def load_network(path: str | Path | Opened, weights: Weights = "auto") -> LoadedNetwork:
    """Rebuild the stand-alone network of a `RetrainModule` checkpoint, in eval mode on the CPU; errors as above."""
    opened = path if isinstance(path, Opened) else open_weights(path, weights=weights)
    saved = description(opened, "network")
    arch = Architecture.from_dict(saved["arch"])
    net = network(arch, **saved["model"])
    net.load_state_dict(opened.state)
    return LoadedNetwork(
        net=net.eval(),
        arch=arch,
        class_names=saved["class_names"],
        weights=opened.weights,
        seed=saved["seed"],
        epoch=opened.content["epoch"],
        global_step=opened.content["global_step"],
    )


@as_key("train.from_checkpoint")
def initialise(
    net: Any,
    path: str | Path | Opened,
    class_names: Sequence[str] | None = None,
    source: str | None = None,
    weights: str = AUTO,
) -> None:
    """Start `net` from the weights at `path`, whatever they are of; see `open_weights` and `inherit`.

    Raises:
        UserError: no such file, or its weights do not fit; `net` is unchanged then.
    """
    inherit(net, path if isinstance(path, Opened) else open_weights(path, source, weights), class_names)


def inherit(net: Any, opened: Opened, class_names: Sequence[str] | None = None) -> None:
    """Give `net`, a supernet or a stand-alone network, the weights of `opened`.

    A stand-alone network inherits its slice of a supernet, ours or a released one. Another patch grid is resampled.
    With `class_names`, those of the data, a head for the same classes in another order is mapped by name; one for other
    classes begins afresh, with one warning. A net on the meta device is only checked.

    Raises:
        UserError: the weights do not fit: it names the options that differ; `net` is unchanged then.
    """
    arch, saved, grid = getattr(net, "arch", None), opened.saved, None
    state: Mapping[str, Tensor] = opened.state
    if opened.kind == "supernet" and arch is not None:
        whole = load_supernet(opened).net if saved is not None else _released(net, opened)
        state = whole.subnet_state(arch)
    elif opened.source is not None:
        check_source(net, opened.source, state)
    if arch is None and (opened.kind == "network" or (opened.source is not None and opened.kind is None)):
        state = interleaved(state, net.bias_rule)
    if saved is not None:
        grid = NetOptions.read(saved["model"]).grid_size
        _compare_options(net, saved["model"])
        theirs = Architecture.from_dict(saved["arch"]) if saved["kind"] == "network" else None
        if arch is not None and theirs is not None and theirs != arch:
            raise UserError(f"checkpoint: {str(opened.path)!r} is of the network {theirs.id}, not of {arch.id}")
    elif opened.source is None:
        _remind_of_pool(net, state)
    state, same_classes = _by_name(opened, state, class_names)
    if any(parameter.is_meta for parameter in net.parameters()):
        fitted(net, state, grid, same_classes)
        return
    load_weights(net, state, grid, same_classes)
    if opened.source is not None and opened.kind == "supernet" and arch is None:
        adopt_rule(net, opened.source)


def _by_name(
    opened: Opened, state: Mapping[str, Tensor], class_names: Sequence[str] | None
) -> tuple[Mapping[str, Tensor], bool]:
    """`state` with its head in the order of the data's classes, and whether these are the same classes."""
    theirs = opened.saved["class_names"] if opened.saved is not None else None
    if len(theirs or ()) != len(class_names or ()):  # the head's size tells
        return state, True
    try:
        return reordered(state, class_order(theirs, class_names, f"the weights of {str(opened.path)!r}")), True
    except OtherClasses:
        return state, False


def _released(net: Any, opened: Opened) -> Any:
    """A released supernet as large as its weights, over the architecture of `net`."""
    source, arch = opened.source, net.arch
    assert source is not None
    try:
        sizes, options = supernet_sizes(opened.state), build_options(opened.state)
    except KeyError as missing:
        raise UserError(f"checkpoint: {str(opened.path)!r} is no supernet of source={source}: no {missing}") from None
    choices: dict[str, Any] = {"embed_dim": [arch.embed_dim], "depth": [arch.depth]}
    choices |= {key: sorted(set(getattr(arch, key))) for key in ("num_heads", "mlp_ratio")}
    whole = supernet(
        isotropic("released", arch.family, **choices, allocated=sizes), **{**net.options, **options, "allocated": None}
    )
    check_source(whole, source, opened.state)
    load_weights(whole, opened.state)
    adopt_rule(whole, source)
    return whole


def _compare_options(net: Any, saved: Mapping[str, Any]) -> None:
    """Warn of options that no shape tells: the same weights would compute something else."""
    for key in ("pool", "scale", "bias_rule"):
        own = net.options.get(key)
        if key in saved and saved[key] != own and (key != "bias_rule" or hasattr(net, "space")):
            warnings.warn(
                f"the checkpoint's network has model.{key}={typed(saved[key])}, this one {typed(own)}: set "
                f"model.{key}={typed(saved[key])} to go on with the same network",
                stacklevel=3,
            )


def _remind_of_pool(net: Any, state: Mapping[str, Tensor]) -> None:
    """A plain state dict may be timm's, whose names are ours, and which classifies another token."""
    own = net.state_dict()
    plain = "blocks.0.attn.qkv.weight" in state and not any(name.endswith(".vertical") for name in state)
    same_head = (
        "head.weight" in state and "head.weight" in own and state["head.weight"].shape == own["head.weight"].shape
    )
    if plain and same_head and net.options["pool"] != "token":
        warnings.warn(
            "the checkpoint does not say which token it classifies: if it is one of timm's ViTs, set source=timm and "
            "model.pool=token",
            stacklevel=3,
        )
