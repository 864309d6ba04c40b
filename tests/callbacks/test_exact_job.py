"""The exact search as a job: what it records of its proof and its front, whole, thinned, cut short and left out."""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.callbacks import exact_job
from lightning_tas.callbacks.exact_job import ExactJob, spread
from lightning_tas.callbacks.search_build import Surroundings, build_job
from lightning_tas.commands.entry import main
from lightning_tas.launch.files import read_json
from lightning_tas.search.config import LimitsConfig, SearchConfig
from lightning_tas.search.exact import ExactResult, Found, search_exact

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import small

FACTS = {"labels", "front_size", "front_complete", "front_lacks", "front_left_out"}


def job(folder: Path | None = None, limits: LimitsConfig | None = None, **options: bool) -> ExactJob:
    search = SearchConfig(strategy="exact", score="snip", mode="inherited", options=dict(options))
    made = build_job(small.make_net(), search, limits or LimitsConfig(), Surroundings(folder=folder))
    assert isinstance(made, ExactJob)
    return made


def test_the_whole_front_is_recorded_without_an_evaluation(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = job(tmp_path).run()
    front = search_exact(small.make_net(), "snip", front=True)
    written = read_json(tmp_path / "search.json")
    assert [entry["id"] for entry in written["front"]] == [one.arch.id for one in front]
    assert found.evaluations == written["evaluations"] == 0 and written["stopped"].startswith("the optimum of all 40 ")
    assert found.more.keys() == FACTS and {key: written[key] for key in FACTS} == found.more
    assert found.more["labels"] > 0 and found.more["front_left_out"] is None
    known = (found.more["front_size"], found.more["front_complete"], found.more["front_lacks"])
    assert known == (len(front), True, 0.0)


def test_a_long_front_is_thinned_evenly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = job().run().front
    monkeypatch.setattr(exact_job, "FRONT_MOST", 5)
    with pytest.warns(UserWarning, match=rf"5 of the {len(whole)} networks of the Pareto front are kept"):
        found = job().run()
    ids = [entry.arch.id for entry in whole]
    kept = [ids.index(entry.arch.id) for entry in found.front]
    assert kept == sorted(kept) and len(kept) <= 5 < len(whole) == found.more["front_size"]
    assert {0, len(whole) - 1} <= set(kept) and found.networks[0].value in [entry.value for entry in found.front]


@pytest.mark.parametrize("best", [0, 3, 41, 99])
@pytest.mark.parametrize(("number", "most"), [(100, 3), (100, 7), (100, 99), (100, 100), (100, 200), (1, 3)])
def test_spread(number: int, most: int, best: int) -> None:
    front = [Found(None, float(i == best), i, i) for i in range(number)]  # type: ignore[arg-type]
    kept = [one.params for one in spread(front, most)]
    assert min(number, most) - 1 <= len(kept) <= most and kept == sorted(set(kept))
    assert {0, number - 1} <= set(kept) and (best in kept or best >= number)
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert max(gaps, default=0) <= -(-(number - 1) // max(most - 2, 1))


@pytest.mark.parametrize(("lacks", "known"), [(0.25, 0.25), (float("inf"), None)])
def test_a_front_or_an_optimum_without_proof(
    lacks: float, known: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = exact_job.search_tables

    def unproven(*args: Any, **kwargs: Any) -> ExactResult:
        return replace(solve(*args, **kwargs), optimal=False, bound=lacks)

    monkeypatch.setattr(exact_job, "search_tables", unproven)
    found = job().run()
    assert (found.more["front_complete"], found.more["front_lacks"]) == (False, known) and found.front
    assert found.stopped.startswith("not proven") and found.stopped.endswith(f"none scores above {lacks:.6g}")


@pytest.mark.parametrize(
    "limits",
    [
        {"activations": [None, "1M"]},
        {"latency": [None, 1000], "latency_repeats": 2},
        {"params": [None, "1M"], "activations": [1, None]},
    ],
)
def test_a_front_that_is_left_out_says_why(clock: Any, limits: dict[str, Any]) -> None:
    name = list(limits)[-1].partition("_")[0]
    with pytest.warns(UserWarning, match=rf"front is left out: it is of score, params and MACs, and {name} is limited"):
        found = job(limits=LimitsConfig(**limits)).run()
    assert found.networks and not found.front and found.more["front_size"] is None
    assert name in found.more["front_left_out"]


def test_a_front_that_is_not_asked_for() -> None:
    found = job(front=False).run()
    assert found.front == [] and found.more["front_left_out"] == "search.options has front: false"


def test_the_command_prints_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No evaluation is claimed, and the front's standing is told."""
    call = ["recipe=quickstart", "search.strategy=exact", "search.score=snip", "search.mode=inherited", "run=a"]
    assert main("search", [*call, f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    size = read_json(tmp_path / "quickstart" / "a" / "search.json")["front_size"]
    assert "0 networks evaluated; the optimum of all " in out and "partial networks told apart; Pareto front of" in out
    assert f"params and MACs: {size} networks, complete" in out
    log = (tmp_path / "quickstart" / "a" / "log.txt").read_text()
    said = [line.partition("  ")[2] for line in log.splitlines()]
    assert all(line in said for line in out.splitlines() if line.strip()), "all that was printed"
