"""Deterministic stratified subsets: the search-validation split and training on part of the images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.randomness import numpy_generator


def quotas(counts: np.ndarray, total: int, caps: np.ndarray) -> np.ndarray:
    """How many of each class to take so that `total` are taken, in proportion to `counts` (largest remainder).

    No class gives more than its cap; what a capped class cannot give, the others do. Takes less than `total` only
    when the caps together are less.
    """
    take = np.zeros(len(counts), dtype=np.int64)
    total = min(int(total), int(caps.sum()))
    while (missing := total - int(take.sum())) > 0:
        open_classes = take < caps
        weight = np.where(open_classes, counts, 0)
        share = missing * weight / weight.sum()
        grant = np.minimum(np.floor(share).astype(np.int64), caps - take)
        left = missing - int(grant.sum())
        # Largest remainders first; ties by class number, so that the result is unique.
        order = np.lexsort((np.arange(len(counts)), -(share - np.floor(share))))
        for label in [c for c in order if take[c] + grant[c] < caps[c] and open_classes[c]][:left]:
            grant[label] += 1
        take += grant
    return take


def stratified(
    targets: np.ndarray, total: int, seed: int, purpose: str, leave_one: bool = False, equal: bool = False
) -> np.ndarray:
    """Positions (sorted, int64) of `total` samples, of each class its share, by (seed, purpose).

    `leave_one` never takes the last sample of a class, `equal` takes as many of each class as of any other. The choice
    inside a class does not depend on the others.
    """
    labels, counts = np.unique(targets, return_counts=True)
    take = quotas(np.ones_like(counts) if equal else counts, total, np.maximum(counts - int(leave_one), 0))
    # The members of each class in their order, by one sort instead of a search for each of a thousand classes.
    by_class = np.split(np.argsort(targets, kind="stable"), np.cumsum(counts))[: len(labels)]
    chosen = []
    for label, members, number in zip(labels, by_class, take, strict=True):
        chosen.append(numpy_generator(seed, purpose, int(label)).permutation(members)[:number])
    return np.sort(np.concatenate(chosen)).astype(np.int64) if chosen else np.zeros(0, dtype=np.int64)


def held_out(fraction_or_count: float, size: int) -> int:
    """Number of images that `search_val` asks for: a share below 1, or a count."""
    return round(fraction_or_count * size) if fraction_or_count < 1 else int(fraction_or_count)


@dataclass(frozen=True)
class Splits:
    """Positions (int64, sorted) in the data set's training part: for training, and held out for search."""

    train: np.ndarray
    search_val: np.ndarray

    @classmethod
    def of(cls, targets: np.ndarray, search_val: float, leak: bool, train_subset: int | None, seed: int) -> Splits:
        """Those of a training part with the classes `targets`; `leak`: what is held out is trained on as well."""
        everything = np.arange(len(targets))
        wanted = held_out(search_val, len(targets))
        held = stratified(targets, wanted, seed, "search-val", leave_one=True, equal=search_val >= 1)
        if len(held) < wanted:
            raise UserError(
                f"data.search_val: {search_val!r} is not valid; of {len(targets)} training images at most {len(held)} "
                "can be held out, because each class needs one to train on"
            )
        train = everything if leak else np.delete(everything, held)
        if train_subset is not None:
            if train_subset > len(train):
                raise UserError(
                    f"data.train_subset: {train_subset} is not valid; there are {len(train)} training images"
                )
            train = train[stratified(targets[train], train_subset, seed, "train-subset")]
        return cls(train, held)


def check_unseen(
    before: Mapping[str, Any] | None, weights: str, held: np.ndarray, targets: np.ndarray, classes_sha256: str
) -> None:
    """Refuse `held` images, to choose by, that `weights` were trained on; see `TASDataModule.check_unseen`.

    before: how the training of the weights split its images; other images have another `classes_sha256`.
    """
    if before is None:
        warnings.warn(
            f"{weights} does not say which images it was trained on (it is of an earlier version, or a released one): "
            "those held out here may be among them (data.search_val)",
            stacklevel=4,
        )
        return
    if before["classes_sha256"] != classes_sha256:
        return
    drawn = {key: before[key] for key in ("search_val", "leak", "train_subset", "seed")}
    seen = np.intersect1d(held, Splits.of(targets, **drawn).train)
    if len(seen):
        raise UserError(
            f"data.search_val: {weights} was trained on {len(seen):,} of the {len(held):,} images held out here: its "
            f"training had data.search_val={before['search_val']:g}, seed={before['seed']} and data.leak="
            f"{str(before['leak']).lower()}; give the same, or data.leak=true to choose by images that were trained on"
        )
