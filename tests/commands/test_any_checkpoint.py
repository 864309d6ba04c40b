"""Any checkpoint that one command reads, every command reads: released supernets, timm's ViTs, plain state dicts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

import lightning_tas as tas
from lightning_tas.commands import build, checks, trained
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config
from lightning_tas.commands.entry import main
from lightning_tas.commands.validate import _CHOICES
from lightning_tas.supernets import model_config
from lightning_tas.supernets.checkpoints import REFERENCE_NAMES, SOURCES

SPACE: dict[str, Any] = {
    "name": "mine",
    "embed_dim": [64, 128],
    "depth": [2, 3],
    "num_heads": [1, 2],
    "mlp_ratio": [1, 2],
}
ARCH = {"layer_num": 2, "embed_dim": 64, "num_heads": [1, 2], "mlp_ratio": [1, 2]}
FACTS = [
    "data.name=synthetic",
    "data.search_val=0.1",
    "data.img_size=16",
    "data.num_classes=10",
    "data.class_names=ignore",
]
BUILD: dict[str, Any] = {"num_classes": 10, "img_size": 16, "patch_size": 4}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("space.json").write_text(json.dumps(SPACE))
    Path("arch.json").write_text(json.dumps(ARCH))
    return tmp_path


def random(net: Any) -> Any:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.05)
    return net.eval()


def released(net: Any) -> dict[str, torch.Tensor]:
    """The state dict of `net` under the names of the released supernets."""
    state = {}
    for name, value in net.state_dict().items():
        name = name.replace("patch_embed.", "patch_embed_super.")
        name = name.replace(".norm1.", ".attn_layer_norm.").replace(".norm2.", ".ffn_layer_norm.")
        name = name.replace(".mlp.fc", ".fc")
        state[re.sub(r"rel_pos_([kv])\.(v|h)\w+$", r"rel_pos_embed_\1.embeddings_table_\2", name)] = value
    assert len(REFERENCE_NAMES) == 6, "the names above are the inverse of these"
    return state


@pytest.fixture
def teacher(files: Path) -> Any:
    """A released supernet: in the file ``super.pth``, the averaged weights beside weights of zero, compiled."""
    net = random(tas.supernet(SPACE, **BUILD, bias_rule="autoformer"))
    state = {f"module._orig_mod.{name}": value for name, value in released(net).items()}
    torch.save({"model": {k: torch.zeros_like(v) for k, v in state.items()}, "model_ema": state}, "super.pth")
    return net


def fit(*argv: str, recipe: str = "quickstart") -> Config:
    """The configuration of a fit of the small space."""
    return config_from("fit", [f"recipe={recipe}", "model.patch_size=4", *FACTS, *argv])


def same(net: Any, other: Any) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())


def told(command: str, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message of a command that refuses."""
    capsys.readouterr()
    assert main(command, list(argv)) == 2
    err = capsys.readouterr().err.splitlines()
    assert len([line for line in err if line.startswith("lightning_tas.")]) == 1
    return err[-1]


def test_sources_are_those_of_the_registry() -> None:
    assert _CHOICES["source"] == tuple(SOURCES)


