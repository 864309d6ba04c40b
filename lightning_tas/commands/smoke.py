"""`smoke=true`: the same recipe, whole, in seconds: synthetic images of the smallest sensible size, a few steps.

Space, sampler, selection rules, optimiser and phases stay the recipe's own: those are what a smoke run is to try out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Container
from typing import Any

from omegaconf import OmegaConf

from lightning_tas.commands import per_phase
from lightning_tas.launch import environment
from lightning_tas.search.config import LIMITED

SMALLEST_SIDE = 8  # pixels; augmentations need a few
IMAGES = 64
EPOCHS = 2


def apply(tree: Any, given: Container[str]) -> None:
    """Make `tree`, the composed configuration, that of a smoke run, for every phase; what the user has `given` stays.

    A phase with another image size has another one still, so that what is inherited has to be resampled.
    """
    if any(tree.limits[key] is not None for key in LIMITED) and tree.search.strategy and environment.rank() == 0:
        warnings.warn(
            "smoke=true: a recipe's limits are dropped, for they are of its own images and classes; "
            "limits.NAME=[LOW,HIGH] on the command line limits the small networks",
            stacklevel=2,
        )
    whole = overrides(tree)
    small = dict(whole)
    for label, groups in (tree.per_phase or {}).items():
        own = OmegaConf.merge(tree, groups)
        for key, value in overrides(own).items():
            group, _, name = key.partition(".")
            if group not in per_phase.SECTIONS[per_phase.kind(label)] or key in per_phase.OF_THE_RUN:
                continue
            if key == "data.img_size" and own.data.img_size != tree.data.img_size:
                value += own.model.patch_size
            if name in groups.get(group, ()) or value != whole[key]:
                small[f"{per_phase.KEY}.{label}.{key}"] = value
    for key, value in small.items():
        if key not in given:
            OmegaConf.update(tree, key, value, merge=False, force_add=True)  # options are given whole


def overrides(tree: Any) -> dict[str, Any]:
    """Dotted keys and the values that they take under `smoke=true`, given the composed configuration.

    The image is at least two patches wide, so that position tables and token grids stay two-dimensional.
    """
    patch = int(tree.model.patch_size)
    margin = float(tree.select.margin)
    side = patch * max(2, math.ceil(SMALLEST_SIDE / patch))
    processes: dict[str, Any] = {} if environment.launched() else {"trainer.devices": 1, "trainer.num_nodes": 1}
    return {
        **processes,
        "data.name": "synthetic",
        "data.root": None,
        "data.class_names": "ignore",
        "data.img_size": side,
        "data.num_classes": min(int(tree.data.num_classes or 10), 10),
        "data.batch_size": 8,
        "data.eval_batch_size": 128,
        "data.num_workers": 0,
        "data.search_val": 0.1,
        "data.train_subset": IMAGES,
        "data.mean": None,
        "data.std": None,
        # The rate as it stands: scaled to so small a batch it would lie under `train.min_lr`.
        "train.lr_batch": None,
        "train.warmup_epochs": min(float(tree.train.warmup_epochs), float(tree.train.warmup_share) * EPOCHS),
        "trainer.max_epochs": EPOCHS,
        "trainer.max_steps": None,
        "trainer.precision": "32-true",
        "trainer.accumulate_grad_batches": 1,
        "trainer.limit_train_batches": 2,
        "trainer.limit_val_batches": 1,
        "trainer.check_val_every_n_epoch": 1,
        "trainer.log_every_n_steps": 1,
        # A checkpoint of a base supernet is a gigabyte: writing one after every epoch is most of the time.
        "checkpoint.every_n_epochs": EPOCHS,
        # The published spaces have up to 37 bins of one million parameters: five make one.
        "select.margin": 5 * margin if margin >= 1 else margin,
        "select.batch_size": 4,
        "select.micro_batch": 2,
        "scoring.networks": min(int(tree.scoring.networks), 4),
        "scoring.batch_size": min(int(tree.scoring.batch_size), 4),
        **_search(tree),
        "bench.networks": 6,
        "bench.inits": 2,
        "bench.batch_size": 4,
        "bench.zen_repeat": 1,
        "bench.paper": False,
        "bench.bootstrap": 100,
    }


def _search(tree: Any) -> dict[str, Any]:
    """A search of a few networks, whatever the strategy: its own settings where it has them, in small."""
    if tree.search.strategy is None:
        return {}
    small: dict[str, Any] = {
        "random": {"networks": 6},
        "evolution": {"population": 4, "top": 2, "generations": 1, "crossovers": 2, "mutations": 2},
        "s3_evolution": {"population": 4, "top": 2, "generations": 2, "crossovers": 2, "mutations": 2},
        "blockwise": {"population": 4, "top": 4, "generations": 2, "crossovers": 2, "mutations": 2},
        "etas": {"first_pool": 6, "first": 2, "pool": 4, "keep": 1, "iterations": 2},
        "nsga2": {"population": 4, "generations": 2},
    }
    options = {**dict(tree.search.options or {}), **small.get(str(tree.search.strategy), {})}
    return {
        "search.options": options,
        "search.batch_size": min(int(tree.search.batch_size), 4),
        "search.eval_images": None,
        "search.racing_top": 2,
        # Sizes in a recipe are those of its own images and classes.
        **{f"limits.{key}": None for key in LIMITED},
    }
