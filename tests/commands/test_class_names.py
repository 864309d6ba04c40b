"""Names of classes are compared wherever weights meet data: equal, mapped by name and said, or refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lightning_tas.class_names import OtherClasses, class_order
from lightning_tas.commands import build
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.entry import main
from lightning_tas.launch.files import read_json
from lightning_tas.training.checkpoint import load_network
from lightning_tas.training.entries import EMA, KEY

NAMES = [str(i) for i in range(12)]  # as strings they are in the order 0, 1, 10, 11, 2, ...
RENAMED = [f"class-{i}" for i in range(12)]


def write(root: Path, names: list[str]) -> Path:
    """A colour per class, which a network learns in an epoch."""
    for split in ("train", "val"):
        for i, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            colour = (255 * (i % 3) // 2, 255 * (i // 3 % 2), 255 * (i // 6))
            for j in range(4):
                Image.new("RGB", (8, 8), colour).save(root / split / name / f"{j}.png")
    return root


def plain(root: Path, name: str = "folder") -> list[str]:
    return [f"data.name={name}", f"data.root={root}", "data.num_classes=12", "data.img_size=8", "data.search_val=0",
            "data.batch_size=8"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {"same": write(folder / "same", NAMES), "renamed": write(folder / "renamed", RENAMED)}


@pytest.fixture(scope="module")
def retrain(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> list[str]:
    """Arguments of a small training on its own."""
    arch = tmp_path_factory.mktemp("arch") / "small.json"
    arch.write_text(json.dumps({"layer_num": 1, "embed_dim": 32, "num_heads": [1], "mlp_ratio": [2]}))
    return ["recipe=retrain", f"arch={arch}", "model.patch_size=4", "data.num_workers=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path], retrain: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    light = ["data.crop=none", "data.auto_augment=null", "data.color_jitter=0", "data.reprob=0", "data.repeated_aug=1"]
    short = ["trainer.max_epochs=12", "train.lr=0.01", "train.lr_batch=null", "train.warmup_epochs=1", "train.mixup=0",
             "train.cutmix=0", "trainer.check_val_every_n_epoch=100"]  # fmt: skip
    assert main("fit", [*retrain, *plain(data["same"]), *light, *short, f"output_dir={folder}", "run=a"]) == 0
    return next(folder.glob("*/a"))


@pytest.fixture
def permuted(run: Path, tmp_path: Path) -> Path:
    """The run's checkpoint with its classes in the order 0, 1, 2, ..., as timm's readers have them."""
    content: dict[str, Any] = torch.load(next(run.glob("phases/*/checkpoints/final.ckpt")), weights_only=True)
    described = content[KEY]
    order = [described["class_names"].index(name) for name in NAMES]
    described["class_names"] = NAMES
    for state in [content["state_dict"], *([content[EMA]["average"]] if EMA in content else [])]:
        for name in ("net.head.weight", "net.head.bias"):
            state[name] = state[name][order]
    torch.save(content, tmp_path / "permuted.ckpt")
    return tmp_path / "permuted.ckpt"


def evaluated(ckpt: Path, folder: Path, *arguments: str) -> float:
    assert main("evaluate", [f"ckpt={ckpt}", f"output_dir={folder}", *arguments]) == 0
    (entry,) = read_json(folder / "evaluation.json")["architectures"]
    return float(entry["metrics"]["top1"])


def test_every_reader_has_one_order(run: Path, data: dict[str, Path], tmp_path: Path) -> None:
    record = read_json(run / "result.json")
    accuracy = record["architectures"][0]["metrics"]["top1"]
    assert record["data"]["class_names"] == sorted(NAMES) and accuracy > 60
    assert evaluated(run, tmp_path, *plain(data["same"], "imagenet")) == accuracy


def test_a_permutation_is_mapped_and_said(run: Path, permuted: Path, data: dict[str, Path], tmp_path: Path) -> None:
    accuracy = read_json(run / "result.json")["architectures"][0]["metrics"]["top1"]
    with pytest.warns(UserWarning, match=r"same classes in another order .*mapped by name"):
        assert evaluated(permuted, tmp_path, *plain(data["same"])) == accuracy
    assert evaluated(permuted, tmp_path, *plain(data["same"]), "data.class_names=ignore") < accuracy


def test_other_classes_are_refused(
    run: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"ckpt={run}", f"output_dir={tmp_path}", *plain(data["renamed"])]
    assert main("evaluate", arguments) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "class 0 is '0' there, 'class-0' here" in message and "data.class_names=ignore" in message
    assert main("evaluate", [*arguments, "data.class_names=ignore"]) == 0
    assert main("evaluate", [*arguments, "data.class_names=other"]) == 2


def test_weights_that_are_trained_further(run: Path, permuted: Path, data: dict[str, Path], retrain: list[str]) -> None:
    """`train.from_checkpoint`: mapped like elsewhere; a head for other classes begins afresh, as for another number."""
    trained = load_network(next(run.glob("phases/*/checkpoints/final.ckpt"))).net

    def begun(checkpoint: Path, folder: Path, *more: str) -> Any:
        given = [*retrain, *plain(folder), f"train.from_checkpoint={checkpoint}", *more]
        config = config_from("fit", given)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net = build.retrain_module(config, build.data(config), trained.arch).net  # type: ignore[arg-type]
        assert torch.equal(net.cls_token, trained.cls_token)
        return net, " ".join(str(warning.message) for warning in caught)

    net, _ = begun(run, data["same"])
    assert torch.equal(net.head.weight, trained.head.weight)
    net, said = begun(permuted, data["same"])
    assert torch.equal(net.head.weight, trained.head.weight) and "mapped by name" in said
    net, said = begun(run, data["renamed"])
    assert not torch.equal(net.head.weight, trained.head.weight) and "the head starts afresh" in said
    net, _ = begun(run, data["renamed"], "data.class_names=ignore")
    assert torch.equal(net.head.weight, trained.head.weight)


def test_order_of_classes() -> None:
    assert class_order(None, ["a"], "x") is None and class_order(["a"], None, "x") is None
    assert class_order(["a", "b"], ("a", "b"), "x") is None
    with pytest.warns(UserWarning, match="x have the same classes"):
        assert class_order(["a", "b", "c"], ["c", "a", "b"], "x") == [2, 0, 1]
    for theirs, ours in ((["a", "a"], ["a", "b"]), (["a", "b", "b"], ["b", "a", "b"]), (["a"], ["a", "b"])):
        with pytest.raises(OtherClasses):
            class_order(theirs, ours, "x")
