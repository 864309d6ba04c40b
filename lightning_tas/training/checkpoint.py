"""Networks out of training checkpoints: everything needed to rebuild one is inside, nothing is retyped.

A checkpoint is Lightning's file (or, under DeepSpeed, a folder that is read like one) plus one entry, `KEY`, of
primitives: the kind of network, its space or architecture, its build options, the recipe, seed, candidates and class
names; ``torch.load(weights_only=True)`` reads it. Where the weights were averaged, the entry `EMA` holds the average;
``state_dict`` always holds the live weights. What is loaded here says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.class_names import OtherClasses, class_order, reordered
from lightning_tas.errors import UserError, as_key, unknown
from lightning_tas.search import Candidate
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import ElasticNetwork, NetOptions, load_weights, network, supernet
from lightning_tas.training.entries import EMA, KEY
from lightning_tas.training.sharded import read_checkpoint
from lightning_tas.training.trained import Trained

VERSION = 1
PREFIX = "net."
"""How the LightningModules name the network's parameters in ``state_dict``."""

Weights = Literal["auto", "ema", "live"]


@dataclass(frozen=True)
class LoadedSupernet:
    """A trained supernet; `weights` is "ema" or "live", `report` the networks that training measured, by label.

    trained: which networks were trained; None in files of earlier versions.
    """

    net: ElasticNetwork
    candidates: list[Candidate]
    report: dict[str, Architecture]
    trained: Trained | None
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


def description(content: Mapping[str, Any], kind: str, path: str | Path) -> dict[str, Any]:
    """What training wrote about the network; UserError when the file is not a checkpoint of this `kind`."""
    saved = content.get(KEY)
    if not isinstance(saved, dict):
        raise UserError(f"ckpt: {path} was not written by lightning_tas training")
    if saved["kind"] != kind:
        raise UserError(f"ckpt: {path} holds a {saved['kind']!r}, but a {kind!r} is needed")
    return saved


def weights_of(content: Mapping[str, Any], weights: Weights, path: str | Path) -> tuple[dict[str, Tensor], str]:
    """The network's own state dict, and which weights it is: "ema" or "live". "auto" is EMA where there is one."""
    if weights not in ("auto", "ema", "live"):
        raise unknown("weights", weights, ("auto", "ema", "live"))
    if weights == "ema" and EMA not in content:
        raise UserError(f"ckpt: {path} holds no averaged weights (train.ema was off)")
    which = "ema" if EMA in content and weights != "live" else "live"
    source = content[EMA]["average"] if which == "ema" else content["state_dict"]
    return {k.removeprefix(PREFIX): v for k, v in source.items() if k.startswith(PREFIX)}, which


@as_key("ckpt")
def load_supernet(path: str | Path, weights: Weights = "auto") -> LoadedSupernet:
    """Rebuild the supernet of a training checkpoint, in eval mode on the CPU.

    Raises:
        UserError: it is missing, broken, or not a supernet's; or EMA weights are asked for and there are none.
    """
    content = read_checkpoint(path)
    saved = description(content, "supernet", path)
    state, which = weights_of(content, weights, path)
    net = supernet(SearchSpace.from_dict(saved["space"]), **saved["model"])
    net.load_state_dict(state)
    return LoadedSupernet(
        net=net.eval(),
        candidates=[Candidate.from_dict(candidate) for candidate in saved["candidates"]],
        report={label: Architecture.from_dict(arch) for label, arch in saved["report"].items()},
        trained=Trained.from_dict(saved["trained"]) if "trained" in saved else None,
        class_names=saved["class_names"],
        weights=which,
        seed=saved["seed"],
        epoch=content["epoch"],
        global_step=content["global_step"],
    )


@as_key("ckpt")
def load_network(path: str | Path, weights: Weights = "auto") -> LoadedNetwork:
    """Rebuild the stand-alone network of a `RetrainModule` checkpoint, in eval mode on the CPU; errors as above."""
    content = read_checkpoint(path)
    saved = description(content, "network", path)
    state, which = weights_of(content, weights, path)
    arch = Architecture.from_dict(saved["arch"])
    net = network(arch, **saved["model"])
    net.load_state_dict(state)
    return LoadedNetwork(
        net=net.eval(),
        arch=arch,
        class_names=saved["class_names"],
        weights=which,
        seed=saved["seed"],
        epoch=content["epoch"],
        global_step=content["global_step"],
    )


@as_key("train.from_checkpoint")
def initialise(net: nn.Module, path: str | Path, class_names: Sequence[str] | None = None) -> None:
    """Start `net` from the weights at `path`: a training checkpoint (averaged weights where it has them) or our own
    plain state dict.

    A stand-alone network inherits its slice of a supernet's checkpoint. Another patch grid is resampled. With
    `class_names`, those of the data, a head for the same classes in another order is mapped by name; one for other
    classes begins afresh, with one warning.

    Raises:
        UserError: no such file, or its weights do not fit; `net` is unchanged then.
    """
    content = read_checkpoint(path)
    saved = content.get(KEY)
    if saved is None:
        load_weights(net, content)
        return
    arch = getattr(net, "arch", None)
    if saved["kind"] == "supernet" and arch is not None:
        state = load_supernet(path).net.subnet_state(arch)
    else:
        state, _ = weights_of(content, "auto", path)
    same_classes = True
    if len(saved["class_names"] or ()) == len(class_names or ()):  # else the head's size tells
        try:
            state = reordered(state, class_order(saved["class_names"], class_names, f"the weights of {str(path)!r}"))
        except OtherClasses:
            same_classes = False
    load_weights(net, state, NetOptions.read(saved["model"]).grid_size, same_classes)
