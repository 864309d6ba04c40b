"""ProxyScoring in a plain Trainer: what it measures, that training does not notice, kill and resume, refusals."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_tas.callbacks import ProxyScoring, proxy_scoring
from lightning_tas.callbacks.proxy_scoring import draw, private_twin
from lightning_tas.commands.config import CheckpointConfig, Config
from lightning_tas.commands.validate import validate
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.launch.checkpoints import RunCheckpoints, newest_whole
from lightning_tas.launch.metrics import RowBeforeCheckpoint, RunMetrics
from lightning_tas.proxies import Probe, registry, score_one
from lightning_tas.training.retrain import RetrainModule

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import small
from scoring_trace import Kill, Killed, Trace, same

PROXIES = ["snip", "grad_norm"]
RECIPE = {"ema": True, "ema_decay": 0.5, "mixup": 0.2}


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Drawing takes most of the time here: it is done by one test only, the others note what would be drawn."""
    drawn: list[Path] = []
    monkeypatch.setattr(proxy_scoring, "scoring_scatter", lambda *args: args)
    monkeypatch.setattr(proxy_scoring, "save_figure", lambda figure, path: drawn.append(path))
    return drawn


def fit(
    folder: Path, *callbacks: pl.Callback, resume: Path | None = None, restored: int | None = None, epochs: int = 3,
    train: dict[str, Any] | None = None, **options: Any,
) -> pl.Trainer:  # fmt: skip
    """Train as the fit command does, four updates an epoch, with its metrics and checkpoints."""
    module = small.make_module(small.make_net(drop_path_rate=0.2), **(train or {}))
    metrics = RunMetrics(folder / "metrics.csv", "supernet", restored)
    trainer = pl.Trainer(**{
        "accelerator": "cpu", "devices": 1, "logger": [metrics], "enable_progress_bar": False, "max_epochs": epochs,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
        "callbacks": [
            *callbacks, *module.callbacks(), RowBeforeCheckpoint(metrics, 1),
            RunCheckpoints(folder / "checkpoints", CheckpointConfig(keep_last=-1)),
        ],
        **options,
    })  # fmt: skip
    ckpt = str(resume) if resume is not None else None
    trainer.fit(module, small.loader(0, 1), small.loader(0, 1), ckpt_path=ckpt, weights_only=True)
    return trainer


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(folder: Path, step: int) -> dict[str, Any]:
    (path,) = (folder / "checkpoints").glob(f"*-step={step:07d}.ckpt")
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


# --- training does not notice -----------------------------------------------------------------------------------------


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """With averaging, mixing, drop path: losses, sub-networks, random states, modes, gradients, checkpoints, rows."""
    without, with_ = Trace(), Trace()
    fit(tmp_path / "without", without, train=RECIPE)
    fit(tmp_path / "with", with_, ProxyScoring(PROXIES, 5), train=RECIPE)
    assert len(without.steps) == 12 and len({step["loss"] for step in without.steps}) == 12
    same(with_.steps, without.steps)
    same(with_.epochs, without.epochs)
    for step in (4, 8, 12):
        got, want = (checkpoint(tmp_path / name, step) for name in ("with", "without"))
        assert [key for key in got["callbacks"] if key.startswith("ProxyScoring")]
        got["callbacks"] = {key: v for key, v in got["callbacks"].items() if not key.startswith("ProxyScoring")}
        same(got, want)
    got, want = (lines(tmp_path / name / "metrics.csv") for name in ("with", "without"))
    assert any(row["score/snip/current"] for row in got)
    trained = [row for row in got if not row["score/top1"]]
    assert [{key: row[key] for key in want[0]} for row in trained] == want


def test_the_copy_shares_nothing_with_the_supernet() -> None:
    net = small.make_net(torch.bfloat16, drop_path_rate=0.5)
    net.register_forward_hook(lambda *args: pytest.fail("the supernet's hooks are its owner's"))
    twin = private_twin(net, torch.device("cpu"))
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert net.training and not twin.training
    for (name, p), (twin_name, q) in zip(net.named_parameters(), twin.named_parameters(), strict=True):
        assert name == twin_name and q.dtype == torch.float32 and torch.equal(p.float(), q)
        assert q.untyped_storage().data_ptr() not in own
    twin(torch.zeros(1, 1, 8, 8), small.candidates()[0])


# --- what is measured -------------------------------------------------------------------------------------------------


def naive_tau(x: list[float], y: list[float]) -> float:
    """Kendall's tau-b, pair by pair."""
    pairs = list(itertools.combinations(range(len(x)), 2))
    total = sum(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs)
    untied = [sum(values[i] != values[j] for i, j in pairs) for values in (x, y)]
    return float(total / math.sqrt(untied[0] * untied[1]))


