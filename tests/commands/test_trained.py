"""`evaluate` and `export` on what `fit` has written, and on files in the layout of the released supernets."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import lightning_tas as tas
from lightning_tas.catalogue import PUBLISHED
from lightning_tas.commands import build, export, trained
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json
from lightning_tas.launch.results import find_checkpoint, read_selection
from lightning_tas.supernets import ElasticViT
from lightning_tas.supernets.checkpoints import REFERENCE_NAMES
from lightning_tas.training.checkpoint import load_supernet

ROOT = Path(__file__).resolve().parents[2]


def fit(folder: Path, *argv: str) -> Path:
    assert main("fit", ["smoke=true", f"output_dir={folder}", "run=a", *argv]) == 0
    return next(folder.glob("*/a"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("supernet"), "recipe=quickstart", "train.ema=true", "train.ema_decay=0.5")


@pytest.fixture(scope="module")
def retrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch = {"layer_num": 2, "embed_dim": 32, "num_heads": [1, 2], "mlp_ratio": [2, 3]}
    path = tmp_path_factory.mktemp("arch") / "small.json"
    path.write_text(json.dumps(arch))
    return fit(tmp_path_factory.mktemp("retrain"), "recipe=retrain", f"arch={path}", "model.patch_size=8")


def entries(path: Path) -> dict[str, dict[str, Any]]:
    return {entry["label"]: entry for entry in read_json(path)["architectures"]}


def refused(capsys: pytest.CaptureFixture[str], command: str, *argv: str) -> str:
    capsys.readouterr()
    assert main(command, list(argv)) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(f"lightning_tas.{command}: ")
    return err


def test_evaluate_repeats_what_the_run_measured(run: Path, tmp_path: Path) -> None:
    measured = entries(run / "result.json")
    assert main("evaluate", [f"ckpt={run}", f"output_dir={tmp_path}"]) == 0
    assert entries(tmp_path / "evaluation.json") == {
        label: {**entry, "score": None, "bin": None} for label, entry in measured.items()
    }
    record, result = read_json(tmp_path / "evaluation.json"), read_json(run / "result.json")
    assert record["weights"] == "ema"
    assert record["checkpoint_sha256"] == result["checkpoint_sha256"]
    label, entry = next(iter(measured.items()))
    checkpoint = next(run.glob("phases/*/checkpoints/final.ckpt"))
    for ckpt, arch in ((run, label), (checkpoint, entry["id"]), (run, f"{run / 'result.json'}@{label}")):
        assert main("evaluate", [f"ckpt={ckpt}", f"arch={arch}"]) == 0
        (one,) = entries(run / f"evaluation-{label}.json").values()
        assert one["arch"] == entry["arch"] and one["metrics"] == entry["metrics"]


def test_what_is_not_the_runs_own_has_a_record_of_its_own(run: Path) -> None:
    """An evaluation of an intermediate checkpoint, one network or other images leaves the record of the last one."""
    assert main("evaluate", [f"ckpt={run}"]) == 0
    own, label = (run / "evaluation.json").read_bytes(), next(iter(entries(run / "result.json")))
    before = set(run.glob("evaluation*"))
    first = sorted(run.glob("phases/01-supernet/checkpoints/epoch=*.ckpt"))[0]
    for argv, name in (
        ([f"ckpt={first}"], f"evaluation-01-supernet-{first.stem}.json"),
        ([f"ckpt={first}", f"arch={label}"], f"evaluation-01-supernet-{first.stem}-{label}.json"),
        ([f"ckpt={run}", "weights=live"], "evaluation-weights=live.json"),
        ([f"ckpt={run}", "data.img_size=[8,12]", "data.eval_batch_size=7"], "evaluation-img_size=8x12.json"),
    ):
        assert main("evaluate", argv) == 0
        found = read_json(run / name)
        assert (found["checkpoint"] == str(first)) == ("epoch" in name)
        assert (run / "evaluation.json").read_bytes() == own
    assert len(set(run.glob("evaluation*")) - before) == 4


def test_evaluate_off_the_list_and_at_another_size(run: Path, tmp_path: Path) -> None:
    """Any architecture that the weights can hold, by any file; images of another size resample the positions."""
    arch = {"layer_num": 2, "embed_dim": 40, "num_heads": [2, 1], "mlp_ratio": [1, 2]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(arch))
    assert main("evaluate", [f"ckpt={run}", f"arch={path}", "data.img_size=[8,12]", f"output_dir={tmp_path}"]) == 0
    record = read_json(tmp_path / "evaluation.json")
    assert list(entries(tmp_path / "evaluation.json")) == ["mine"]
    assert record["data"]["img_size"] == [8, 12]


def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    label = next(iter(entries(run / "result.json")))
    assert f"Did you mean '{label}'" in refused(capsys, "evaluate", f"ckpt={run}", f"arch={label}x")
    deep = tmp_path / "deep.json"
    deep.write_text(json.dumps({"layer_num": 6, "embed_dim": 32, "num_heads": [1] * 6, "mlp_ratio": [2] * 6}))
    assert "6" in refused(capsys, "evaluate", f"ckpt={run}", f"arch={deep}")
    assert "data.num_classes" in refused(capsys, "evaluate", f"ckpt={run}", "data.num_classes=12")
    assert "data.in_chans" in refused(capsys, "export", f"ckpt={run}", f"arch={label}", "data.in_chans=1")
    assert "does not exist" in refused(capsys, "export", f"ckpt={run}/nothing")
    assert "holds no checkpoint" in refused(capsys, "evaluate", f"ckpt={tmp_path}")
    weights = tmp_path / "weights.pth"
    torch.save({"a": torch.zeros(1)}, weights)
    assert "source=" in refused(capsys, "evaluate", f"ckpt={weights}")
    assert "source=prenas" in refused(capsys, "evaluate", f"ckpt={weights}", "source=prenas")
    weights.write_bytes(b"nonsense")
    assert "weights.pth" in refused(capsys, "evaluate", f"ckpt={weights}")
    if Path("/proc/self").exists():  # a folder in which nobody may make anything
        message = refused(capsys, "export", f"ckpt={run}", f"arch={label}", "output_dir=/proc/x")
        assert "output_dir: '/proc/x' cannot be written (" in message
    study = {"phases": [{"name": "supernet", "status": "running", "outputs": {}}]}
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert "holds no checkpoint" in refused(capsys, "evaluate", f"ckpt={tmp_path}")
    assert sorted(run.rglob("*")) == before


def test_damaged_files_of_a_run_are_named_by_every_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flip: Callable[[Path], None]
) -> None:
    """Their checksums are looked at before they are used: torch and JSON read a flipped bit without a word."""
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    checkpoint = find_checkpoint(damaged)
    kept = checkpoint.read_bytes()
    flip(checkpoint)
    # What the phase handed on: its last checkpoint holds the same, and is used with a warning.
    with pytest.warns(UserWarning, match="final.ckpt is damaged .*; epoch=.* beside it holds the same"):
        same = find_checkpoint(damaged)
    assert same.read_bytes() == kept
    flip(same)
    older = same.with_name("epoch=0000-step=0000001.ckpt")
    content = torch.load(same, weights_only=True)
    torch.save({**content, "global_step": 1}, older)
    assert "final.ckpt' is damaged: the checksum of archive" in refused(capsys, "evaluate", f"ckpt={damaged}")
    with pytest.raises(UserError, match=rf"; resume={older} does the rest of its phase again"):
        find_checkpoint(damaged)
    older.unlink()
    search = ("search.strategy=random", "search.score=snip")
    start = (f"train.from_checkpoint={checkpoint}", "recipe=quickstart", "smoke=true", f"output_dir={tmp_path}")
    for command, argv in (
        ("evaluate", ()),
        ("export", ()),
        ("score", ("recipe=quickstart", f"output_dir={tmp_path}")),
        ("search", (*search, f"output_dir={tmp_path}")),
        ("fit", start),
    ):
        given = argv if argv == start else (f"ckpt={damaged}", *argv)
        message = refused(capsys, command, *given)
        assert "final.ckpt' " in message and "is damaged: the checksum of" in message, (command, message)
        assert message.split(": ")[1] == ("train.from_checkpoint" if argv == start else "ckpt")
    label = next(iter(entries(run / "result.json")))
    for name, word, argv in (
        ("result.json", '"num_heads": ', [f"ckpt={run}", f"arch={damaged}@{label}"]),
        ("study.json", '"steps": ', [f"ckpt={damaged}"]),
    ):
        text = (damaged / name).read_text()
        digit = text.index(word) + len(word)
        (damaged / name).write_text(text[:digit] + str(9 - int(text[digit])) + text[digit + 1 :])
        assert f"{name}' is damaged, or was edited" in refused(capsys, "evaluate", *argv)


@pytest.mark.slow
def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flip: Callable[[Path], None]) -> None:
    label = list(entries(run / "result.json"))[1]
    target = tmp_path / "exported"
    assert main("export", [f"ckpt={run}", f"arch={label}", f"output_dir={target}"]) == 0
    out = capsys.readouterr().out
    assert "EMA" in out and "largest difference of a logit 0," in out
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    source = trained.load(config_from("export", [f"ckpt={run}"]))
    net = timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(net(images), source.net(images, source.archs[label]))
    described = read_json(target / "config.json")["pretrained_cfg"]
    assert described["mean"] == [0.5, 0.5, 0.5]
    # The run has no random resized crops, so nothing but what does not fit the shape was cut off.
    assert (described["crop_pct"], described["crop_mode"]) == (1.0, "center")
    assert "not empty" in refused(capsys, "export", f"ckpt={run}", f"arch={label}", f"output_dir={target}")
    # A flipped bit is named by timm's loader as by ours, although the format has no checksums.
    flip(target / "model.safetensors")
    with pytest.raises(UserError, match="state_sha256"):
        timm.create_model(f"local-dir:{target}", pretrained=True)
    assert "is damaged" in refused(capsys, "evaluate", f"ckpt={target / 'model.safetensors'}")
    # Without arch and output_dir: the most accurate network, inside the run.
    assert main("export", [f"ckpt={run}"]) == 0
    top1 = {name: entry["metrics"]["top1"] for name, entry in entries(run / "result.json").items()}
    assert (run / "exported" / max(top1, key=lambda name: top1[name]) / "config.json").exists()


@pytest.mark.slow
def test_relative_paths(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As one types them: the clean process that checks an export has another working directory."""
    monkeypatch.chdir(run.parents[1])
    label = next(iter(entries(run / "result.json")))
    given = [f"ckpt={run.relative_to(Path.cwd())}", f"arch={label}"]
    assert main("export", [*given, "output_dir=some folder/exported"]) == 0
    assert {path.name for path in Path("some folder/exported").iterdir()} == {"config.json", "model.safetensors"}
    for command in ("evaluate", "export"):
        assert "output_dir: cannot create" in refused(capsys, command, *given, "output_dir=/dev/null/x")


