"""ProxyScoring on two processes: training by DDP, ZeRO-2 and ZeRO-3 does not notice it, and nobody waits for ever.

Nor does training by DDP and ZeRO-2 notice that the live network itself is scored in the middle of a fit.
"""

from __future__ import annotations

import csv
import os
import sys
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.callbacks import ProxyScoring, proxy_scoring
from lightning_tas.callbacks.proxy_scoring import draw
from lightning_tas.evaluator import evaluate
from lightning_tas.proxies import Measured, Probe, register, score_one
from lightning_tas.training.ema import WeightAverage

sys.path.insert(0, str(Path(__file__).parent))  # here and in the processes that import this file
import small
from scoring_trace import Live, Trace, same

NETWORKS, PROXIES = 3, ["snip", "grad_norm"]
LIVE = ["params", "snip", "dss", "naswot", "zen", "ntkt"]
STRATEGIES = ("ddp", "deepspeed_stage_2", "deepspeed_stage_3")


def scoring(folder: str, proxies: list[str]) -> ProxyScoring:
    return ProxyScoring(proxies, NETWORKS, batch_size=4, folder=folder)


def fit(strategy: str, *callbacks: Any, **options: Any) -> small.Fit:
    """With an average of the weights, where that is possible."""
    average = [] if strategy == "deepspeed_stage_3" else [WeightAverage(0.5)]
    trainer = {"callbacks": [*callbacks, *average], "check_val_every_n_epoch": 1, "limit_val_batches": 2}
    return small.fit(strategy, trainer=trainer, net={"drop_path_rate": 0.2}, unused="zero", **options)


def shards(folder: Path) -> dict[str, Any]:
    """All that a checkpoint holds but what the scoring has added: file, or folder of DeepSpeed."""
    files = {path.name: path for path in folder.rglob("*.pt")} if folder.is_dir() else {"file": folder}
    found = {name: torch.load(path, weights_only=False) for name, path in files.items()}
    for content in found.values():
        for key in [key for key in content.get("callbacks", {}) if key.startswith("ProxyScoring")]:
            del content["callbacks"][key]
    return found


def compare(folder: str) -> None:
    """On every rank: train by each strategy with and without, and compare."""
    for strategy in STRATEGIES:
        without, with_ = Trace(), Trace()
        paths = [Path(folder) / f"{strategy}-{name}.ckpt" for name in ("without", "with")]
        plain = fit(strategy, without, small.Watch(str(paths[0])))
        scored = fit(strategy, with_, scoring(f"{folder}/{strategy}", PROXIES), small.Watch(str(paths[1])))
        assert len(without.steps) == 8 and all("loss" in step for step in without.steps), strategy
        same(with_.steps, without.steps, strategy)
        same(with_.epochs, without.epochs, strategy)
        assert scored.distance(plain) == 0.0 and scored.metrics == plain.metrics and not scored.warned, scored.warned
        same(shards(paths[1]), shards(paths[0]), strategy)
        if strategy != "deepspeed_stage_3":  # whose live weights are shards
            scored_live(strategy, without, plain)


def scored_live(strategy: str, without: Trace, plain: small.Fit) -> None:
    """The supernet, and then a network alone, scored while they are trained: as `without`."""
    archs = draw(small.make_net(), NETWORKS, seed=0)
    alone = small.candidates()[1]
    trained_alone = Trace()
    plain_alone = fit(strategy, trained_alone, alone=alone)
    for trace, end, options in ((without, plain, {}), (trained_alone, plain_alone, {"alone": alone})):
        live, with_ = Live(LIVE, archs), Trace()
        scored = fit(strategy, live, with_, **options)
        where = f"{strategy}, scored live, {options}"
        same(with_.steps, trace.steps, where)
        same(with_.epochs, trace.epochs, where)
        assert scored.distance(end) == 0.0 and scored.metrics == end.metrics and not scored.warned, where
        assert len(live.found) == 4 and all(values.keys() == set(LIVE) for values in live.found), where
        first, *_, last = live.found
        assert first["params"] == last["params"] and first["snip"] != last["snip"], where
        assert all(isfinite(value) for values in live.found for found in values.values() for value in found), where


def broken(folder: str) -> small.Fit:
    """A proxy that raises on the second process, for the networks of its share, and only there."""

    @register("broken", paper="-", equation="-", cost="none", function=True)
    def function(probe: Probe) -> Measured:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("here only")
        return Measured(1.0)

    return small.fit("ddp", trainer={"callbacks": [scoring(folder, ["snip", "broken"])]})


def everything(folder: str) -> small.Fit:
    """Starting processes takes a while."""
    # So does drawing, which needs no processes.
    proxy_scoring.save_figure = proxy_scoring.scoring_scatter = lambda *given: None  # type: ignore[assignment]
    compare(folder)
    return broken(f"{folder}/broken")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "scoring.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_training_is_the_same_and_processes_share_the_work(processes: Any, tmp_path: Path) -> None:
    first, second = processes.run(everything, 2, str(tmp_path), timeout=320)
    net = small.make_net(drop_path_rate=0.2)
    archs = draw(net, NETWORKS, seed=0)
    # Two batches of four on each of two ranks, which take turns: the first 16 images.
    both = [small.loader(rank, 2) for rank in range(2)]
    batches = [batch for loader in both for batch in list(loader)[:2]]
    for strategy in STRATEGIES:
        found = rows(tmp_path / strategy)
        assert len(found) == 3 * len(PROXIES) * NETWORKS
        for row, (name, arch) in zip(found, [(name, arch) for name in PROXIES for arch in archs], strict=False):
            assert (row["epoch"], row["proxy"], row["network"]) == ("0", name, arch.id)
            wanted = score_one(name, net, arch, seed=0, batch_size=4).value
            assert float(row["initial"]) == float(row["current"]) == wanted, strategy
            (accuracy,) = evaluate(net, [arch], batches)
            assert float(row["top1"]) == accuracy.top1 and accuracy.samples == 16
    # Live weights are scored: also with an average beside them they are those of the run without.
    last = [[row for row in rows(tmp_path / strategy) if row["epoch"] == "2"] for strategy in STRATEGIES]
    for ddp, *zero in zip(*last, strict=True):
        for row in zero:
            assert float(row["current"]) == pytest.approx(float(ddp["current"]), rel=1e-3)

    # Nobody waits for the process on which a proxy raises.
    assert first.distance(second) == 0.0 and not second.warned
    assert first.warned and all("broken raised" in text and "here only" in text for text in first.warned)
    found = {name: [row for row in rows(tmp_path / "broken") if row["proxy"] == name] for name in ("snip", "broken")}
    assert len(found["broken"]) == 3 * NETWORKS and {row["current"] for row in found["broken"]} == {"-inf"}
    assert all("here only" in row["reason"] for row in found["broken"])
    assert all(float(row["current"]) > 0 for row in found["snip"])