@torch.no_grad()
def naive_top1(alone: nn.Module, batches: int) -> float:
    hits = total = 0
    for images, targets in itertools.islice(small.loader(0, 1), batches):
        hits += int((alone.eval()(images).argmax(dim=-1) == targets).sum())
        total += len(targets)
    return 100 * hits / total


def test_scores_accuracies_and_correlations_are_those_of_the_live_weights(tmp_path: Path, pictures: list[Path]) -> None:
    """Although validation and `final` use the averaged ones; before the first step those of the initial weights."""
    scoring = ProxyScoring(["macs", *PROXIES], 6, batch_size=4, eval_batches=3)
    fit(tmp_path, scoring, train={"ema": True, "ema_decay": 0.9, "lr": 1e-2})
    archs = draw(small.make_net(), 6, seed=0)
    assert list(json.loads((tmp_path / "scoring.json").read_text())["networks"]) == [arch.id for arch in archs]
    rows, metrics = lines(tmp_path / "scoring.csv"), lines(tmp_path / "metrics.csv")
    assert len(rows) == 4 * 2 * 6 and pictures == [tmp_path / "scoring.png"] * 4
    initial = small.make_net()
    for epoch in (0, 1, 3):
        live = small.make_net()
        if epoch:
            saved = checkpoint(tmp_path, 4 * epoch)
            assert saved["ema_state"]
            live.load_state_dict({key.removeprefix("net."): value for key, value in saved["state_dict"].items()})
        found = {(row["network"], row["proxy"]): row for row in rows if row["epoch"] == str(epoch)}
        assert len(found) == 12
        top1, columns = [], {f"{name}/{when}": [] for name in PROXIES for when in ("initial", "current")}
        for arch in archs:
            top1.append(naive_top1(live.subnet(arch), 3))
            for name in PROXIES:
                row = found[arch.id, name]
                for when, net in (("initial", initial), ("current", live)):
                    score = score_one(name, net, arch, seed=0, batch_size=4)
                    assert float(row[when]) == score.value
                    columns[f"{name}/{when}"].append(score.value)
                assert float(row["top1"]) == pytest.approx(top1[-1], abs=1e-9) and row["step"] == str(4 * epoch)
                assert (int(row["params"]), int(row["macs"])) == tuple(cost(arch, live)) and row["reason"] == ""
        columns |= {key: [float(getattr(cost(arch, live), key)) for arch in archs] for key in ("params", "macs")}
        step = str(max(4 * epoch - 1, 0))
        (logged,) = (row for row in metrics if row["step"] == step and row["score/top1"])
        assert float(logged["score/top1"]) == pytest.approx(np.mean(top1))
        for name, values in columns.items():
            assert float(logged[f"score/{name}"]) == pytest.approx(naive_tau(values, top1), abs=1e-12), name
    changed = [row for row in rows if row["epoch"] == "3" and row["initial"] != row["current"]]
    assert len(changed) == 12
    system = lines(tmp_path / "system.csv")
    assert all(float(row["system/scoring_seconds"]) > 0 for row in system) and len(system) == 4


def test_what_has_no_order_has_no_correlation(tmp_path: Path) -> None:
    """Not a NaN, nor the word None in a file of numbers."""
    (alike,) = small.candidates()[:1]
    other = small.space().largest()
    fit(tmp_path, ProxyScoring("snip", [alike, other, alike]), epochs=1, limit_val_batches=1)
    assert len(lines(tmp_path / "scoring.csv")) == 2 * 2
    for row in lines(tmp_path / "metrics.csv"):
        assert all(math.isfinite(float(value)) for key, value in row.items() if value and key.startswith("score/"))


def test_the_scatter_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, enable_model_summary=False, callbacks=[ProxyScoring(PROXIES, 4)],
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(small.make_module(small.make_net()), small.loader(0, 1), small.loader(0, 1))
    assert (tmp_path / "scoring.png").read_bytes().startswith(b"\x89PNG")
    assert {row["epoch"] for row in lines(tmp_path / "scoring.csv")} == {"0", "1"}


@pytest.mark.parametrize(
    ("every", "options", "epochs"),
    [
        (2, {"epochs": 5}, ["0", "2", "4", "5"]),
        (3, {"epochs": 9, "max_steps": 6}, ["0", "2"]),
        (2, {"epochs": 2, "check_val_every_n_epoch": 2}, ["0", "2"]),
    ],
)
def test_when(tmp_path: Path, every: int, options: dict[str, Any], epochs: list[str]) -> None:
    """At the start, every so many epochs, and at the end, which `max_steps` may bring inside of an epoch."""
    fit(tmp_path, ProxyScoring("snip", 2, every_n_epochs=every, batch_size=2), **options)
    assert list(dict.fromkeys(row["epoch"] for row in lines(tmp_path / "scoring.csv"))) == epochs


