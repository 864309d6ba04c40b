"""Every recipe: its values are the tables of the papers, it builds its real network, it plans and it runs whole.

The literals are AutoFormer's appendix and PreNAS's table 9 (appendix C), not the released scripts, which contain slips
(the script called "tiny" trains base with mixup on).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.commands import build, per_phase, recipes
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config
from lightning_tas.commands.entry import main
from lightning_tas.commands.validate import get
from lightning_tas.launch.files import read_json
from lightning_tas.launch.results import read_architectures
from lightning_tas.limits import Limits, Region

# D0: what AutoFormer, PreNAS and DeiT share.
SHARED: dict[str, Any] = {
    "data.name": "imagenet",
    "data.img_size": 224,
    "data.in_chans": None,
    "data.batch_size": 128,
    "data.leak": False,
    "data.exif": False,
    "data.crop": "rrc",
    "data.crop_scale": [0.08, 1.0],
    "data.crop_pct": 0.875,
    "data.interpolation": "bicubic",
    "data.hflip": 0.5,
    "data.color_jitter": 0.4,
    "data.reprob": 0.25,
    "data.remode": "pixel",
    "data.repeated_aug": 3,
    "data.drop_last": True,
    "data.mean": None,
    "data.std": None,
    "data.train_subset": None,
    "model.patch_size": 16,
    "model.relative_position": None,  # as the family has it: AutoFormer's networks have it and pool "avg"
    "model.abs_pos": True,
    "model.qkv_bias": True,
    "model.pool": None,
    "model.pre_norm": True,
    "model.scale": False,
    "model.bias_rule": "regroup",
    "model.drop_rate": 0.0,
    "model.attn_drop_rate": 0.0,
    "model.drop_path_rate": 0.1,
    "train.lr": 5e-4,
    "train.lr_batch": 512,
    "train.warmup_lr": 1e-6,
    "train.betas": [0.9, 0.999],
    "train.eps": 1e-8,
    "train.label_smoothing": 0.1,
    "train.mixup_prob": 1.0,
    "train.mixup_switch_prob": 0.5,
    "train.ema": False,
    "train.schedule": "epoch",
    "train.schedule_lag": False,
    "train.decay_relative_position": True,
    "train.from_checkpoint": None,
    "trainer.gradient_clip_val": None,
    "trainer.accumulate_grad_batches": 1,
    "trainer.precision": "bf16-mixed",
    "trainer.limit_train_batches": None,
    "trainer.max_steps": None,
}
# D4: the winner by DeiT's recipe, on all training images.
RETRAIN: dict[str, Any] = {
    "retrain": {"data": {"search_val": 0}, "train": {"warmup_epochs": 5}, "trainer": {"max_epochs": 300}}
}
AUTOFORMER: dict[str, Any] = {
    "phases": ["supernet", "measure", "retrain"],
    "per_phase": RETRAIN,
    "sampler.name": "uniform",
    "data.search_val": 100_000,
    "data.auto_augment": "rand-m9-mstd0.5-inc1",
    "data.recount": 1,
    "train.min_lr": 1e-5,
    "train.warmup_epochs": 20,
    "train.weight_decay": 0.05,
    "train.mixup": 0.8,
    "train.cutmix": 1.0,
    "train.mixup_mode": "batch",
    "trainer.max_epochs": 500,
}
PRENAS: dict[str, Any] = {
    "phases": ["select", "supernet", "measure"],
    "per_phase": None,
    "sampler.name": "balanced",
    "data.search_val": 0,
    "trainer.check_val_every_n_epoch": 10,
    "select.mode": "paper",
    "select.margin": 1.0,
    "select.unit": "Mparams",
    "select.low": None,
    "select.high": None,
    "select.top": 1,
    "select.loss": "logits",
    "select.images": "gaussian",
    "select.cut_supernet": True,
    "select.allocation": None,
    "select.norm": None,
    "train.min_lr": 2e-5,
    "train.warmup_epochs": 20,
    "trainer.max_epochs": 500,
}
MIXED: dict[str, Any] = {
    "train.weight_decay": 0.05,
    "train.mixup": 0.8,
    "train.cutmix": 1.0,
    "train.mixup_mode": "elem",
    "train.mixup_switch_prob": 0.5,
}
# Search C2: population, top list, generations, crossovers, mutations.
EVOLUTION: dict[str, Any] = {
    "search.strategy": "evolution",
    "search.score": "accuracy",
    "search.when": "fit_end",
    "search.options": {"population": 50, "top": 10, "generations": 20, "crossovers": 25, "mutations": 25},
}
NO_SEARCH: dict[str, Any] = {"search.strategy": None, "search.options": None, "limits.params": None}
# Search C4 and D4: 50 + 160 x 50 networks by DSS++, DeiT's recipe for the winner.
T_RAZOR: dict[str, Any] = {
    **SHARED,
    **AUTOFORMER,
    "phases": ["search", "retrain"],
    "per_phase": None,
    "data.search_val": 0,
    "train.warmup_epochs": 5,
    "trainer.max_epochs": 300,
    "search.strategy": "blockwise",
    "search.score": "dss_pp",
    "search.mode": "exact",
    "search.options": {"population": 50, "generations": 160, "mutations": 25, "crossovers": 25},
}
# Search C5: N0, n0, Nm, nm, M; the filter is NTSR.
ETAS: dict[str, Any] = {
    **SHARED,
    **AUTOFORMER,
    "phases": ["supernet", "search", "retrain"],
    "search.strategy": "etas",
    "search.score": "accuracy",
    "search.init": "default",
    "search.options": {"filter": "ntsr", "first_pool": 500, "first": 3, "pool": 100, "keep": 3, "iterations": 10},
}
FASHION: dict[str, Any] = {"data.name": "fashion_mnist", "data.img_size": None, "data.search_val": 2000}
SHORT = {"retrain": {"data": {"search_val": 0}, "trainer": {"max_epochs": 5}}}
TABLES: dict[str, dict[str, Any]] = {
    "autoformer_tiny": {
        **SHARED,
        **AUTOFORMER,
        **EVOLUTION,
        "space": "autoformer_tiny",
        "limits.params": ["5M", "6M"],
    },
    "autoformer_small": {
        **SHARED,
        **AUTOFORMER,
        **EVOLUTION,
        "space": "autoformer_small",
        "limits.params": ["13M", "23M"],
    },
    "autoformer_base": {
        **SHARED,
        **AUTOFORMER,
        **EVOLUTION,
        "space": "autoformer_base",
        "limits.params": ["42M", "54M"],
    },
    "t_razor_tiny": {**T_RAZOR, "space": "autoformer_tiny", "limits.params": ["5M", "7M"]},
    "t_razor_small": {**T_RAZOR, "space": "autoformer_small", "limits.params": ["20M", "23M"]},
    "t_razor_base": {**T_RAZOR, "space": "autoformer_base", "limits.params": ["50M", "54M"]},
    "t_razor_pit_ti": {**T_RAZOR, "space": "pit_ti", "limits.params": ["4M", "5M"]},
    "t_razor_pit_xs": {**T_RAZOR, "space": "pit_xs", "limits.params": ["9M", "10.5M"]},
    "t_razor_pit_s": {**T_RAZOR, "space": "pit_s", "limits.params": ["20M", "23M"]},
    "tf_tas_tiny": {
        **T_RAZOR,
        "space": "autoformer_tiny",
        "search.strategy": "random",
        "search.score": "dss",
        "search.options": {"networks": 8000},
    },
    "etas_tiny": {**ETAS, "space": "autoformer_tiny", "limits.params": [None, "6M"]},
    "etas_small": {**ETAS, "space": "autoformer_small", "limits.params": [None, "30M"]},
    "etas_base": {**ETAS, "space": "autoformer_base", "limits.params": None},
    "autoformer_fashion_mnist": {
        **FASHION,
        "phases": ["supernet", "measure", "retrain"],
        "per_phase": SHORT,
        "search.strategy": "evolution",
        "trainer.max_epochs": 8,
    },
    "etas_fashion_mnist": {
        **FASHION,
        "phases": ["supernet", "search", "retrain"],
        "per_phase": SHORT,
        "search.strategy": "etas",
        "trainer.max_epochs": 8,
    },
    "t_razor_fashion_mnist": {
        **FASHION,
        "data.search_val": 0,
        "phases": ["search", "retrain"],
        "per_phase": None,
        "search.strategy": "blockwise",
        "trainer.max_epochs": 10,
    },
    "prenas_tiny": {
        **SHARED,
        **PRENAS,
        **NO_SEARCH,
        "space": "autoformer_tiny",
        "data.auto_augment": "rand-m9-n2-mstd0.5-inc1",
        "data.recount": 1,
        "train.weight_decay": 0.02,
        "train.mixup": 0.0,
        "train.cutmix": 0.0,
    },
    "prenas_small": {
        **SHARED,
        **PRENAS,
        **MIXED,
        "space": "autoformer_small",
        "data.auto_augment": "v0r-mstd0.5",
        "data.recount": 1,
    },
    "prenas_base": {
        **SHARED,
        **PRENAS,
        **MIXED,
        "space": "autoformer_base",
        "data.auto_augment": "rand-m10-n3-mstd0.5-inc1",
        "data.recount": 2,
    },
    "retrain": {
        **SHARED,
        **AUTOFORMER,
        **NO_SEARCH,
        "data.search_val": 0,
        "phases": ["retrain"],
        "per_phase": None,
        "space": None,
        "train.warmup_epochs": 5,
        "trainer.max_epochs": 300,
    },
    "quickstart": {
        "phases": ["select", "supernet", "measure"],
        "data.name": "digits",
        "data.root": None,
        "data.img_size": None,
        "model.patch_size": 4,
        "sampler.name": "balanced",
    },
    "prenas_fashion_mnist": {
        "phases": ["select", "supernet", "measure"],
        "data.name": "fashion_mnist",
        "data.img_size": None,
        "sampler.name": "balanced",
    },
}
# A1: choices, allocation (embed, heads, ratio, depth), exact sizes.
SPACES: dict[str, tuple[list[int], list[int], list[int], list[float], tuple[int, int, int, int], int]] = {
    "autoformer_tiny": ([192, 216, 240], [12, 13, 14], [3, 4], [3.5, 4], (256, 4, 4, 14), 1_056_964_608),
    "autoformer_small": (
        [320, 384, 448],
        [12, 13, 14],
        [5, 6, 7],
        [3, 3.5, 4],
        (448, 7, 4, 14),
        3 * (9**12 + 9**13 + 9**14),
    ),
    "autoformer_base": (
        [528, 576, 624],
        [14, 15, 16],
        [9, 10],
        [3, 3.5, 4],
        (640, 10, 4, 16),
        3 * (6**14 + 6**15 + 6**16),
    ),
}
ARCH = {"retrain": ["arch=prenas_ti"]}
BENCHES = ("vit_bench_autoformer", "vit_bench_imagenet", "vit_bench_pit")


def config_of(name: str, *argv: str) -> Config:
    return config_from("fit", [f"recipe={name}", *ARCH.get(name, []), *argv])


def test_every_recipe_is_tested() -> None:
    """Those of the score command are tested with it: they train nothing."""
    assert {*TABLES, *BENCHES} == set(recipes.packaged())


@pytest.mark.parametrize("name", TABLES)
def test_values(name: str) -> None:
    config = config_of(name)
    assert {key: get(config, key) for key in TABLES[name]} == TABLES[name]


@pytest.mark.parametrize("name", [name for name in TABLES if TABLES[name]["data.name"] == "imagenet"])
def test_published_batch_and_rate(name: str) -> None:
    """8 processes of 128 images make the published global batch of 1024, at which the rate is 1e-3."""
    config = config_of(name, "trainer.devices=8")
    assert build.global_batch(config) == 1024
    assert config.train.lr_batch is not None
    assert config.train.lr * 1024 / config.train.lr_batch == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("name", "phase", "steps"),
    [("prenas_tiny", "supernet", 1251), ("t_razor_base", "retrain", 1251), ("tf_tas_tiny", "retrain", 1251),
     ("retrain", "retrain", 1251), ("autoformer_tiny", "retrain", 1251), ("etas_tiny", "supernet", 1153),
     ("autoformer_small", "supernet", 1153)],
)  # fmt: skip
def test_steps_of_an_epoch_are_the_published_ones(name: str, phase: str, steps: int) -> None:
    """DeiT's where nothing is chosen by images; 100,000 images fewer where a search chooses by them."""
    assert build.data(per_phase.configs(config_of(name))[phase]).steps_per_epoch(8) == steps
    if steps == 1153:
        leaky = per_phase.configs(config_of(name, "data.leak=true"))[phase]
        assert build.data(leaky).steps_per_epoch(8) == 1251


