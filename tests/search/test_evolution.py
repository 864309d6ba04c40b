"""Evolutions: legal moves by the thousand, parents, and the optimum of a space that is small enough to know it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_tas.architecture import Architecture
from lightning_tas.proxies.score import Score
from lightning_tas.search.moves import Moves
from lightning_tas.search.strategy import Draft, run

MOVERS = ["evolution", "s3_evolution", "blockwise"]
# Upper limits that a third of random networks exceeds or more, by the sums of their codes.
LIMITS = {"autoformer": {"params": [36, 42]}, "pit": {"params": [14, 17]}, "s3": {"params": [70, 90]}}


def begun(lab: Any, name: str, space: str) -> Any:
    """A search that has its parents."""
    strategy = lab.build(name, lab.region(lab.spaces(space)), "dss_pp")
    strategy.tell(lab.scorer(strategy.ask(), strategy.needs))
    strategy.ask()
    return strategy


def moved(strategy: Any, n: int, kind: str) -> np.ndarray:
    """`n` mutants or children as a strategy makes them."""
    made: list[Any] = []
    draft, round_ = strategy.draft(), 0
    while len(made) < n:
        if kind == "mutant":
            made += [strategy._mutant(draft, slot, round_) for slot in range(50)]
        elif strategy.name == "blockwise":
            strategy.generation += 1
            made += [strategy._child(draft, a, b) for a, b in np.argwhere(strategy._partners).tolist()]
        else:
            made += [strategy._child(draft, slot, round_) for slot in range(50)]
        made, round_ = [row for row in made if row is not None], round_ + 1
    rows: np.ndarray = np.stack(made[:n])
    return rows


@pytest.mark.parametrize("space", ["autoformer", "pit", "s3"])
@pytest.mark.parametrize("name", MOVERS)
def test_moves_stay_in_the_space(lab: Any, name: str, space: str) -> None:
    check_moves(lab, name, space, 40)


@pytest.mark.slow
@pytest.mark.parametrize("space", ["autoformer", "pit", "s3"])
@pytest.mark.parametrize("name", MOVERS)
def test_ten_thousand_moves_stay_in_the_space(lab: Any, name: str, space: str) -> None:
    check_moves(lab, name, space, 1112)  # 9 x 1,112 of each kind


def check_moves(lab: Any, name: str, space: str, n: int) -> None:
    """Also of those that start at the limits, where most changes exceed them."""
    region = lab.region(lab.spaces(space), LIMITS[space])
    strategy = lab.build(name, region, "dss_pp")
    strategy.tell(lab.scorer(strategy.ask(), strategy.needs))
    strategy.ask()
    for kind in ("mutant", "child"):
        rows = moved(strategy, n, kind)
        assert region.space.valid(rows).all() and region.allowed(rows).all()
        assert not {row.tobytes() for row in rows} & strategy.history.seen


def test_what_predicates_or_limits_forbid_is_turned_down(lab: Any) -> None:
    space = lab.spaces("pit")
    region = lab.region(space, {"params": [10, 14]})
    good, seen, large = space.sample_codes(0, 200), space.encode(space.smallest()), space.encode(space.largest())
    good = good[region.allowed(good)][:2]
    bad = good[:1].copy()
    heads = [c for c, column in enumerate(space.columns) if column.name == "num_heads"]
    bad[0, heads] = [2, 1, 0]  # 8, 4 and 2 heads
    draft = Draft(Moves(region), {seen[0].tobytes()})
    offered = np.concatenate([bad, seen, large, good[:1], good[:1], good[1:]])
    assert draft.offer(offered) == [False, False, False, True, False, True]
    assert (draft.proposed, draft.distinct, len(draft)) == (6, 4, 2)
    assert draft.offer(space.sample_codes(1, 50), most=0) == [False] * 50 and draft.proposed == 6


def additive(arch: Architecture) -> float:
    """A score with one optimum, which is neither the smallest nor the largest network."""
    width = {16: 0.0, 32: 0.7}[int(arch.embed_dim)]
    blocks = sum(
        1.0 if (b.num_heads, b.mlp_ratio) == ((1, 2), (2, 1))[i % 2] else -0.5 for i, b in enumerate(arch.blocks)
    )
    return width + blocks - 0.2 * arch.depth


@pytest.mark.parametrize(
    "name",
    ["evolution", "blockwise", *(pytest.param(n, marks=pytest.mark.slow) for n in ("s3_evolution", "etas", "nsga2"))],
)
def test_evolution_finds_the_optimum_of_a_small_space(lab: Any, name: str) -> None:
    space = lab.spaces("small")
    truth = max(space.enumerate(), key=additive)
    assert truth not in (space.smallest(), space.largest())

    def scorer(archs: list[Architecture], needs: tuple[str, ...]) -> list[dict[str, Score]]:
        # The guide of block-wise evolution and the filter of ETAS know something, and not all.
        out = []
        for arch in archs:
            guide = lab.score(arch, "dss", flaws=False)
            out.append({n: Score(additive(arch)) if n == "accuracy" else guide for n in needs})
        return out

    found = 0
    for seed in range(3):
        more = {"iterations": 15, "patience": 15, "pool": 12, "filter": "dss"} if name == "etas" else {"generations": 7}
        strategy = lab.build(name, lab.region(space), "accuracy", seed, **more)
        run(strategy, scorer)
        assert strategy.evaluations <= 64 < space.size() / 2
        found += strategy.best.arch == truth
    assert found >= 2


def test_parents_are_the_best_of_all_history(lab: Any) -> None:
    strategy = lab.build("evolution", lab.region(lab.spaces("small")), "dss_pp")
    run(strategy, lab.scorer, lambda s: check_parents(s))


def check_parents(strategy: Any) -> None:
    before = strategy.history.top(4)
    if strategy.ask():
        assert [row.tobytes() for row in strategy._parents] == [strategy.history.rows[i].tobytes() for i in before]


def test_only_parents_of_one_depth_cross(lab: Any) -> None:
    strategy = begun(lab, "evolution", "autoformer")
    strategy._parents = strategy.space.encode(
        [Architecture.vit(192, [3] * 12, [3.5] * 12), Architecture.vit(240, [4] * 12, [4] * 12)]
    )
    strategy._depths = [(0,), (0,)]
    draft = strategy.draft()
    both = [strategy._child(draft, slot, 0) for slot in range(20)]
    for row in both:
        assert row[1] == 0 and {0, 1} >= set(row[2:26].tolist()) and 0 < row[2:26].sum() < 24
    # Without a partner of its depth a parent is mutated: most of its choices stay.
    strategy._depths = [(0,), (1,)]
    alone = [strategy._child(draft, slot, 0) for slot in range(20)]
    for row in alone:
        kept = [(row[2:26] == parent[2:26]).mean() for parent in strategy._parents]
        assert max(kept) > 0.6


def test_s3_without_elitism_looks_at_the_last_generation_only(lab: Any) -> None:
    region = lab.region(lab.spaces("s3"))
    kept, lost = (lab.build("s3_evolution", region, "accuracy", elitist=e, generations=6) for e in (True, False))
    run(kept, lab.scorer)

    def check(strategy: Any) -> None:
        last = [e for e in strategy.history if e.generation == strategy.generation - 1]
        assert strategy.best.generation == strategy.generation - 1
        assert strategy.best.value == max(e.value for e in last)
        if strategy.ask():
            rows = {strategy.history.rows[e.index].tobytes() for e in last}
            assert {row.tobytes() for row in strategy._parents} <= rows
            strategy.tell(lab.scorer(strategy.ask(1), strategy.needs))
            assert strategy.best.generation == strategy.generation - 1, "one told network is no generation"

    run_by_generation(lab, lost, check)
    assert kept.budget == lost.budget == lost.evaluations == kept.evaluations
    assert kept.best.value == max(e.value for e in kept.history)


def run_by_generation(lab: Any, strategy: Any, check: Any) -> None:
    """Like `run`, with a check that may tell a part of the next generation."""
    while not strategy.done:
        strategy.tell(lab.scorer(strategy.ask(), strategy.needs))
        check(strategy)
