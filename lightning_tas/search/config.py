"""Settings of PreNAS selection, as a recipe states them under `select`."""

from __future__ import annotations

from dataclasses import dataclass


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
