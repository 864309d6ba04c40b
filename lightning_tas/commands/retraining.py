"""`recipe=retrain arch=RUN@LABEL`: a network is trained alone on the images that it was found for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_tas.commands.recipes import Recipe, packaged

RECIPE = "retrain"
# How DeiT's recipe trains on ImageNet. On other data these are the run's as well.
AUGMENTATION = (
    "batch_size", "crop", "crop_scale", "crop_ratio", "crop_padding", "hflip", "auto_augment", "color_jitter", "reprob",
    "remode", "recount", "repeated_aug",
)  # fmt: skip
NOT_TAKEN = ("search_val", "leak")  # retraining chooses nothing by held-out images


def with_data_of(recipe: Recipe, run: Recipe) -> Recipe:
    """`recipe`, where it is `retrain` or inherits from it, with `data` and `model` of a `run`.

    An heir that says otherwise keeps what it says, as the command line does.
    """
    if recipe.origin != str(packaged()[RECIPE]):
        return replace(recipe, parents=tuple(with_data_of(parent, run) for parent in recipe.parents))
    names = [name for part in recipe.lineage() if (name := _data(part).get("name")) is not None]
    same = bool(names) and _data(run).get("name") == names[-1]
    left = (*NOT_TAKEN, *(AUGMENTATION if same else ()))
    values = {
        "data": {key: value for key, value in _data(run).items() if key not in left},
        "model": run.values.get("model") or {},
    }
    return Recipe(recipe.name, run.origin, values, (recipe,))


def _data(recipe: Recipe) -> Mapping[str, Any]:
    found = recipe.values.get("data")
    return found if isinstance(found, Mapping) else {}
