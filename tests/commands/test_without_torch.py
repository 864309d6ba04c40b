"""What the text of a command line tells is told without importing torch, which alone takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_tas.commands import recipes, schema
from lightning_tas.commands.help import ABOUT

CHILD = """
import contextlib, io, json, runpy, sys
for name in ("torch", "pytorch_lightning", "timm", "torchvision", "torchmetrics", "scipy", "matplotlib", "wandb"):
    sys.modules[name] = None  # to import it is an error from here on
told = []
for command, arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    sys.argv[1:] = arguments
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module(f"lightning_tas.{command}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        told.append((end.code, out.getvalue(), err.getvalue()))
    except BaseException as error:
        told.append((1, "", f"{type(error).__name__}: {error}"))
json.dump(told, sys.stdout)
"""
TYPOS: dict[tuple[str, ...], str] = {
    **{(command, "sed=1"): "sed: no such key" for command in ABOUT},
    ("fit", "recipe=quickstart", "run=../../x"): "run: '../../x' is not a folder name",
    ("fit", "recipe=quickstart", "checkpoint.keep_last=0"): "valid: 1, 2, ... or -1 (keep all)",
    ("fit", "recipe=quickstart", "resume=nothere"): "resume: 'nothere' does not exist",
    ("score", "recipe=vit_bench_pit", "bench=nothere.json"): "bench: 'nothere.json' does not exist",
    ("fit", "recipe=quickstart", "plan"): "did you mean 'plan=true'?",
    ("fit", "recipe=quickstrat"): "Did you mean 'quickstart'?",
    ("fit", "recipe=empty.yaml"): "empty.yaml holds no settings",
    ("fit", "-m", "recipe=quickstart", "seed=1,2", "run=../x"): "run: '../x-00' is not a folder name",
    ("fit", "recipe=etas_tiny", "search.strategy=evolutoin"): "Did you mean 'evolution'?",
    ("fit", "recipe=t_razor_tiny", "search.score=dsp"): "search.score: 'dsp' is not valid",
    ("fit", "recipe=t_razor_tiny", "search.options.populatoin=3"): "Did you mean 'population'?",
    (
        "fit",
        "recipe=t_razor_tiny",
        "search.options.population=x",
    ): "'x' is not valid; valid: a whole number of at least 1",
    ("fit", "recipe=etas_tiny", "search.options.filter=ntr"): "'ntr' is not valid",
    ("search", "recipe=quickstart"): "search.strategy: recipe 'quickstart' names none",
    ("search", "recipe=t_razor_tiny", "search.proxy_options={dss:{mod:paper}}"): "Did you mean 'mode'?",
    ("search", "recipe=t_razor_tiny", "search.options.guide=te_nas"): "has no numbers per block",
    ("search", "recipe=t_razor_tiny", "search.init=nrmal"): "Did you mean 'normal'?",
    ("search", "recipe=t_razor_tiny", "search.strategy=exact", "search.score=dss_pp"): "exact search takes snip",
    (
        "search",
        "recipe=t_razor_tiny",
        "search.score=zen",
        "search.mode=inherited",
    ): "has no tables of inherited weights",
    ("search", "recipe=t_razor_tiny", "search.score=accuracy"): "'accuracy' is of trained weights",
    ("search", "recipe=t_razor_tiny", "limits.params=[7M,5M]"): "limits.params: the lower bound, 7M, exceeds",
    ("fit", "recipe=quickstart", "sampler.name=sandwch"): "Did you mean 'sandwich'?",
    ("fit", "recipe=quickstart", "data.name=digit"): "Did you mean 'digits'?",
    ("fit", "recipe=quickstart", "space=autoformer_tinny"): "Did you mean 'autoformer_tiny'?",
    ("fit", "recipe=quickstart", "space={embed_dim:[64],depht:[2]}"): "space: 'depht' is not valid",
    (
        "fit",
        "recipe=quickstart",
        "space={family:pitt,embed_dim:[64],depth:[2],num_heads:[1],mlp_ratio:[1]}",
    ): "space.family",
    ("fit", "recipe=quickstart", "scoring.proxies=[snap]"): "Did you mean 'snip'?",
    ("fit", "recipe=quickstart", "scoring.proxies=[zen]", "scoring.options={zen:{repeat:0}}"): "repeat of zen: 0",
    ("fit", "recipe=quickstart", "phases=[measure]"): "the phase 'measure' needs a trained supernet",
    ("fit", "recipe=retrain", "arch=autoformer_x"): "arch: 'autoformer_x' is neither",
    ("fit", "recipe=retrain"): "arch: give the architecture to train",
    ("score", "recipe=vit_bench_pit", "bench.proxies=[snap]"): "bench.proxies: 'snap' is not valid",
    ("score", "recipe=vit_bench_pit", "bench.options={dss:{mode:papr}}"): "Did you mean 'paper'?",
    ("score", "recipe=vit_bench_pit", "bench=empty.yaml", "bench.family=pitt"): "Did you mean 'pit'?",
    ("score", "recipe=vit_bench_pit", "bench.init=nrmal"): "bench.init: 'nrmal' is not valid",
    ("evaluate", "ckpt=nowhere"): "ckpt: 'nowhere' does not exist",
}


class Told(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Told]:
    """Every typo and every help, as `python -m` runs them, in one process that cannot import torch."""
    folder: Path = tmp_path_factory.mktemp("typos")
    (folder / "empty.yaml").write_text("# nothing yet\n")
    calls = [*TYPOS, *((command, "--help") for command in ABOUT)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=folder,
        input=json.dumps([(command, arguments) for command, *arguments in calls]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["empty.yaml"]
    return {call: Told(*one) for call, one in zip(calls, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("typo", TYPOS, ids=" ".join)
def test_a_typo(typo: tuple[str, ...], told: dict[tuple[str, ...], Told]) -> None:
    status, out, err = told[typo]
    assert (status, out) == (2, ""), err
    assert err.startswith(f"lightning_tas.{typo[0]}: ") and err.count("\n") == 1 and TYPOS[typo] in err


@pytest.mark.parametrize("command", ABOUT)
def test_help(command: str, told: dict[tuple[str, ...], Told]) -> None:
    """Lists every recipe and every key."""
    status, out, err = told[command, "--help"]
    assert status == 0 and f"python -m lightning_tas.{command}" in out, err
    flat = " ".join(out.split())
    for name in recipes.packaged():
        assert recipes.description(name) in flat
    for key in schema.all_keys():
        assert f" {key}=" in out