def test_the_same_networks_are_drawn_everywhere_and_each_once() -> None:
    net = small.make_net()
    archs = draw(net, 12, seed=3)
    assert len(set(archs)) == 12 and all(arch in net.space for arch in archs)
    random.seed(1)
    torch.manual_seed(1)
    assert draw(small.make_net(), 12, seed=3) == archs != draw(net, 12, seed=4)
    assert set(draw(net, 10**6, seed=0)) == set(net.space.enumerate())


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def broken() -> Iterator[Callable[[Callable[[Probe], Any]], str]]:
    """Register a function as a proxy for the length of a test."""
    names: list[str] = []

    def add(function: Callable[[Probe], Any]) -> str:
        names.append("broken")
        registry.register("broken", paper="-", equation="-", cost="none", function=True)(function)
        return "broken"

    registry.proxies()
    yield add
    for name in names:
        del registry._PROXIES[name]


def test_a_proxy_that_raises_is_invalid_and_the_rest_goes_on(tmp_path: Path, broken: Any) -> None:
    def function(probe: Probe) -> Any:
        raise ZeroDivisionError("no such\nthing")

    name = broken(function)
    trace, alone = Trace(), Trace()
    with pytest.warns(UserWarning, match="scoring: broken raised ZeroDivisionError: no such; its scores are invalid"):
        fit(tmp_path / "both", trace, ProxyScoring(["snip", name], 3), epochs=1)
    fit(tmp_path / "alone", alone, ProxyScoring("snip", 3), epochs=1)
    same(trace.steps, alone.steps)
    both = lines(tmp_path / "both" / "scoring.csv")
    assert [row for row in both if row["proxy"] == "snip"] == lines(tmp_path / "alone" / "scoring.csv")
    bad = [row for row in both if row["proxy"] == name]
    assert len(bad) == 6 and {row["current"] for row in bad} == {"-inf"}
    assert {row["reason"] for row in bad} == {"ZeroDivisionError: no such"}
    assert "score/broken/current" not in lines(tmp_path / "both" / "metrics.csv")[0]


def test_refusals(tmp_path: Path) -> None:
    for proxies, key in ((["snp"], "snip"), ([], "none are named")):
        with pytest.raises(UserError, match=key):
            ProxyScoring(proxies)
    for given in ({"networks": 1}, {"every_n_epochs": 0}, {"batch_size": 0}, {"eval_batches": 0}):
        with pytest.raises(UserError, match=f"{next(iter(given))}: . is not valid; valid: . or above"):
            ProxyScoring("snip", **given)
    one = small.candidates()[0]
    for networks in (2.5, True, None, "abc", [1, 2], [one], [one, one], {"networks": 3}):
        with pytest.raises(UserError, match=r"^networks.* is not valid; valid: "):
            ProxyScoring("snip", networks)  # type: ignore[arg-type]
    for given in (
        {"batch_size": "a"},
        {"batch_size": 2.0},
        {"every_n_epochs": None},
        {"eval_batches": "a"},
        {"seed": 1.5},
    ):
        with pytest.raises(UserError, match=f"^{next(iter(given))}: .* is not valid; valid: "):
            ProxyScoring("snip", **given)
    with pytest.raises(UserError, match="batch_size: proxy 'zico' needs at least 2 images, and its batch has 1"):
        ProxyScoring(["snip", "zico"], batch_size=1)
    for options, words in (({"dsss": {}}, "did|Did you mean 'dss'"), ({"dss": {"mode": "x"}}, "mode of dss: 'x'")):
        with pytest.raises(UserError, match=words):
            ProxyScoring(["snip", "dss"], options=options)
    with pytest.raises(UserError, match="proxy 'knas' with variant='reference' needs at least 4 images"):
        ProxyScoring("knas", batch_size=3, options={"knas": {"variant": "reference"}})
    with pytest.raises(UserError, match="scoring: needs validation data"):
        fit(tmp_path, ProxyScoring("snip", 3), limit_val_batches=0)
    single = RetrainModule(
        small.make_net().subnet(small.candidates()[0]), small.make_module(small.make_net()).train_config, 8
    )
    with pytest.raises(UserError, match="RetrainModule trains no supernet"):
        ProxyScoring("snip").setup(pl.Trainer(logger=False, enable_checkpointing=False), single, "fit")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("proxies", ["snip", "dzs"], "scoring.proxies: 'dzs' is not valid; .*Did you mean 'dss'"),
        ("proxies", "dzs", "scoring.proxies: 'dzs' is not valid; .*Did you mean 'dss'"),
        ("proxies", 3, "scoring.proxies: 3 is not valid; valid: all, a name"),
        ("networks", 1, "scoring.networks: 1 is not valid; valid: 2 or above"),
        ("every_n_epochs", 0, "scoring.every_n_epochs: 0"),
        ("batch_size", 0, "scoring.batch_size: 0"),
        ("eval_batches", 0, "scoring.eval_batches: 0"),
        ("options", {"snp": {}}, "scoring.options: 'snp' is not valid; .*Did you mean 'snip'"),
    ],
)
def test_recipes_are_refused_by_key(key: str, value: Any, message: str) -> None:
    config = Config()
    for valid in ("snip", "all", ["snip"]):
        config.scoring.proxies = valid
        validate(config)
    setattr(config.scoring, key, value)
    with pytest.raises(UserError, match=message):
        validate(config)
    setattr(config.scoring, key, copy.deepcopy(getattr(Config().scoring, key)))
    config.scoring.proxies, config.trainer.limit_val_batches = ["snip"], 0
    with pytest.raises(UserError, match="limit_val_batches: 0"):
        validate(config)


