"""Every search ends: on spaces of one network, exhausted ones, and those where nothing is within the limits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from lightning_tas.errors import UserError
from lightning_tas.limits import Region
from lightning_tas.search.strategy import run, strategies

NAMES = strategies()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("objective", ["accuracy", "dss_pp"])
def test_one_network(lab: Any, name: str, objective: str) -> None:
    strategy = lab.build(name, lab.region(lab.spaces("one")), objective)
    run(strategy, lambda archs, needs: [{n: lab.score(a, n, flaws=False) for n in needs} for a in archs])
    assert strategy.evaluations == 1 and strategy.best.arch == lab.spaces("one").smallest()
    assert "exhausted: all 1 networks" in strategy.stopped


@pytest.mark.parametrize("name", [n for n in NAMES if n != "etas"])
def test_an_exhausted_space_says_so_and_was_seen_once(lab: Any, name: str) -> None:
    region = lab.region(lab.spaces("small"), {"params": [8, 11]})
    plenty = {"random": {"networks": 500}, "exhaustive": {}}.get(name, {"generations": 100})
    strategy = lab.build(name, region, "dss_pp", **plenty)
    start = time.process_time()
    archs = lab.trace(strategy)
    assert len(archs) == len(set(archs)) == strategy.evaluations == region.size()
    assert strategy.budget > region.size() or name == "exhaustive"
    assert strategy.stopped == f"exhausted: all {region.size()} networks within the limits are evaluated"
    assert time.process_time() - start < 30


def test_etas_ends_on_an_exhausted_space(lab: Any) -> None:
    region = lab.region(lab.spaces("small"), {"params": [8, 10]})
    strategy = lab.build("etas", region, iterations=1000, patience=1000)
    lab.trace(strategy)
    assert strategy.evaluations == region.size() == strategy.filtered and "exhausted" in strategy.stopped


@pytest.mark.parametrize("name", NAMES)
def test_limits_that_nothing_meets_are_refused_at_once(lab: Any, name: str) -> None:
    with pytest.raises(UserError, match="limits"):
        lab.build(name, Region(lab.spaces("small"), {"params": [1, 2]}))


def test_exhaustive_sees_every_network_and_refuses_many(lab: Any) -> None:
    space = lab.spaces("small")
    region = lab.region(space, {"params": [8, 11]})
    archs = lab.trace(lab.build("exhaustive", region))
    inside = [a for a in space.enumerate() if 8 <= region.quantities(space.encode(a))["params"][0] <= 11]
    assert archs == inside
    with pytest.raises(UserError, match=rf"{len(inside)} networks .* cap={len(inside) - 1}"):
        lab.build("exhaustive", region, cap=len(inside) - 1)
    with pytest.raises(UserError, match=r"1,056,964,608 .*cap=20,000"):
        lab.build("exhaustive", lab.region(lab.spaces("autoformer"), {"params": [40, 50]}))


def test_random_search_takes_what_is_within_the_limits(lab: Any) -> None:
    region = Region(lab.spaces("autoformer"), {"params": [6e6, 6.2e6]})
    strategy = lab.build("random", region, networks=40)
    archs = lab.trace(strategy)
    assert len(archs) == len(set(archs)) == 40
    assert all(6e6 <= e.params <= 6.2e6 for e in strategy.history)


def test_stratified_random_search_spreads_parameters(lab: Any) -> None:
    region = lab.region(lab.spaces("s3"))

    def spread(**settings: Any) -> float:
        found = []
        for seed in range(3):
            strategy = lab.build("random", region, seed=seed, networks=60, batch=25, **settings)
            assert len(set(lab.trace(strategy))) == 60
            found.append(np.std([e.params for e in strategy.history]))
        return float(np.mean(found))

    assert spread(stratify=True) > 1.3 * spread()
