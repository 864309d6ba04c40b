"""A probe: one private network, one batch, one seed, and the passes that proxies share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.nuclear import NormCache
from lightning_tas.proxies.passes import Pass, Watcher
from lightning_tas.proxies.roles import Layer, block_names, find_layers
from lightning_tas.randomness import torch_generator

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


@dataclass(frozen=True)
class Measured:
    """What a proxy's formula gives: its value as published, block by block, and the raw quantities behind it.

    Tensors may stay on the device; they are read once, at the end.
    """

    value: Tensor | float
    parts: Tensor | Sequence[float] = ()
    extras: Mapping[str, Tensor | float] = field(default_factory=dict)
    reason: str | None = None  # why the value means nothing here, where the formula itself can tell
    blocks: Mapping[str, Tensor] = field(default_factory=dict)  # extras that are sums over blocks: (depth,) each


@dataclass
class Notes:
    """What one proxy uses: passes with the gradients wanted of them, and watchers with the pass that they watch."""

    passes: dict[Pass, set[str]] = field(default_factory=dict)
    watchers: list[tuple[Pass, Watcher]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """What the passes take with nobody else watching them, once they have run."""
        return sum(one.own_seconds for one in self.passes) + sum(watcher.seconds for _, watcher in self.watchers)

    @property
    def flaw(self) -> str | None:
        """Why nothing computed from the passes can be trusted, or None; what others want of them does not count."""
        for one, wanted in self.passes.items():
            flaw = one.flaw_for(wanted, [watcher for watched, watcher in self.watchers if watched is one])
            if flaw is not None:
                return flaw
        return None


class Probe:
    """A stand-alone network with the data on which proxies look at it.

    net: taken over as it is, so it must be a private copy (`private_copy`, or a sub-network just cut). images (B, C, H,
    W) and labels (B,) lie on the network's device. seed: of everything that a proxy draws.
    """

    def __init__(self, net: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
        self.net, self.images, self.labels, self.seed = net, images, labels, seed
        self.layers: tuple[Layer, ...] = find_layers(net)
        # What follows may be shared by the probes of many networks with the same batch, seed and source of weights.
        self.norms = NormCache()
        self.memo: dict[object, Any] = {}
        # Another private network from the same source, and its supernet's space; None where there is none.
        self.sibling: Callable[[Architecture], nn.Module] | None = None
        self.space: SearchSpace | None = None
        self._passes: dict[object, Pass] = {}
        self._notes = Notes()

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return self.images.device

    @property
    def weighted(self) -> tuple[Layer, ...]:
        """The layers with weight matrices: everything but norms."""
        return tuple(layer for layer in self.layers if layer.role != "norm")

    def of(self, *roles: str) -> tuple[Layer, ...]:
        """The layers with one of `roles`."""
        return tuple(layer for layer in self.layers if layer.role in roles)

    @cached_property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The Transformer blocks over all stages."""
        return tuple(self.net.get_submodule(name) for name in block_names(self.net))

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def generator(self, *purpose: int | str) -> torch.Generator:
        """A generator on the CPU for one stream of this probe's seed."""
        return torch_generator(self.seed, "proxy", *purpose)

    def shared(self, key: object, make: Callable[[], Pass]) -> Pass:
        """The pass called `key`, made at the first call."""
        if key not in self._passes:
            self._passes[key] = make()
        self.note(self._passes[key])
        return self._passes[key]

    @property
    def loss(self) -> Pass:
        """Mean cross-entropy over the batch."""
        return self.shared("loss", lambda: Pass(self, lambda y: F.cross_entropy(y, self.labels), self.images))

    @property
    def logits(self) -> Pass:
        """Sum of all logits of the batch."""
        return self.shared("logits", lambda: Pass(self, torch.sum, self.images))

    def release(self) -> None:
        """Drop the passes. They refer to this probe, so its memory would wait for the collector of cycles."""
        self._passes.clear()

    def note(self, one: Pass, wanted: Iterable[str] = ()) -> None:
        """Remember that the proxy being constructed or called uses this pass, and `wanted` gradients of it."""
        self._notes.passes.setdefault(one, set()).update(wanted)

    def note_watcher(self, one: Pass, watcher: Watcher) -> None:
        """Remember that the proxy being constructed watches a pass by `watcher`."""
        self._notes.watchers.append((one, watcher))

    @contextmanager
    def noting(self) -> Iterator[Notes]:
        """Collect the passes and watchers used inside."""
        before, self._notes = self._notes, Notes()
        try:
            yield self._notes
        finally:
            self._notes = before