# --- kill and resume --------------------------------------------------------------------------------------------------


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """Killed after a scoring that no checkpoint knows of, and while the file was being written."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    fit(whole, ProxyScoring(PROXIES, 3), train=RECIPE, epochs=3)
    with pytest.raises(Killed):
        fit(part, ProxyScoring(PROXIES, 3), Kill(10), train=RECIPE, epochs=3)
    (part / "checkpoints" / "epoch=0001-step=0000008.ckpt").unlink()
    with (part / "scoring.csv").open("a") as file:
        file.write("3,12,0123abc,99,")
    newest, step = newest_whole(part / "checkpoints")
    assert step == 4
    fit(part, ProxyScoring(PROXIES, 3), train=RECIPE, epochs=3, resume=newest, restored=step)
    for name in ("scoring.csv", "scoring.json", "metrics.csv"):
        assert (part / name).read_bytes() == (whole / name).read_bytes(), name
    got, want = (checkpoint(folder, 12) for folder in (part, whole))
    for key in ("callbacks", "state_dict", "optimizer_states", "ema_state"):
        same(got[key], want[key])


def test_another_scoring_is_refused_on_resume_and_a_late_one_has_no_beginning(tmp_path: Path) -> None:
    fit(tmp_path / "a", ProxyScoring("snip", 4), epochs=1)
    fit(tmp_path / "b", epochs=1)
    options: dict[str, Any] = {"epochs": 2, "restored": 4}
    (of_a,), (of_b,) = ((tmp_path / name / "checkpoints").glob("*.ckpt") for name in "ab")
    for other, key in (
        (ProxyScoring("snip", 5), "other networks than before$"),
        (ProxyScoring("plain", 4), r"other proxies than before: \['snip'\] in the checkpoint, \['plain'\] now"),
        (ProxyScoring("snip", 4, batch_size=2), "other settings"),
    ):
        with pytest.raises(UserError, match=f"resume: scoring has {key}"):
            fit(tmp_path / "a", other, resume=of_a, **options)
    with pytest.warns(UserWarning, match="holds no scores at initialisation"):
        fit(tmp_path / "b", ProxyScoring("snip", 4), resume=of_b, **options)
    rows = lines(tmp_path / "b" / "scoring.csv")
    assert {(row["epoch"], row["initial"]) for row in rows} == {("1", ""), ("2", "")} and len(rows) == 8


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    """Each fit has its own folder of results, unless one was given."""
    scoring = ProxyScoring("snip", 4)
    contents = []
    for name in ("a", "b"):
        fit(tmp_path / name, scoring, epochs=1)
        contents.append((tmp_path / name / "scoring.csv").read_bytes())
    assert contents[0] == contents[1]
    assert scoring.folder is None


def test_options_reach_the_proxies(tmp_path: Path) -> None:
    scorings = {}
    for name, options in (("plain", None), ("released", {"dss": {"mode": "released"}})):
        scoring = ProxyScoring(["snip", "dss_pp", "dss"], small.candidates()[:2], options=options)
        fit(tmp_path / name, scoring, epochs=1)
        scorings[name] = scoring.record.scorings[-1].scores
    assert scorings["plain"]["snip"] == scorings["released"]["snip"]
    assert scorings["plain"]["dss"] != scorings["released"]["dss"]