@pytest.mark.slow
def test_export_leaves_nothing_when_parity_fails(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = export._write

    def corrupt(folder: Path, net: Any, source: Any, data: Any) -> None:
        with torch.no_grad():
            net.head.bias[0] += 1e-3
        write(folder, net, source, data)

    monkeypatch.setattr(export, "_write", corrupt)
    label = next(iter(entries(run / "result.json")))
    with pytest.raises(RuntimeError, match=r"differ by 0\.001"):
        main("export", [f"ckpt={run}", f"arch={label}", f"output_dir={tmp_path / 'exported'}"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_retrained_network(retrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("evaluate", [f"ckpt={retrained}", f"output_dir={tmp_path}"]) == 0
    ours, theirs = entries(tmp_path / "evaluation.json"), entries(retrained / "result.json")
    assert list(ours) == list(theirs) == ["small"]
    assert ours["small"]["metrics"] == theirs["small"]["metrics"]
    assert main("export", [f"ckpt={retrained}", f"output_dir={tmp_path / 'exported'}"]) == 0
    assert "largest difference of a logit 0," in capsys.readouterr().out
    assert "not the architecture" in refused(capsys, "export", f"ckpt={retrained}", "arch=autoformer_t")


def released(net: ElasticViT) -> dict[str, torch.Tensor]:
    """The state dict of `net` under the names of the released supernets."""
    state = {}
    for name, value in net.state_dict().items():
        name = name.replace("patch_embed.", "patch_embed_super.")
        name = name.replace(".norm1.", ".attn_layer_norm.").replace(".norm2.", ".ffn_layer_norm.")
        name = name.replace(".mlp.fc", ".fc")
        name = re.sub(r"rel_pos_([kv])\.(v|h)\w+$", r"rel_pos_embed_\1.embeddings_table_\2", name)
        state[name] = value
    assert len(REFERENCE_NAMES) == 6, "the names above are the inverse of these"
    return state


@pytest.mark.parametrize("source", ["autoformer", "prenas"])
def test_a_released_checkpoint(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes come from the weights (here a supernet cut to 12 blocks, as PreNAS's are); the bias rule from `source`."""
    allocated = {"embed_dim": 256, "num_heads": 4, "mlp_ratio": 4, "depth": 12}
    space = tas.space("autoformer_tiny", depths=(12,)).with_choices(allocated=allocated)
    net = tas.supernet(space, num_classes=10, img_size=32)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.05)
    path = tmp_path / "supernet.pth"
    torch.save({"model": released(net), "args": argparse.Namespace(model="", epochs=500)}, path)
    call = [f"ckpt={path}", f"source={source}", "data.name=synthetic"]
    loaded = trained.load(config_from("evaluate", call))
    assert loaded.net.allocated == net.allocated
    net.bias_rule = {"autoformer": "autoformer", "prenas": "regroup"}[source]
    images, arch = torch.randn(2, 3, 32, 32), PUBLISHED["prenas_ti"]
    with torch.no_grad():
        assert torch.equal(loaded.net(images, arch), net.eval()(images, arch))
    target = [f"output_dir={tmp_path / 'out'}"]
    assert main("evaluate", [*call, "arch=prenas_ti", *target]) == 0
    assert read_json(tmp_path / "out" / "evaluation.json")["weights"] == "official"
    # 13 blocks do not fit into these weights.
    assert "12" in refused(capsys, "evaluate", *call, "arch=autoformer_t", *target)
    assert "autoformer_t" in refused(capsys, "evaluate", *call, "arch=autoformer_tt", *target)


@pytest.mark.slow
def test_official_names_of_all_sizes(shared: Path, tmp_path: Path) -> None:
    """The names and shapes of the real released files: each size is recognised, its published network is found."""
    for size, letter in (("tiny", "t"), ("small", "s"), ("base", "b")):
        shapes = json.loads((shared / "golden" / f"state_autoformer_{size}.json").read_text())
        path = tmp_path / f"{size}.pth"
        torch.save({"model": {name: torch.zeros(shape) for name, shape in shapes}}, path)
        loaded = trained.load(config_from("evaluate", [f"ckpt={path}", "source=autoformer"]))
        assert loaded.net.space.name == f"autoformer_{size}"
        assert loaded.net.num_classes == 1000 and loaded.net.img_size == (224, 224)
        assert list(trained.chosen(loaded, None)) == [f"autoformer_{letter}"]
        path.unlink()


@pytest.mark.slow
def test_in_a_process(run: Path, tmp_path: Path, processes: Any) -> None:
    label = next(iter(entries(run / "result.json")))
    for command in ("evaluate", "export"):
        call = ["python", "-m", f"lightning_tas.{command}", f"ckpt={run}", f"arch={label}"]
        process = processes.command(*call, f"output_dir={tmp_path / command}", fork=True)
        processes.wait([process])
        assert label in process.stdout


def test_export_is_for_one_process(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.group, "size", lambda: 2)
    assert "one process" in refused(capsys, "export", f"ckpt={run}")


def test_training_starts_from_a_run_as_from_its_checkpoint(run: Path) -> None:
    config = config_from("fit", [f"config={run}/config.yaml", f"train.from_checkpoint={run}"])
    module = build.supernet_module(config, build.data(config), read_selection(run / "selection.json"))
    trained_before = load_supernet(find_checkpoint(run)).net.state_dict()
    assert all(torch.equal(value, trained_before[name]) for name, value in module.net.state_dict().items())


def test_networks_are_not_chosen_by_images_that_their_weights_have_seen(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The split belongs to the weights, not to the command line."""
    search = [f"ckpt={run}", "search.strategy=random", "search.options={networks: 2}", "search.score=accuracy", "run=b"]
    for change in ("seed=1", "data.search_val=0.7"):
        assert "was trained on" in refused(capsys, "search", *search, change)
    scoring = [f"ckpt={run}", "bench.networks=3", "bench.proxies=[params]", "run=b"]
    assert "was trained on" in refused(capsys, "score", *scoring, "seed=1")


def test_a_name_for_a_run_is_told_to_be_ignored(run: Path) -> None:
    with pytest.warns(UserWarning, match="run is ignored: evaluate writes into the run of ckpt, or into output_dir"):
        config_from("evaluate", [f"ckpt={run}", "run=b"])
