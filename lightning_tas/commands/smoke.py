"""`smoke=true`: the same recipe, whole, in seconds: synthetic images of the smallest sensible size, a few steps.

Space, sampler, selection, optimiser and phases stay the recipe's own: those are what a smoke run is to try out.
"""

from __future__ import annotations

import math
from typing import Any

SMALLEST_SIDE = 8  # pixels; augmentations need a few
IMAGES = 64


def overrides(tree: Any) -> dict[str, Any]:
    """Dotted keys and the values that they take under `smoke=true`, given the composed configuration.

    The image is at least two patches wide, so that position tables and token grids stay two-dimensional.
    """
    patch = int(tree.model.patch_size)
    side = patch * max(2, math.ceil(SMALLEST_SIDE / patch))
    return {
        "data.name": "synthetic",
        "data.root": None,
        "data.img_size": side,
        "data.num_classes": min(int(tree.data.num_classes or 10), 10),
        "data.batch_size": 8,
        "data.eval_batch_size": 8,
        "data.num_workers": 0,
        "data.train_subset": IMAGES,
        "data.mean": None,
        "data.std": None,
        "train.warmup_epochs": 1,
        "trainer.max_epochs": 2,
        "trainer.max_steps": None,
        "trainer.devices": 1,
        "trainer.num_nodes": 1,
        "trainer.precision": "32-true",
        "trainer.accumulate_grad_batches": 1,
        "trainer.limit_train_batches": 2,
        "trainer.limit_val_batches": 1,
        "trainer.check_val_every_n_epoch": 1,
        "trainer.log_every_n_steps": 1,
        "select.batch_size": 4,
        "select.micro_batch": 2,
    }
