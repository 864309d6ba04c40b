"""Fresh weights as a function of a seed: the family's own rule, or one of the methods that T-Razor compares (Fig. 6).

The methods set weight matrices and convolutions, and norms to (1, 0), while class token, positions and relative
position tables keep the family's rule (in a network of no family: what they are). Biases become 0, but those of
"normal" are drawn as well: T-Razor, which names no other of its six methods, explains what it gains by biases that are
not all zero. Standard deviations are torch's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.proxies.config import DEFAULT, check_method
from lightning_tas.proxies.roles import NORM, find_layers
from lightning_tas.randomness import derive
from lightning_tas.supernets import network

METHODS: dict[str, Callable[[Tensor], Any]] = {
    "normal": nn.init.normal_,
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "uniform": nn.init.uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
}
"""Rules for weight matrices; "normal" is N(0, 1)."""
DRAWN_BIASES = frozenset({"normal"})
_GENERATOR = RLock()


@contextmanager
def seeded(seed: int, *purpose: int | str) -> Iterator[None]:
    """Draw from torch's CPU generator as a function of (seed, purpose), leaving it as it was."""
    # The generator is the process's: threads take turns.
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the generators of accelerators too.
        torch.default_generator.manual_seed(derive(seed, *purpose))
        yield


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """New tensors in float32 on the CPU whatever the user's defaults: a seed means the same weights everywhere."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def fresh(arch: Architecture, seed: int, method: str, build: Mapping[str, Any]) -> nn.Module:
    """The stand-alone network of `arch`, built with options `build`, with weights drawn by `method` from `seed`."""
    check_method(method)
    with seeded(seed, "proxy", "init"), _plain_tensors():
        net: nn.Module = network(arch, **build)
    if method != DEFAULT:
        redraw(net, method, seed)
    return net


@torch.no_grad()
def redraw(net: nn.Module, method: str, seed: int) -> None:
    """Draw the weights of all layers of `net` anew by `method`, in place; see the module for biases and norms."""
    with seeded(seed, "proxy", "redraw"):
        for layer in find_layers(net):
            weight, bias = layer.module.weight, getattr(layer.module, "bias", None)
            assert isinstance(weight, Tensor)
            # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
            if layer.role == NORM:
                weight.fill_(1.0)
            else:
                weight.copy_(_drawn(weight.shape, method))
            if bias is not None and (layer.role == NORM or method not in DRAWN_BIASES):
                bias.zero_()
            elif bias is not None:
                bias.copy_(_drawn(bias.shape, method))


def _drawn(shape: torch.Size, method: str) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    METHODS[method](values)
    return values
