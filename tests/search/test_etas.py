"""ETAS: the paper's counts, ranks that belong to the pool, and how it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata

from lightning_tas.proxies.score import Score
from lightning_tas.search.strategy import build_strategy, run


def test_the_papers_search_evaluates_3_and_30_networks(lab: Any) -> None:
    asked: list[tuple[tuple[str, ...], int]] = []
    counter = iter(range(10**6))

    def scorer(archs: Any, needs: tuple[str, ...]) -> list[dict[str, Score]]:
        asked.append((needs, len(archs)))
        # Every true evaluation is better than all before, so nothing ends the search early.
        return [{n: Score(float(next(counter))) for n in needs} for _ in archs]

    strategy = build_strategy("etas", lab.region(lab.spaces("autoformer"), {"params": [40, 60]}), "accuracy")
    run(strategy, scorer)
    assert strategy.evaluations == strategy.budget == 33 and strategy.generation == 11
    filters, truths = asked[0::2], asked[1::2]
    assert [needs for needs, _ in filters] == [("ntkt", "sept")] * 11 and filters[0][1] == 500
    assert truths == [(("accuracy",), 3)] * 11
    assert all(90 <= n <= 100 for _, n in filters[1:])  # what an earlier pool showed is not scored again
    assert strategy.stopped == "budget: 10 iterations" and strategy.filtered == sum(n for _, n in filters)
    assert all({"ntkt", "sept", "accuracy"} == set(e.scores) for e in strategy.history)
    assert all(40 <= e.params <= 60 for e in strategy.history)


def test_ranks_are_those_of_the_pool(lab: Any) -> None:
    strategy = lab.build("etas", lab.region(lab.spaces("autoformer")), "accuracy", filter="ntsr", patience=99)
    pools = 0
    while not strategy.done:
        archs, needs = strategy.ask(), strategy.needs
        if needs == ("accuracy",):
            pool = strategy.space.decode(np.stack(strategy._pool))
            scores = [(lab.score(a, "ntkt"), lab.score(a, "sept")) for a in pool]
            valid = [i for i, pair in enumerate(scores) if all(s.valid for s in pair)]
            ranks = sum(rankdata([scores[i][part].value for i in valid]) for part in (0, 1)) / 2
            order = [valid[i] for i in np.argsort(-ranks, kind="stable")]
            assert archs == [pool[i] for i in order[:2]]
            pools += 1
        strategy.tell(lab.scorer(archs, needs))
    assert pools == 4


def test_parents_are_the_best_by_truth(lab: Any) -> None:
    strategy = lab.build("etas", lab.region(lab.spaces("autoformer")), "accuracy", filter="snip", patience=99)
    while not strategy.done:
        if strategy.needs == ("snip",) and strategy.generation:
            best = [strategy.history.rows[i].tolist() for i in strategy.history.top(2)]
            assert [row.tolist() for row in strategy._parents] == best
        strategy.tell(lab.scorer(strategy.ask(), strategy.needs))


@pytest.mark.parametrize("objective", ["accuracy", "dss_pp"])
def test_without_a_filter_the_choice_is_random_and_costs_nothing(lab: Any, objective: str) -> None:
    strategy = lab.build("etas", lab.region(lab.spaces("autoformer")), objective, filter=None, patience=99)
    sizes = []
    while not strategy.done:
        assert strategy.needs == strategy.objective.needs
        sizes.append(len(lab.step(strategy)))
    assert sizes == [2, 2, 2, 2] and strategy.filtered == 0


def test_a_best_that_stays_ends_the_search(lab: Any) -> None:
    strategy = build_strategy("etas", lab.region(lab.spaces("autoformer")), "accuracy", filter=None)
    values = iter([1.0, 2.0, 3.0, 4.0, *[0.0] * 100])
    run(strategy, lambda archs, needs: [{n: Score(next(values)) for n in needs} for _ in archs])
    # The best came in iteration 1; 2, 3, 4, 5 and 6 brought nothing.
    assert strategy.generation == 7 and strategy.stopped == "converged: no better network in 5 iterations"
    assert strategy.best.value == 4.0 and strategy.best.generation == 1