def test_a_released_supernet_in_every_command(teacher: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arch = tas.Architecture.from_dict(ARCH)
    cut = teacher.subnet(arch)
    given = ["source=autoformer", "space=space.json"]
    uniform = [*given, "sampler.name=uniform", "phases=[supernet,measure]"]
    checks.check_weights(fit("train.from_checkpoint=super.pth", "plan=true", *uniform))
    config = fit("train.from_checkpoint=super.pth", *uniform)
    assert "weights 'model_ema' of 'model', 'model_ema'" in capsys.readouterr().out
    module = build.supernet_module(config, build.data(config))
    assert same(module.net, teacher) and module.net.bias_rule == "autoformer"
    # evaluate, export, search and score read `load`, measure `supernet`.
    source = trained.load(config_from("evaluate", ["ckpt=super.pth", *given, *FACTS]))
    assert same(source.net, teacher) and source.net.img_size == (16, 16)
    assert same(
        trained.supernet(fit("ckpt=super.pth", *given, "phases=[measure]", "sampler.name=uniform")).net, teacher
    )
    for key in ("ckpt", "train.from_checkpoint"):
        alone = fit(f"{key}=super.pth", "source=autoformer", "arch=arch.json", recipe="retrain")
        checks.check_weights(alone)
        net = build.retrain_module(alone, build.data(alone), arch).net
        assert same(net, cut) and torch.equal(net.eval()(torch.ones(1, 3, 16, 16)), cut(torch.ones(1, 3, 16, 16)))
    live = build.supernet(fit("train.from_checkpoint=super.pth", "weights=model", *uniform), build.data(config))
    assert not live.head.weight.any()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["source=autoformer", "model.relative_position=false"], "set model.relative_position=true"),
        (["source=autoformer", "model.patch_size=8"], "patch_size is 4 in the checkpoint .* set model.patch_size=4"),
        (["source=autoformer", "space.depth=[2]"], "depth is 3 in the checkpoint and 2 in the network"),
        ([], "set source=autoformer or source=prenas"),
        (["source=autoprox"], "source: 'autoprox' has weights of stand-alone networks"),
        (["source=autoformer", "weights=model_emma"], "Did you mean 'model_ema'"),
    ],
)
def test_the_plan_and_the_run_name_the_option_that_differs(
    argv: list[str], message: str, teacher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    space = "space={embed_dim: [64, 128], depth: [2, 3], num_heads: [1, 2], mlp_ratio: [1, 2]}"
    call = ["recipe=quickstart", space, "phases=[supernet]", "sampler.name=uniform", "model.patch_size=4", *FACTS]
    call = [one for one in call if one.partition("=")[0] not in {one.partition("=")[0] for one in argv}]
    call += ["train.from_checkpoint=super.pth", *argv]
    before = sorted(Path().iterdir())
    plan, run = (told("fit", capsys, *call, f"plan={plan}") for plan in ("true", "false"))
    assert plan == run and re.search(message, plan), plan
    assert sorted(Path().iterdir()) == before


def test_a_vit_of_timm_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Into a stand-alone network, and into a supernet of its size, with the logits of timm's own."""
    size = {"embed_dim": 128, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    vit = random(timm.models.VisionTransformer(img_size=16, patch_size=4, num_classes=10, **size))
    torch.save(vit.state_dict(), "vit.pth")
    arch = {"depth": 2, "hidden_dim": 128, "num_heads": [2, 2], "mlp_ratio": [2, 2]}
    Path("vit.json").write_text(json.dumps(arch))
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        want = vit(x)
        source = trained.load(config_from("evaluate", ["ckpt=vit.pth", "source=timm", *FACTS]))
        assert source.alone and source.archs["network"] == tas.Architecture.from_dict(arch)
        torch.testing.assert_close(source.net(x), want)
        given = ["arch=vit.json", "model.pool=token"]
        for key in ("ckpt", "train.from_checkpoint"):
            config = fit(f"{key}=vit.pth", "source=timm", *given, recipe="retrain")
            checks.check_weights(config)
            net = build.retrain_module(config, build.data(config), tas.Architecture.from_dict(arch)).net
            torch.testing.assert_close(net.eval()(x), want)
        space = "space={family: autoprox_vit, embed_dim: [64, 128], depth: [2], num_heads: [2], mlp_ratio: [1, 2]}"
        config = fit(
            "train.from_checkpoint=vit.pth",
            "source=timm",
            "model.pool=token",
            space,
            "sampler.name=uniform",
            "phases=[supernet]",
        )
        net = build.supernet(config, build.data(config)).eval()
        torch.testing.assert_close(net(x, net.space.largest()), want)
        found = trained.supernet(
            config_from(
                "search", ["recipe=quickstart", "ckpt=vit.pth", "source=timm", space, *FACTS, "search.strategy=random"]
            )
        )
        torch.testing.assert_close(found.net(x, found.net.space.largest()), want)
    with pytest.raises(tas.UserError, match=r"set model.pool=token"):
        checks.check_weights(fit("ckpt=vit.pth", "source=timm", "arch=vit.json", recipe="retrain"))
    with pytest.warns(UserWarning, match="set source=timm and model.pool=token"):
        checks.check_weights(fit("ckpt=vit.pth", "arch=vit.json", recipe="retrain"))
    assert "give arch=FILE" in told("evaluate", capsys, "ckpt=vit.pth", *FACTS)
    assert "one network alone" in told(
        "search", capsys, "ckpt=vit.pth", "source=timm", "search.strategy=random", *FACTS
    )


def test_a_pit_of_timm() -> None:
    with torch.no_grad():
        pit = timm.create_model("pit_ti_224", num_classes=10).eval()
        torch.save(pit.state_dict(), "pit.pth")
        argv = ["ckpt=pit.pth", "source=timm", "arch=pit_ti", "data.name=synthetic", "data.num_classes=10"]
        x = torch.randn(1, 3, 224, 224)
        torch.testing.assert_close(trained.load(config_from("evaluate", argv)).net(x), pit(x))


def test_a_network_alone_becomes_the_largest_of_a_supernet(files: Path) -> None:
    """Rows of queries, keys and values alternate in a supernet and follow one another in a network alone."""
    space = tas.space(SPACE)
    alone = random(tas.network(space.largest(), **BUILD))
    saved = {"kind": "network", "model": alone.options, "arch": alone.arch.to_dict(), "class_names": None}
    torch.save(
        {"state_dict": {f"net.{k}": v for k, v in alone.state_dict().items()}, "lightning_tas": saved}, "own.ckpt"
    )
    config = fit("train.from_checkpoint=own.ckpt", "space=space.json", "sampler.name=uniform", "phases=[supernet]")
    net = build.supernet(config, build.data(config)).eval()
    assert torch.equal(net(torch.ones(1, 3, 16, 16), space.largest()), alone(torch.ones(1, 3, 16, 16)))
    with pytest.raises(tas.UserError, match=r"is of the network .*, not of"):
        checks.check_weights(fit("train.from_checkpoint=own.ckpt", "arch=arch.json", recipe="retrain"))


def test_an_exported_network_in_every_command() -> None:
    net = random(tas.network(ARCH, **BUILD, pool="token"))
    Path("out").mkdir()
    safetensors.torch.save_file(net.state_dict(), "out/model.safetensors")
    Path("out/config.json").write_text(json.dumps({**model_config(net, label_names=["a"] * 10), "weights": "ema"}))
    for name in ("out", "out/model.safetensors"):
        found = trained.load(config_from("evaluate", [f"ckpt={name}", *FACTS]))
        assert found.alone and same(found.net, net) and found.net.options == net.options
        assert (found.weights, found.class_names) == ("ema", ["a"] * 10)
        config = fit(f"train.from_checkpoint={name}", "arch=arch.json", "model.pool=token", recipe="retrain")
        checks.check_weights(config)
        assert same(build.retrain_module(config, build.data(config), net.arch).net, net)


def test_options_that_no_shape_tells_are_named(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(pool="token")
    config = fit(f"train.from_checkpoint={path}", "space=space.json", "sampler.name=uniform", "phases=[supernet]")
    with pytest.warns(UserWarning, match="model.pool=token, this one avg: set model.pool=token"):
        checks.check_weights(config)


@pytest.fixture
def make_checkpoint(files: Path) -> Callable[..., Path]:
    """Our own checkpoint of an untrained supernet."""

    def make(**options: Any) -> Path:
        net = tas.supernet(SPACE, **{**BUILD, **options})
        saved = {"kind": "supernet", "model": net.options, "space": net.space.to_dict(), "class_names": None}
        state = {f"net.{name}": value for name, value in net.state_dict().items()}
        torch.save({"state_dict": state, "lightning_tas": saved}, "own.ckpt")
        return files / "own.ckpt"

    return make
