"""NSGA-II: fronts and crowding against their definitions, and the front of a small space."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_tas.architecture import Architecture
from lightning_tas.proxies.score import Score
from lightning_tas.search.nsga2 import crowding, fronts, nondominated
from lightning_tas.search.strategy import run

# Few values, so that many points are equal or tie in a coordinate.
points = st.integers(1, 3).flatmap(
    lambda m: st.integers(0, 12).flatmap(lambda n: arrays(np.float64, (n, m), elements=st.integers(0, 3)))
)


def dominates(a: Any, b: Any) -> bool:
    return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))


@settings(max_examples=80, deadline=None)
@given(points)
def test_fronts_equal_the_definition(values: np.ndarray) -> None:
    left, naive = list(range(len(values))), []
    while left:
        best = [i for i in left if not any(dominates(values[j], values[i]) for j in left)]
        naive.append(best)
        left = [i for i in left if i not in best]
    assert [front.tolist() for front in fronts(values)] == naive
    assert nondominated(values).tolist() == (naive[0] if naive else [])


def test_crowding_is_the_span_between_neighbours() -> None:
    values = np.array([[0.0, 10.0], [1.0, 7.0], [4.0, 6.0], [5.0, 0.0]])
    assert crowding(values).tolist() == [np.inf, 4 / 5 + 4 / 10, 4 / 5 + 7 / 10, np.inf]
    assert crowding(np.ones((1, 2))).tolist() == [np.inf]
    assert np.isinf(crowding(np.ones((3, 2)))).sum() == 2  # equal points: no span, no distance


def value(arch: Architecture) -> float:
    return float(sum(b.num_heads * b.mlp_ratio for b in arch.blocks) + (arch.embed_dim == 32) * (arch.depth == 2))


def test_the_front_of_a_small_space_is_found(lab: Any) -> None:
    space, region = lab.spaces("small"), lab.region(lab.spaces("small"))
    every = list(space.enumerate())
    costs = region.quantities(space.encode(every))["params"]
    truth = np.stack([[value(a) for a in every], -costs], axis=1)
    best = {tuple(truth[i]) for i in nondominated(truth)}
    strategy = lab.build("nsga2", region, "accuracy", generations=9, population=10)
    run(strategy, lambda archs, needs: [{n: Score(value(a)) for n in needs} for a in archs])
    front = strategy.front()
    assert len(front) > 3 and [e.value for e in front] == sorted((e.value for e in front), reverse=True)
    found = {(e.value, -e.params) for e in front}
    assert len(found & best) >= 0.9 * len(best)
    assert strategy.evaluations == 100 < space.size()
    assert strategy.best.value == front[0].value


def test_several_proxies_at_once(lab: Any) -> None:
    settings: dict[str, Any] = {"objectives": ["dss_pp", "accuracy"], "minimise": ["macs"]}
    strategy = lab.build("nsga2", lab.region(lab.spaces("small")), "snip", **settings)
    assert strategy.needs == ("snip", "dss", "accuracy")
    run(strategy, lab.scorer)
    rows = [e.scores for e in strategy.history]
    columns = [strategy.objective.of(n).values(rows) for n in ("snip", "dss_pp", "accuracy")]
    table = np.stack([*columns, [-e.macs for e in strategy.history]], axis=1)
    assert np.array_equal(strategy.points(), table)
    valid = [i for i in range(len(table)) if np.isfinite(table[i]).all()]
    naive = {i for i in valid if not any(dominates(table[j], table[i]) for j in valid)}
    assert {e.index for e in strategy.front()} == naive
