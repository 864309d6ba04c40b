"""What a recipe says about proxies: `bench.*` of the score command, `scoring.*` of scoring inside training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_tas.errors import unknown

DEFAULT, INHERITED = "default", "inherited"
DRAWN = (
    *("normal", "trunc_normal", "uniform"),
    *(f"{rule}_{law}" for rule in ("xavier", "kaiming") for law in ("normal", "uniform")),
)
"""Rules by which weights can be drawn, see `proxies.initialise`."""


@dataclass
class BenchConfig:
    """The score command: which proxies, on which networks with known accuracies, how often."""

    path: str | None = None  # networks and their accuracies (bench=PATH is short for it); None: those of ckpt
    proxies: Any = "all"  # names, see docs/proxies.md, an own one as MODULE:NAME; or all
    options: Any = None  # of single proxies, as {dss: {mode: released}}
    accuracies: Any = None  # columns of the file to correlate with; None: all
    family: str | None = None  # read the file's networks as this family; None: as the file says
    networks: int | None = None  # only the first so many of the file; of a supernet: so many are sampled (100)
    inits: int = 3  # random initialisations, each a pass over all networks
    init: str = "default"  # weights: default (the family's own way), normal, trunc_normal, xavier_normal, ...
    images: str = "gaussian"  # what data-dependent proxies see: gaussian (random labels), or data (of data.name)
    batch_size: int = 16
    zen_repeat: int = 4
    paper: bool = False  # batch sizes and repeats of the papers instead of the two above
    eval_batches: int | None = None  # of the validation split, for accuracies in a supernet; None: all
    bootstrap: int = 1000  # resamples behind the 95 % intervals


@dataclass
class ScoringConfig:
    """Scoring between epochs of supernet training."""

    proxies: Any = field(default_factory=list)  # names, or all; empty: no scoring
    networks: int = 50  # sampled once, the same in every epoch
    every_n_epochs: int = 1
    batch_size: int = 16
    eval_batches: int | None = None  # of the validation data, for the inherited accuracy; None: all
    options: Any = None  # of single proxies, as {dss: {mode: released}}


def check_method(method: str, inherited: bool = False) -> None:
    """`UserError` for an unknown way of drawing weights; `inherited`: where there is a network to take them of."""
    valid = [*([INHERITED] if inherited else []), DEFAULT, *DRAWN]
    if method not in valid:
        raise unknown("init", method, valid)
