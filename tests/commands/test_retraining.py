"""`recipe=retrain`: on the images of the run that a network comes from, unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config, to_yaml


def finished(folder: Path, *argv: str) -> Path:
    """What `retrain` reads of a run of these settings."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config_from("fit", list(argv))))
    (folder / "study.json").write_text("{}")
    return folder


def retrain(*argv: str) -> Config:
    return config_from("fit", ["recipe=retrain", *argv])


@pytest.mark.parametrize("given", ["arch={}@best", "arch={}/result.json", "ckpt={}"])
def test_data_and_model_are_those_of_the_run(tmp_path, given):
    run = finished(tmp_path / "run", "recipe=quickstart", "data.train_subset=300", "data.img_size=16")
    of_run, config = config_from("fit", [f"config={run}"]), retrain(given.format(run))
    assert config.model == of_run.model and config.model.patch_size == 4
    held_out = {"search_val": 0}  # of a retraining nothing is chosen
    assert vars(config.data) == {**vars(of_run.data), **held_out}
    assert (config.recipe, config.train.warmup_epochs, config.trainer.max_epochs) == ("retrain", 5, 300)


def test_the_command_line_and_an_heir_say_otherwise(tmp_path):
    run = finished(tmp_path / "run", "recipe=quickstart")
    heir = tmp_path / "mine.yaml"
    heir.write_text("# mine\ndefaults: [retrain]\ndata: {batch_size: 5, hflip: 0.25}\n")
    config = config_from("fit", [f"recipe={heir}", f"arch={run}@best", "model.patch_size=2", "data.hflip=0.5"])
    assert (config.data.name, config.data.batch_size, config.data.hflip) == ("digits", 5, 0.5)
    assert config.model.patch_size == 2


def test_on_the_same_data_set_augmentation_is_the_recipes(tmp_path):
    run = finished(tmp_path / "run", "recipe=prenas_base", "data.root=/data", "data.img_size=192", "data.batch_size=8")
    data = retrain(f"arch={run}@best").data
    assert (data.name, data.root, data.img_size) == ("imagenet", "/data", 192)
    assert (data.auto_augment, data.recount, data.batch_size) == ("rand-m9-mstd0.5-inc1", 1, 128)


def test_other_recipes_keep_their_own(tmp_path):
    run = finished(tmp_path / "run", "recipe=quickstart")
    assert config_from("fit", ["recipe=t_razor_tiny", f"arch={run}@best"]).data.name == "imagenet"
    assert retrain("arch=prenas_ti").data.name == "imagenet"
