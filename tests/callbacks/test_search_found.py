"""What a search hands over: its front where racing gave networks up, what limits besides params and MACs came to."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tas.activations import activation_total
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks import search_record
from lightning_tas.callbacks.search_build import LATENCY, Surroundings, build_job, latency_table
from lightning_tas.callbacks.search_job import SearchJob
from lightning_tas.callbacks.search_record import write_winners
from lightning_tas.costs import cost
from lightning_tas.evaluator import evaluate
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.limits import Region
from lightning_tas.proxies.score import Score
from lightning_tas.search.config import LimitsConfig, SearchConfig
from lightning_tas.search.strategy import build_strategy

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import small

SMALL: dict[str, Any] = {"population": 4, "generations": 2, "crossovers": 2, "mutations": 2, "top": 3}


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time here: the tests of plots do it."""
    monkeypatch.setattr(search_record, "search_figure", lambda *args: args)
    monkeypatch.setattr(search_record, "save_figure", lambda figure, path: None)


def loader() -> Any:
    return small.loader(0, 1)


class Rough:
    """Made-up accuracies with many ties; of networks below a bar, racing has only an estimate."""

    def __init__(self, seed: int, noise: float) -> None:
        self.seed, self.noise, self.seen_whole = seed, noise, 0

    def true(self, arch: Architecture) -> float:
        return float(np.random.default_rng([self.seed, int(arch.id, 16)]).integers(0, 20) + sum(arch.num_heads))

    def __call__(self, archs: Any, names: Any) -> list[dict[str, Score]]:
        return [{"accuracy": self.one(arch)} for arch in archs]

    def one(self, arch: Architecture) -> Score:
        true = self.true(arch)
        if true >= 18:
            return Score(true, extras={"images": 100.0})
        luck = float(np.random.default_rng([self.seed, 1, int(arch.id, 16)]).normal()) * self.noise
        return Score(min(true + luck, 17.9), extras={"images": 9.0, "dropped": 1.0})

    def whole(self, archs: Any, names: Any) -> list[dict[str, Score]]:
        self.seen_whole += len(archs)
        return [{"accuracy": Score(self.true(arch), extras={"images": 100.0})} for arch in archs]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 1.0, 5.0]))
def test_the_front_is_of_networks_that_have_seen_all_images(seed: int, noise: float) -> None:
    net, scorer = small.make_net(), Rough(seed, noise)
    strategy = build_strategy("random", Region(net.space, None, net), "accuracy", seed, networks=40)
    found = SearchJob(strategy, scorer, "accuracy").run()
    front = [(entry.params, entry.value) for entry in found.front]
    assert front and all(not e.dropped and e.value == scorer.true(e.arch) for e in found.front)
    assert all(a < b and x < y for (a, x), (b, y) in itertools.pairwise(front)), "more params, higher score"
    history = list(strategy.history)
    for entry in history:  # whatever has a true value, or an estimate, is matched at as few params
        known = entry.estimate if entry.dropped else entry.value
        assert any(p <= entry.params and v >= known for p, v in front) or (entry.dropped and noise)
    if not noise:
        naive = {
            (e.params, scorer.true(e.arch))
            for e in history
            if not any(
                (o.params, -scorer.true(o.arch)) < (e.params, -scorer.true(e.arch))
                and scorer.true(o.arch) >= scorer.true(e.arch)
                for o in history
            )
        }
        assert set(front) == naive and scorer.seen_whole <= len(front)
    for row in found.generations:
        own = [e.estimate for e in history if e.generation == row["generation"]]
        assert row["mean"] == pytest.approx(np.mean(own)), "no generation is without a mean because of racing"


def test_a_raced_search_has_the_front_of_real_accuracies(tmp_path: Path) -> None:
    net = small.make_net()
    search = SearchConfig(
        strategy="random", score="accuracy", options={"networks": 30, "batch": 2}, racing_top=1, racing_error=0.9
    )
    job = build_job(net, search, LimitsConfig(), Surroundings(seed=2, loader=loader, folder=tmp_path))
    found = job.run()
    history = list(job.strategy.history)
    given_up = {e.index for e in history if e.dropped}
    assert given_up & {e.index for e in found.front}, "racing gave up networks that lie on the front"
    exact = evaluate(net, [e.arch for e in found.front], loader())
    assert [e.value for e in found.front] == [accuracy.top1 for accuracy in exact]
    kept = json.loads((tmp_path / search_record.RECORD).read_text())
    assert kept["racing"] == {"error": 0.9, "top": 1}
    assert [e["score"] for e in kept["front"]] == [e.value for e in found.front]


