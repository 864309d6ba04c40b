"""`recipe=retrain`: on the images of the run that a network comes from, with weights from it at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.commands import build
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.commands.entry import main
from lightning_tas.launch.files import read_json
from lightning_tas.launch.results import find_checkpoint
from lightning_tas.training.checkpoint import load_supernet

SMALL = ("data.train_subset=128", "trainer.max_epochs=1", "train.warmup_epochs=0", "trainer.precision=32-true")
# As good as no step: what is measured is what was inherited.
STILL = ("train.lr=1e-12", "train.lr_batch=null", "train.min_lr=0", "train.warmup_lr=0", "train.weight_decay=0")


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
    run = finished(tmp_path / "run", "recipe=quickstart", "data.train_subset=300", "data.img_size=16", "data.leak=true")
    of_run, config = config_from("fit", [f"config={run}"]), retrain(given.format(run))
    assert config.model == of_run.model and config.model.patch_size == 4
    held_out = {"search_val": 0, "leak": False}  # of a retraining nothing is chosen
    assert vars(config.data) == {**vars(of_run.data), **held_out}
    assert (config.recipe, config.train.warmup_epochs, config.trainer.max_epochs) == ("retrain", 5, 300)


def test_the_command_line_and_an_heir_say_otherwise(tmp_path):
    run = finished(tmp_path / "run", "recipe=quickstart")
    heir = tmp_path / "mine.yaml"
    heir.write_text("# mine\ndefaults: [retrain]\ndata: {batch_size: 5, hflip: 0.25}\n")
    config = config_from("fit", [f"recipe={heir}", f"arch={run}@best", "model.patch_size=2", "data.hflip=0.5"])
    assert (config.data.name, config.data.batch_size, config.data.hflip) == ("digits", 5, 0.5)
    assert config.model.patch_size == 2
    smoke = retrain(f"arch={run}@best", "smoke=true")
    assert (smoke.data.name, smoke.data.img_size, smoke.model.patch_size) == ("synthetic", 8, 4)


def test_on_the_same_data_set_augmentation_is_the_recipes(tmp_path):
    run = finished(tmp_path / "run", "recipe=prenas_base", "data.root=/data", "data.img_size=192", "data.batch_size=8")
    data = retrain(f"arch={run}@best").data
    assert (data.name, data.root, data.img_size) == ("imagenet", "/data", 192)
    assert (data.auto_augment, data.recount, data.batch_size) == ("rand-m9-mstd0.5-inc1", 1, 128)


def test_other_recipes_keep_their_own(tmp_path):
    run = finished(tmp_path / "run", "recipe=quickstart")
    assert config_from("fit", ["recipe=t_razor_tiny", f"arch={run}@best"]).data.name == "imagenet"
    assert retrain("arch=prenas_ti").data.name == "imagenet"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained supernet of digits at 8 x 8."""
    folder = tmp_path_factory.mktemp("supernet")
    space = "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}"
    call = ["recipe=quickstart", space, "phases=[supernet,measure]", "sampler.name=uniform", *SMALL]
    assert main("fit", [*call, f"output_dir={folder}", "run=a"]) == 0
    return folder / "quickstart" / "a"


def top1(folder: Path, file: str = "result.json") -> dict[str, Any]:
    return {entry["label"]: entry["metrics"]["top1"] for entry in read_json(folder / file)["architectures"]}


@pytest.mark.slow
def test_weights_are_inherited_at_another_resolution(run, tmp_path):
    """By either key, and as `evaluate` resamples them."""
    call = ["recipe=retrain", f"arch={run}@largest", "data.img_size=12", *SMALL, *STILL, f"output_dir={tmp_path}"]
    assert main("evaluate", [f"ckpt={run}", "arch=largest", "data.img_size=12", f"output_dir={tmp_path / 'e'}"]) == 0
    found = {}
    for key in ("ckpt", "train.from_checkpoint"):
        assert main("fit", [*call, f"{key}={run}", f"run={key[0]}"]) == 0
        found[key] = read_json(tmp_path / "retrain" / key[0] / "result.json")["checkpoint_sha256"]
        assert top1(tmp_path / "retrain" / key[0]) == top1(tmp_path / "e", "evaluation.json")
        saved = torch.load(find_checkpoint(tmp_path / "retrain" / key[0]), weights_only=True)["lightning_tas"]["model"]
        assert saved["allocated"]["depth"] == 2 and list(saved["img_size"]) == [12, 12]
    assert found["ckpt"] == found["train.from_checkpoint"]
    # From that network alone, at a third size and for more classes.
    alone = ["recipe=retrain", f"arch={tmp_path / 'retrain' / 'c'}", f"ckpt={tmp_path / 'retrain' / 'c'}"]
    with pytest.warns(UserWarning, match="the head starts afresh"):
        assert main("fit", [*alone, "data.img_size=8", "data.num_classes=11", *SMALL, f"output_dir={tmp_path}"]) == 0


def test_what_is_found_in_a_supernet_starts_afresh(run, tmp_path):
    """`ckpt` is what is searched in; the winner is trained from scratch, as it is after a supernet phase of its own."""
    call = ["recipe=quickstart", f"ckpt={run}", "sampler.name=uniform", "search.strategy=random", *SMALL]
    made = {}
    for phases in ("[search,retrain]", "[retrain]"):
        config = config_from("fit", [*call, f"phases={phases}", f"arch={run}@largest"])
        made[phases] = build.network(config, build.data(config), build.architecture(config.arch)[1]).state_dict()
    inherited = load_supernet(find_checkpoint(run)).net
    weights = inherited.subnet(inherited.space.largest()).state_dict()
    assert all((value == weights[name]).all() for name, value in made["[retrain]"].items())
    assert not (made["[search,retrain]"]["blocks.0.mlp.fc1.weight"] == weights["blocks.0.mlp.fc1.weight"]).any()


@pytest.mark.parametrize("key", ["ckpt", "train.from_checkpoint"])
def test_weights_that_do_not_fit_are_refused_before_any_work(run, tmp_path, capsys, key):
    call = ["recipe=retrain", f"arch={run}@largest", f"{key}={run}", "model.patch_size=2", *SMALL]
    for plan in ("true", "false"):
        assert main("fit", [*call, f"plan={plan}", f"output_dir={tmp_path / 'runs'}"]) == 2
        err = capsys.readouterr().err
        assert f"lightning_tas.fit: {key}: " in err and "patch_embed" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_a_search_inside_training_found_is_retrained(tmp_path):
    space = "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}"
    call = ["recipe=quickstart", space, "phases=[supernet,retrain]", "sampler.name=uniform", "search.when=fit_start"]
    search = ["search.strategy=random", "search.score=snip", "search.batch_size=4", "search.options={networks: 4}"]
    assert main("fit", [*call, *search, *SMALL, f"output_dir={tmp_path}", "run=a"]) == 0
    run = tmp_path / "quickstart" / "a"
    (found,) = read_json(run / "result.json")["architectures"]
    assert found["arch"] == read_json(run / "search.json")["networks"][0]["arch"]
