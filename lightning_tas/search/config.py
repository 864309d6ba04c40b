"""Settings of PreNAS selection, as a recipe states them under `select`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SelectConfig:
    """See `lightning_tas.search.select_preferred`; None leaves a setting to `mode`.

    margin, low, high: in `unit` (Mparams | GMACs). images: "gaussian" needs no data; "data" takes `batch_size` images
    from the training set, which loss "ce" needs, with their labels. micro_batch: images per backward pass.
    cut_supernet: train a supernet no deeper or wider than the candidates need, as the released code does; drop path is
    then linear over the depth of the deepest candidate.
    """

    mode: str = "paper"
    margin: float = 1.0
    unit: str = "Mparams"
    low: float | None = None
    high: float | None = None
    allocation: str | None = None
    norm: str | None = None
    classes: str | None = None
    skip_unused_middle: bool | None = None
    top: int = 1
    loss: str = "logits"
    images: str = "gaussian"
    batch_size: int = 64
    micro_batch: int = 4
    cut_supernet: bool = False