def per_block(
    probe: Probe,
    terms: Mapping[Layer, Tensor],
    blocks: Mapping[str, Mapping[Layer, Tensor]] | None = None,
    **extras: Tensor | float,
) -> Measured:
    """The sum of scalar `terms` over layers, with parts by block; the value also holds what lies outside of blocks.

    `blocks` are terms of which the sums by block are wanted as well, by name.
    """
    stacked = torch.stack([term.to(torch.float64) for term in terms.values()])
    apart = {name: by_block(probe, some) for name, some in (blocks or {}).items()}
    return Measured(stacked.sum(), by_block(probe, terms), extras, blocks=apart)


def by_block(probe: Probe, terms: Mapping[Layer, Tensor]) -> Tensor:
    """(depth,) float64 sums of scalar `terms` over the layers of each block."""
    parts = torch.zeros(probe.depth, dtype=torch.float64, device=probe.device)
    inside = [(i, layer.block) for i, layer in enumerate(terms) if layer.block is not None and layer.block >= 0]
    if inside:
        stacked = torch.stack([term.to(torch.float64) for term in terms.values()])
        at, block = torch.tensor(inside, device=stacked.device).t()
        parts.index_add_(0, block, stacked[at])
    return parts


def parts_by_name(probe: Probe, terms: Mapping[str, Tensor]) -> Tensor:
    """(depth,) float64 sums of scalar `terms`, which are named as parameters, over the block that each lies in."""
    parts = torch.zeros(probe.depth, dtype=torch.float64, device=probe.device)
    for block, prefix in enumerate(block_names(probe.net)):
        for name, term in terms.items():
            if name.startswith(f"{prefix}."):
                parts[block] += term
    return parts


def bare(net: nn.Module | None) -> nn.Module | None:
    """The network inside torch's wrappers: data parallel ones and what `torch.compile` makes."""
    while net is not None:
        if isinstance(net, (nn.DataParallel, DistributedDataParallel)):
            net = net.module
        elif isinstance(getattr(net, "_orig_mod", None), nn.Module):
            net = net._orig_mod  # type: ignore[assignment]
        else:
            break
    return net


def private_copy(net: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """A detached copy in eval mode and at least float32, all parameters trainable, without the original's hooks."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        # The copied hooks are still the caller's functions: running them would leave a trace.
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, hooks).clear()
    return settled(twin, device)


def settled(net: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """`net` itself, made ready: on `device`, dropout off, batch norms on batch statistics, at least float32."""
    net = net.to(device) if device is not None else net
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    for parameter in net.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
        parameter.grad = None
        parameter.requires_grad_(True)
    return net


@contextmanager
def quiet() -> Iterator[None]:
    """Exact float32 with gradients, whatever the caller is in: inference mode, no_grad, autocast, TF32."""
    with _exact_products(), torch.inference_mode(False), torch.enable_grad(), _no_autocast():
        yield


@contextmanager
def _exact_products() -> Iterator[None]:
    """No TF32 or bfloat16 inside of products, by torch's settings of that, each of which is left as it was.

    What a backend was not told it takes from the general setting, and goes on doing so: only what still is not exact
    under a general "ieee" has been told, and is told otherwise for the time being. torch's older switches (such as
    `set_float32_matmul_precision`) raise once a user has turned to these, and do not undo themselves.
    """
    backends: Any = torch.backends
    general = backends.fp32_precision
    told: list[tuple[Any, str]] = []
    try:
        backends.fp32_precision = "ieee"
        for place in (
            *(backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn),
            *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
        ):
            if place.fp32_precision != "ieee":
                told.append((place, place.fp32_precision))
                place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in reversed(told):
            place.fp32_precision = precision
        backends.fp32_precision = general


@contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        if torch.is_autocast_enabled("cuda"):
            with torch.autocast("cuda", enabled=False):
                yield
        else:
            yield


def gaussian_batch(
    seed: int, batch_size: int, in_chans: int, img_size: tuple[int, int], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Images N(0, 1) of shape (B, C, H, W) and labels (B,) in which all classes are equally frequent, on the CPU."""
    if batch_size < 1:
        raise UserError(f"batch_size: {batch_size} must be at least 1")
    generator = torch_generator(seed, "proxy", "batch")
    images = torch.randn(batch_size, in_chans, *img_size, generator=generator, dtype=torch.float32, device="cpu")
    rounds = -(-batch_size // max(num_classes, 1))
    draws = [torch.randperm(max(num_classes, 1), generator=generator, device="cpu") for _ in range(rounds)]
    labels = torch.cat(draws)
    return images, labels[:batch_size]
