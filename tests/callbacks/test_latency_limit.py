"""A limit on latency: estimates that are far off decide nothing, and what breaks it by direct measurement is no winner.

All by a stopwatch that tests move: none of it depends on how busy the machine is.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_tas import latency
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks import RandomSearch, latency_limit, search_record
from lightning_tas.callbacks.latency_limit import FOUND, MEASUREMENTS
from lightning_tas.callbacks.search_build import LATENCY, Surroundings, build_job, latency_table
from lightning_tas.callbacks.search_record import write_winners
from lightning_tas.commands import build
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.search.config import LimitsConfig, SearchConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import small

GIVEN = LimitsConfig(latency=[None, 100], latency_repeats=2, latency_threads=1)


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time here: the tests of plots do it."""
    monkeypatch.setattr(search_record, "search_figure", lambda *args: args)
    monkeypatch.setattr(search_record, "save_figure", lambda figure, path: None)


@pytest.fixture
def busy(clock: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In the first [0] measurements of a table, the networks that it is checked by take twice as long as estimated."""
    left, build, network = [0], latency.LatencyTable.build, latency._Bench.network
    number, seen = latency.networks_measured(small.space()), itertools.count()

    def built(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return build(*args, **kwargs)

    def held_up(self: Any, arch: Any) -> Any:
        checked = next(seen) % number >= number - latency.CHECK
        clock.slow = 2 if left[0] >= 0 and checked else 1
        return network(self, arch)

    monkeypatch.setattr(latency.LatencyTable, "build", built)
    monkeypatch.setattr(latency._Bench, "network", held_up)
    return left


@pytest.mark.parametrize("times", range(MEASUREMENTS + 1))
def test_a_table_that_is_far_off_is_measured_again_then_refused(
    busy: list[int], times: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    busy[0] = times
    if times < MEASUREMENTS:
        table = latency_table(small.make_net(), GIVEN, tmp_path)
        assert table.median_error == 0 and busy[0] == -1
    else:
        with pytest.raises(UserError, match=r"^limits.latency: estimates .* 50\.0% off .*limits.latency_error=0.15"):
            latency_table(small.make_net(), GIVEN, tmp_path)
        assert not list(tmp_path.iterdir())
    assert sum("it is measured again" in str(w.message) for w in recwarn) == min(times, MEASUREMENTS - 1)


def test_a_kept_table_that_is_far_off_is_measured_anew(busy: list[int], tmp_path: Path) -> None:
    net, lax = small.make_net(), LimitsConfig(**{**vars(GIVEN), "latency_error": 5})
    busy[0] = 1
    rough = latency_table(net, lax, tmp_path)
    assert rough.median_error == pytest.approx(0.5) and latency_table(net, lax, tmp_path).to_dict() == rough.to_dict()
    with pytest.warns(UserWarning, match=r"latency.json' has a median error of .*above limits.latency_error=0.15; it"):
        assert latency_table(net, GIVEN, tmp_path).median_error == 0
    assert json.loads((tmp_path / LATENCY).read_text())["errors"] == [0.0] * 8


def test_a_search_in_training_is_refused_before_the_first_step(busy: list[int], tmp_path: Path) -> None:
    import pytorch_lightning as pl

    busy[0] = MEASUREMENTS
    search = RandomSearch("snip", networks=4, limits={"latency": [None, 100], "latency_repeats": 2}, folder=tmp_path)
    trainer = pl.Trainer(callbacks=[search], logger=False, max_epochs=1, enable_checkpointing=False)
    with pytest.raises(UserError, match=r"limits\.latency_error"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(small.make_module(small.make_net()), small.loader(0, 1))
    assert trainer.global_step == 0


def times(breaking: set[str]) -> Any:
    """Direct measurements: 40 ms of the networks with these ids, 20 of others; `calls` counts."""

    def measure(net: Any, arch: Architecture, **how: Any) -> latency.Latency:
        measure.calls += 1  # type: ignore[attr-defined]
        time = 40.0 if arch.id in breaking else 20.0
        return latency.Latency(time, time, time, time, time, 2, 1, 1, "cpu", "")

    measure.calls = 0  # type: ignore[attr-defined]
    return measure


def job(strategy: str, top: int, folder: Path) -> Any:
    own: dict[str, Any] = {"mode": "inherited"} if strategy == "exact" else {"options": {"networks": 20}}
    search = SearchConfig(strategy=strategy, score="snip", batch_size=2, top=top, **own)
    limits = LimitsConfig(latency=[None, 30], latency_repeats=2)
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Pareto front is left out")
        return build_job(small.make_net(), search, limits, Surroundings(folder=folder))


@pytest.mark.parametrize("strategy", ["random", "exact"])
def test_the_best_networks_that_keep_the_limit_are_handed_on(
    clock: Any, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "measure", times(set()))
    ranked = [entry.arch.id for entry in job(strategy, 6, tmp_path / "all").run().networks]
    slow = [ranked[i] for i in (0, 1, 3)]
    monkeypatch.setattr(latency, "measure", times(set(slow)))
    with pytest.warns(UserWarning, match=r"the best 3 networks .* break limits.latency=\[null,30\] .*40 ms, estimated"):
        found = job(strategy, 2, tmp_path).run()
    assert [entry.arch.id for entry in found.networks] == [ranked[2], ranked[4]]
    kept = json.loads((tmp_path / search_record.RECORD).read_text())
    assert [(one["label"], one["id"]) for one in kept["networks"]] == [("best", ranked[2]), ("best-2", ranked[4])]
    assert [one["id"] for one in kept["left_out"]] == slow
    assert {one["measured_latency"]["median_ms"] for one in kept["left_out"]} == {40.0}
    made = job(strategy, 2, tmp_path)
    result = write_winners(tmp_path / "result.json", found, made.settings)["measured_latency"]
    assert [one["id"] for one in result["left_out"]] == slow and result["networks"][0]["id"] == ranked[2]
    # A resumed run decides by the same numbers, whatever the machine does now.
    monkeypatch.setattr(latency, "measure", times(set(ranked)))
    with pytest.warns(UserWarning, match="the best 3 networks"):
        assert made.run().to_dict()["networks"] == found.to_dict()["networks"]
    assert latency.measure.calls == 0  # type: ignore[attr-defined]


def test_a_few_networks_are_tried_and_no_more(clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tas.callbacks.search_job.SPARE", 3)
    every = {arch.id for arch in small.space().enumerate()}
    monkeypatch.setattr(latency, "measure", times(every))
    found = job("random", 2, tmp_path).run()
    assert found.networks == [] and len(found.left_out) == latency.measure.calls == 5  # type: ignore[attr-defined]
    assert found.why_none.startswith("no network is handed on: the best 5 networks that were measured break")
    slow = [entry.arch.id for entry in found.left_out]
    monkeypatch.setattr(latency, "measure", times(set(slow[:4])))
    (tmp_path / FOUND).unlink()
    with pytest.warns(UserWarning, match="so 1 instead of 2 are handed on"):
        assert [entry.arch.id for entry in job("random", 2, tmp_path).run().networks] == [slow[4]]


def test_the_command_ends_where_no_network_keeps_the_limit(
    clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency_limit.LatencyLimit, "holds", lambda self, taken: False)
    monkeypatch.setattr("lightning_tas.callbacks.exact_job.SPARE", 2)
    call = ["recipe=quickstart", "search.strategy=exact", "search.score=snip", "search.mode=inherited", "run=a"]
    limits = ["limits.latency=[null,1000]", "limits.latency_repeats=2"]
    assert main("search", [*call, *limits, f"output_dir={tmp_path}"]) == 2
    assert "limits.latency: no network is handed on: the best 3 networks" in capsys.readouterr().err


def test_there_is_nothing_to_retrain_where_a_search_handed_on_nothing(tmp_path: Path) -> None:
    (tmp_path / search_record.RECORD).write_text('{"networks": []}')

    class Searched:
        def outputs(self, phase: str) -> dict[str, str]:
            return {"search": search_record.RECORD}

    config: Any = type("Config", (), {"arch": None})
    with pytest.raises(UserError, match="handed on no network"):
        build.one_architecture(config, Searched(), RunFolder(tmp_path))  # type: ignore[arg-type]