@pytest.mark.parametrize("name", SPACES)
def test_spaces(name: str) -> None:
    embed, depth, heads, ratio, allocated, size = SPACES[name]
    space = build.space(config_of(name.replace("autoformer", "prenas")))
    for key, choices in (("embed_dim", embed), ("depth", depth), ("num_heads", heads), ("mlp_ratio", ratio)):
        assert list(space.choices(key)) == choices
    assert tuple(space.allocated[key] for key in ("embed_dim", "num_heads", "mlp_ratio", "depth")) == allocated
    assert space.size() == size


@pytest.mark.parametrize("name", [*TABLES, *BENCHES])
def test_description_is_one_line(name: str) -> None:
    file = recipes.packaged()[name].read_text(encoding="utf-8")
    assert file.startswith("# ") and 20 < len(recipes.description(name)) < 120


@pytest.mark.parametrize("name", TABLES)
def test_description_says_the_limits_that_are_set(name: str) -> None:
    """A range of parameters is that of the search's limits, else that of the space, all of which is selected from."""
    said = recipes.description(name)
    config = config_of(name)
    limits, rounded = Limits.read({"params": config.limits.params}).bounds.get("params", (-math.inf, math.inf)), 0.0
    if found := re.search(r"([\d.]+)-([\d.]+) M\b", said):
        if config.search.strategy is None:
            with torch.device("meta"):
                net = build.make_supernet(build.space(config), **build.network_options(config, build.data(config)))
            limits, rounded = Region(net.space, None, net).ranges()["params"], 0.03
        assert [1e6 * float(word) for word in found.groups()] == pytest.approx(limits, rel=rounded, abs=0.0)
    elif found := re.search(r"up to ([\d.]+) M\b", said):
        assert limits == (-math.inf, float(found[1]) * 1e6)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "retrain"])
