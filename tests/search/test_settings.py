"""Settings are checked by name and value; strategies register, and their names are known."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tas.callbacks.search_check import check_search
from lightning_tas.errors import UserError
from lightning_tas.limits import Region
from lightning_tas.search import strategy as module
from lightning_tas.search.config import SearchConfig
from lightning_tas.search.evolution import GenerationSettings
from lightning_tas.search.objective import Objective
from lightning_tas.search.strategy import (
    Draft,
    Strategy,
    build_strategy,
    register_strategy,
    settings_of,
    strategies,
)


def test_the_papers_defaults() -> None:
    assert strategies() == ["blockwise", "etas", "evolution", "exhaustive", "nsga2", "random", "s3_evolution"]
    autoformer, s3, razor = settings_of("evolution"), settings_of("s3_evolution"), settings_of("blockwise")
    names = ("population", "top", "generations", "depth_prob", "embed_prob", "block_prob")
    assert [autoformer[n] for n in names] == [50, 10, 20, 0.4, 0.4, 0.2]
    assert [s3[n] for n in names] == [50, 10, 20, 0.2, 0.2, 0.4] and s3["elitist"]
    assert [razor[n] for n in names] == [50, 50, 160, 0.4, 0.4, 0.2]
    names = ("rho", "inertia", "pull_own", "pull_best", "pso", "tries", "donor", "final")
    assert [razor[n] for n in names] == [0.3, 0.7, 1.5, 1.5, True, 50, "same", "archive"]
    names = ("first_pool", "first", "pool", "keep", "iterations", "mutate_prob", "patience", "filter")
    assert [settings_of("etas")[n] for n in names] == [500, 3, 100, 3, 10, 0.4, 5, "ntsr"]
    assert settings_of("random")["networks"] == 8000


@pytest.mark.parametrize(
    ("given", "mutants", "children"),
    [
        ({}, 25, 25),
        ({"population": 11}, 6, 5),
        ({"population": 10, "mutations": 7}, 7, 3),
        ({"population": 10, "crossovers": 4}, 6, 4),
        ({"population": 10, "mutations": 2, "crossovers": 3}, 2, 3),
    ],
)
def test_mutants_and_children_are_half_of_a_generation(given: dict[str, int], mutants: int, children: int) -> None:
    settings = GenerationSettings(**given)
    assert (settings.mutants, settings.children) == (mutants, children)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("evolution", {"population": 5, "mutations": 0, "crossovers": 6}, r"0 \+ 6 is more than population, 5"),
        ("evolution", {"populaton": 3}, "'populaton' is not valid.*Did you mean 'population'"),
        ("random", {"network": 3}, "valid: networks=8000, batch=50, stratify=false. Did you mean 'networks'"),
        ("nsga2", {"minimize": []}, r"objectives=\[\], minimise=\[params\], .*gene_prob=null"),
        ("evolution", {"population": 0}, "population of evolution: 0 is not valid; valid: a whole number of at least"),
        ("evolution", {"population": 2.5}, "population of evolution: 2.5"),
        ("evolution", {"block_prob": 1.5}, "block_prob of evolution: 1.5 is not valid; valid: a number from 0 to 1"),
        ("evolution", {"population": 5, "mutations": 4, "crossovers": 3}, r"mutations \+ crossovers: 4 \+ 3"),
        ("blockwise", {"donor": "sam"}, "Did you mean 'same'"),
        ("blockwise", {"guide": "ntsr"}, "'ntsr' has no numbers per block"),
        ("blockwise", {"guide": "nothing"}, "proxy: 'nothing'"),
        ("etas", {"filter": "ntrs"}, "filter of etas: 'ntrs'.*Did you mean 'ntsr'"),
        ("etas", {"filter": "accuracy"}, "needs the same score as the objective"),
        ("etas", {"keep": 200}, "keep: 200 networks cannot come from pool=8"),
        ("nsga2", {"minimise": ["paramz"]}, "minimise of nsga2: 'paramz'.*Did you mean 'params'"),
        ("nsga2", {"minimise": []}, "one objective alone has no front"),
        ("nsga2", {"objectives": ["snap"]}, "objectives of nsga2: 'snap'"),
        ("nsga2", {"objectives": "snip"}, "valid: a list of names"),
    ],
)
def test_bad_settings_are_named(lab: Any, name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lab.build(name, lab.region(lab.spaces("small")), **settings)


def test_unknown_names(lab: Any) -> None:
    with pytest.raises(UserError, match=r"strategy: 'evolutoin'.*Did you mean 'evolution'"):
        build_strategy("evolutoin", lab.region(lab.spaces("small")), "accuracy")
    with pytest.raises(UserError, match=r"objective: 'accurracyy'.*Did you mean 'accuracy'"):
        Objective.of("accurracyy")
    with pytest.raises(UserError, match="registered already"):
        register_strategy("random")(module.Strategy)


class Own(Strategy):
    """A package's: three random networks in one generation."""

    budget = 3

    def propose(self, draft: Draft) -> None:
        self.add_random(draft, self.budget)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRATEGIES", dict(module._STRATEGIES))


def test_a_packages_strategy(lab: Any, monkeypatch: pytest.MonkeyPatch, registered: None) -> None:
    point = SimpleNamespace(name="own", load=lambda: Own)
    monkeypatch.setattr(module, "entry_points", lambda group: [point] if group == "lightning_tas.strategies" else [])
    assert "own" in strategies() and settings_of("own") == {}
    strategy = build_strategy("own", lab.region(lab.spaces("small")), "accuracy")
    assert len(lab.trace(strategy)) == 3 and strategy.name == "own" and strategy.stopped == "budget: 3 evaluations"


def test_the_documents_strategy_by_its_module(
    lab: Any, monkeypatch: pytest.MonkeyPatch, registered: None, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "search.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Hill" in block]
    (tmp_path / "hill.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    check_search(SearchConfig(strategy="hill:Hill", score="snip", options={"step": 20}))
    with pytest.raises(UserError, match=r"search.options: .*'stop'.*Did you mean 'step'"):
        check_search(SearchConfig(strategy="hill:Hill", score="snip", options={"stop": 20}))
    with pytest.raises(UserError, match=r"search.strategy: 'hill:Hall' is not registered; .* Did you mean"):
        check_search(SearchConfig(strategy="hill:Hall", score="snip"))
    region = lab.region(lab.spaces("small"), {"params": [6, 13]})
    first, again = (build_strategy("hill:Hill", region, "accuracy", networks=60) for _ in range(2))
    lab.step(again)
    whole = lab.trace(first)
    later = build_strategy("hill:Hill", region, "accuracy", networks=60)
    later.load_state_dict(lab.saved(again))
    assert len(whole) == len(set(whole)) == 60 and lab.trace(later) == whole[10:]
    assert first.best.arch in region.space and {row["acceptance"] for row in first.stats} == {1.0}
    del sys.modules["hill"]


def test_what_is_not_an_answer_is_refused(lab: Any) -> None:
    strategy = lab.build("random", lab.region(lab.spaces("small")))
    for n in (0, -1, True, "a", 2.0):
        with pytest.raises(UserError, match="ask: n="):
            strategy.ask(n)
    for results in (None, [1.0], "ab", {"accuracy": 1}):
        with pytest.raises(UserError, match=r"tell: .* is not valid"):
            strategy.tell(results)
    with pytest.raises(UserError, match="space: expected a SearchSpace, got 'tiny'"):
        Region("tiny")  # type: ignore[arg-type]
    assert strategy.evaluations == 0
