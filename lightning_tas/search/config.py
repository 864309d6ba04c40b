"""Settings of selection and search, as a recipe states them under `select`, `search` and `limits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "search.when": ("fit_start", "every_n_epochs", "fit_end"),
    "search.mode": ("exact", "inherited"),
    "search.images": ("gaussian", "data"),
}
"""What a text may be."""
AT_LEAST: dict[str, int] = {
    "search.every_n_epochs": 1,
    "search.top": 1,
    "search.batch_size": 1,
    "search.racing_top": 1,
    "search.eval_images": 1,
    "search.train_epochs": 1,
    "limits.latency_batch": 1,
    "limits.latency_threads": 1,
    "limits.latency_repeats": 1,
}
"""The least that a whole number may be; None is valid where it is the default."""


LIMITED = ("params", "macs", "latency", "activations")
"""Quantities that may be limited, see `LimitsConfig`."""


@dataclass
class SelectConfig:
    """PreNAS selection, see `lightning_tas.search.select_preferred`; a rule that is None is the one of `mode`.

    With `cut_supernet`, drop path is linear over the depth of the deepest candidate.
    """

    mode: str = "paper"  # paper, or released (the published code); decides every rule below that is None
    margin: float = 1.0  # width of a size bin, in `unit`
    unit: str = "Mparams"  # Mparams or GMACs
    low: float | None = None  # smallest size, in `unit`; None: the space's
    high: float | None = None  # largest size, in `unit`; None: the space's
    allocation: str | None = None  # heads and MLP ratios of the layers: dp (exact optimum), greedy, released
    norm: str | None = None  # of scores: paper (eq. 13), l1l1 (released), none
    classes: str | None = None  # isomers have equal sums (paper) or counts (released) of their choices
    skip_unused_middle: bool | None = None  # leave out classes without the middle choice, as the released code does
    top: int = 1  # how many networks of each bin to keep
    loss: str = "logits"  # of the one gradient pass: logits (no labels needed), or ce (needs images=data)
    images: str = "gaussian"  # gaussian needs no data; data: from the training set
    batch_size: int = 64  # images of the gradient pass
    micro_batch: int = 4  # images per backward pass; less needs less memory
    cut_supernet: bool = False  # train a supernet no deeper or wider than the candidates need, as released


@dataclass
class SearchConfig:
    """A search: as a phase of its own, as the command search, or (`when`) inside supernet training."""

    strategy: str | None = (
        None  # random, evolution, s3_evolution, blockwise, etas, nsga2, exact, exhaustive; own: MODULE:NAME
    )
    score: str = "accuracy"  # what is maximised: accuracy (of inherited weights, held-out images), trained, or a proxy
    when: str = "fit_end"  # of a search inside the phase supernet: fit_start, every_n_epochs, fit_end
    every_n_epochs: int = 1
    top: int = 1  # how many networks it hands on, best first
    options: Any = None  # settings of the strategy, as {population: 50}; see docs/search.md
    mode: str = "exact"  # of proxies: exact (each network's own gradients), inherited (one gradient for all)
    proxy_options: Any = None  # of single proxies, as {dss: {mode: released}}
    batch_size: int = 16  # images that proxies see
    images: str = "gaussian"  # what they are: gaussian, or data (of the training set)
    init: str = "inherited"  # weights that proxies see: inherited (the supernet's), default, normal, ...
    racing: bool = True  # stop measuring a network that cannot reach the best any more
    racing_error: float = 0.05  # probability that racing changes which networks are the best
    racing_top: int = 10  # the best that racing protects; more where more are handed on or become parents
    eval_images: int | None = None  # of the held-out images, for accuracy; None: all
    train_epochs: int = 1  # of every network, for score=trained


@dataclass
class LimitsConfig:
    """What networks may cost, each [low, high], where null leaves a side open; None: no limit."""

    params: Any = None  # parameters, as [5e6,7e6] or [5M,7M]
    macs: Any = None  # multiply-accumulates for one image, as [null,1.4G]
    latency: Any = None  # ms for a batch on this device, as [null,30]
    activations: Any = None  # bytes that a training step keeps for one image, as [null,200M]
    latency_batch: int = 1  # images of the batch that latency is measured with
    latency_threads: int | None = None  # of the processor; None: as many as there are
    latency_repeats: int = 20  # of which the median counts
    latency_error: float = 0.15  # median error of the estimates above which nothing is searched by them

    @property
    def stated(self) -> dict[str, Any]:
        """What is limited, as the recipe says it."""
        return {key: getattr(self, key) for key in LIMITED if getattr(self, key) is not None}