def test_builds_its_real_network_on_the_meta_device(name: str) -> None:
    """Full size, without memory: the supernet holds the smallest and the largest architecture of its space."""
    config = config_of(name)
    data = build.data(config)
    with torch.device("meta"):
        net = build.make_supernet(build.space(config), **build.network_options(config, data))
        for arch in (net.space.smallest(), net.space.largest()):
            x = torch.empty(2, data.in_chans, *data.img_size)
            assert net(x, arch).shape == (2, data.num_classes)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_plan(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Sizes, preferred architectures, epochs, steps, MACs, memory; nothing written. Two images select fast."""
    few = ["select.batch_size=2", "select.micro_batch=1", f"output_dir={tmp_path}"]
    if TABLES[name]["data.name"] == "fashion_mnist":
        few.append("data.name=synthetic")  # its files are not on every machine
        few += ["data.img_size=28", "data.in_chans=1", "data.search_val=0.1"]
    assert main("fit", [f"recipe={name}", "plan=true", *ARCH.get(name, []), *few]) == 0
    out = capsys.readouterr().out
    for word in ("params [M]" if name != "retrain" else "M params", "MACs", "epochs", "steps", "memory"):
        assert word in out
    assert ("preferred architectures" in out) == ("select" in TABLES[name]["phases"])
    assert ("networks within the limits" in out) == (TABLES[name].get("search.strategy") is not None)
    phases = config_of(name).phases
    assert [f"phase {i}/{len(phases)}: {phase}" in out for i, phase in enumerate(phases, 1)] == [True] * len(phases)
    assert list(tmp_path.iterdir()) == []


def smoke(name: str, folder: Path, *argv: str) -> dict[str, Any]:
    """Run a recipe whole under smoke=true; its result.json, checked."""
    call = [f"recipe={name}", "smoke=true", f"output_dir={folder}", "run=a", *ARCH.get(name, []), *argv]
    assert main("fit", call) == 0
    run = folder / name / "a"
    result: dict[str, Any] = read_json(run / "result.json")
    assert result["recipe"] == name
    assert all(0 <= entry["metrics"]["top1"] <= 100 for entry in result["architectures"])
    assert all(phase["status"] == "finished" for phase in read_json(run / "study.json")["phases"])
    assert (run / "metrics.csv").read_text().startswith("phase,")
    if "select" in TABLES[name]["phases"]:
        assert list(read_architectures(run / "selection.json")) == [e["label"] for e in result["architectures"]]
    if TABLES[name].get("search.strategy") is not None:
        assert read_architectures(run / "search.json")["best"].to_dict() == result["architectures"][0]["arch"]
    return result


def test_smoke_quickstart(tmp_path: Path) -> None:
    assert len(smoke("quickstart", tmp_path)["architectures"]) >= 2


# Under smoke=true networks, data and budgets of all sizes of a recipe are the same: one of them, and each that differs
# in more than size. `test_smoke_is_the_same_for_all_sizes` holds what is left out to that.
SIZES = {
    "autoformer_tiny": ("autoformer_small", "autoformer_base"),
    "t_razor_tiny": ("t_razor_small", "t_razor_base"),
    "t_razor_pit_ti": ("t_razor_pit_xs", "t_razor_pit_s"),
    "etas_tiny": ("etas_small", "etas_base"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLES.keys() - {"quickstart"} - {size for s in SIZES.values() for size in s}))
def test_smoke(name: str, tmp_path: Path) -> None:
    smoke(name, tmp_path)


@pytest.mark.parametrize("name", SIZES)
def test_smoke_is_the_same_for_all_sizes(name: str) -> None:
    def made(size: str) -> dict[str, Any]:
        found = asdict(config_of(size, "smoke=true"))
        return {key: value for key, value in found.items() if key not in ("recipe", "space")}

    assert all(made(size) == made(name) for size in SIZES[name])
