"""What these callbacks need of a LightningModule and its data, checked before training with one message.

A module of one's own has `net`, a supernet as `lightning_tas.supernet` gives it, and `seed`, an int, unless the
callback is given one; `PreferredSelection` calls ``set_candidates(candidates)`` on it, before training.
docs/training.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DistributedSampler, RandomSampler

from lightning_tas.errors import UserError

NET = ("space", "options", "subnet", "check")
"""What a supernet has that other networks have not."""


def check_module(module: LightningModule, key: str, seed: bool = False, candidates: bool = False) -> None:
    """Refuse a module that lacks what a callback needs; raises UserError that names all of it.

    Args:
        key: what the message begins with.
        seed: whether the module's seed is needed. candidates: whether it has to take candidates.
    """
    net, lacks = getattr(module, "net", None), []
    missing = [name for name in NET if not hasattr(net, name)]
    if missing:
        has = "it has no `net`" if net is None else f"its net, a {type(net).__name__}, has no {', '.join(missing)}"
        lacks.append(
            f"trains no supernet: {has}; valid: SupernetModule, or a module with net=lightning_tas.supernet(...)"
        )
    if seed and not isinstance(getattr(module, "seed", None), int):
        lacks.append("has no seed; give the callback one: seed=0")
    if candidates and not callable(getattr(module, "set_candidates", None)):
        lacks.append("has no method set_candidates(candidates) to be told what to train")
    if lacks:
        raise UserError(f"{key}: {type(module).__name__} {'; it '.join(lacks)}")


def validation_loader(trainer: Trainer) -> Callable[[], Iterable[Any]] | None:
    """A function that gives the validation data of the fit, all of it on every process; None: there is none.

    Lightning's own loaders hold a share of the images for each process; this is what they were made from.
    """
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    if source.instance is None or not source.is_defined():
        return None

    def load() -> Iterable[Any]:
        given: Any = source.dataloader()
        loader = given[0] if isinstance(given, Sequence) and given else given
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and trainer.world_size > 1):
            raise UserError(
                f"search.score: 'accuracy' compares networks on the same images in the same order, but the validation "
                f"loader has a {type(sampler).__name__}; give it shuffle=False, or give the callback a loader: "
                "loader=FUNCTION, which returns one of all images"
            )
        return loader  # type: ignore[no-any-return]

    return load