@pytest.mark.parametrize(
    ("search", "racing"),
    [
        ({"strategy": "random", "score": "snip", "options": {"networks": 3}}, None),
        ({"strategy": "evolution", "score": "accuracy", "options": {**SMALL, "top": 4}}, {"error": 0.05, "top": 10}),
        ({"strategy": "evolution", "score": "accuracy", "options": {**SMALL, "top": 4}, "racing_top": 2}, 4),
        ({"strategy": "random", "score": "accuracy", "options": {"networks": 3}, "racing": False}, None),
        ({"strategy": "nsga2", "score": "accuracy", "options": {"population": 4, "generations": 1}}, None),
    ],
)
def test_the_record_has_the_racing_that_was_in_force(search: dict[str, Any], racing: Any) -> None:
    job = build_job(small.make_net(), SearchConfig(batch_size=2, **search), LimitsConfig(), Surroundings(loader=loader))
    assert job.settings["racing"] == ({"error": 0.05, "top": racing} if isinstance(racing, int) else racing)


@pytest.mark.parametrize("strategy", ["evolution", "exact"])
def test_every_limited_quantity_of_a_winner_is_written(clock: Any, tmp_path: Path, strategy: str) -> None:
    net = small.make_net()
    limits = LimitsConfig(latency=[None, 1000], latency_repeats=3, latency_threads=1, activations=[None, "1G"])
    own = {"mode": "inherited"} if strategy == "exact" else {"options": SMALL}
    search = SearchConfig(strategy=strategy, score="snip", batch_size=2, top=2, **own)
    job = build_job(net, search, limits, Surroundings(folder=tmp_path))
    found = job.run()
    table = (job.region if strategy == "exact" else job.strategy.region).given("latency")
    kept = json.loads((tmp_path / search_record.RECORD).read_text())
    path = tmp_path / search_record.TABLE
    rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    assert len(rows) == found.evaluations and bool(rows) == (strategy != "exact")
    for entry, network in zip(found.networks, kept["networks"], strict=True):
        codes = net.space.encode([entry.arch])
        taken = {"latency": float(table(codes)[0]), "activations": int(activation_total(net.space, net)(codes)[0])}
        assert {name: network[name] for name in taken} == taken
        assert not rows or {name: float(rows[entry.index][name]) for name in taken} == taken
        measured = network["measured_latency"]
        assert measured["repeats"] == 3 and measured["threads"] == 1 and measured["median_ms"] > 0
    facts = {**asdict(table.conditions), "repeats": 3, "median_error": table.median_error, "max_error": table.max_error}
    assert kept["latency"] == facts
    result = write_winners(tmp_path / "result.json", found, job.settings)
    assert result["latency"] == facts and result["limits"]["latency"] == [None, 1000]
    text = search_record.networks_table(found, "snip")
    assert all(head in text for head in ("latency, estimated [ms]", "latency, measured [ms]", "activations [MB]"))
    assert [cost(e.arch, net).params for e in found.networks] == [e.params for e in found.networks]


KEPT = LimitsConfig(latency=[None, 100], latency_repeats=3, latency_threads=1)


@pytest.mark.parametrize(
    "changed",
    [
        {"given": {"latency_batch": 2}},
        {"given": {"latency_threads": 2}},
        {"given": {"latency_repeats": 5}},
        {"net": {"img_size": 12}},
        {"net": {"num_classes": 5}},
        {"amp_dtype": torch.bfloat16},
        {"device": "NVIDIA H100"},
    ],
    ids=lambda changed: str(next(iter(changed.values()))),
)
def test_a_latency_table_of_other_conditions_is_measured_anew(
    clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    table = latency_table(small.make_net(), KEPT, tmp_path)
    assert table.samples == 3
    kept = (tmp_path / LATENCY).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = latency_table(small.make_net(), KEPT, tmp_path)
    assert again.to_dict() == table.to_dict() and (tmp_path / LATENCY).read_bytes() == kept
    if "device" in changed:
        content = read_json(tmp_path / LATENCY)
        content["conditions"]["device"] = changed["device"]
        write_json(tmp_path / LATENCY, content)
    other_net = small.make_net(**changed.get("net", {}))
    asked = replace(KEPT, **changed.get("given", {}))
    with pytest.warns(UserWarning, match=r"latency.json' was measured with other settings or on another device"):
        other = latency_table(other_net, asked, tmp_path, amp_dtype=changed.get("amp_dtype"))
    assert other.samples == asked.latency_repeats and other.conditions.device == "cpu"
    assert read_json(tmp_path / LATENCY) == json.loads(json.dumps(other.to_dict()))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_score_that_is_no_number_wins_nothing(value: float) -> None:
    net = small.make_net()
    strategy = build_strategy("random", Region(net.space, None, net), "snip", 0, networks=6)
    asked = strategy.ask()
    strategy.tell([{"snip": Score(value if i else 1.0)} for i in range(len(asked))])
    assert strategy.best is not None and strategy.best.arch == asked[0] and strategy.stats[0]["mean"] == 1.0
