"""One trace of candidates, whatever the interruptions, the pieces and the global random state; other seeds, another."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tas.errors import UserError
from lightning_tas.search.strategy import run, strategies

NAMES = sorted(strategies())
# Strategy, objective and space: ranked and plain objectives, spaces with and without choices in blocks.
QUICK = [
    *((name, "accuracy", "small") for name in NAMES),
    ("blockwise", "dss_pp", "pit"),
    ("s3_evolution", "dss_pp", "s3"),
    ("etas", "dss_pp", "small"),
]
MORE = [
    (name, objective, space)
    for name in NAMES
    for objective, space in (("dss_pp", "small"), ("dss_pp", "pit"), ("accuracy", "s3"))
    if (name != "exhaustive" or space == "small") and (name, objective, space) not in QUICK
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]
LIMITS = {"small": {"params": [6, 14]}, "pit": {"params": [14, 20]}, "s3": {"params": [70, 100]}}


def build(lab: Any, case: tuple[str, str, str], seed: int = 0, **settings: Any) -> Any:
    name, objective, space = case
    return lab.build(name, lab.region(lab.spaces(space), LIMITS[space]), objective, seed, **settings)


@pytest.mark.parametrize("case", CASES)
def test_a_search_is_a_function_of_its_seed(lab: Any, case: tuple[str, str, str]) -> None:
    first = build(lab, case)
    trace = lab.trace(first)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    again = build(lab, case)
    assert lab.trace(again) == trace and again.stats == first.stats and again.top(5) == first.top(5)
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]
    if case[0] != "exhaustive":
        assert lab.trace(build(lab, case, seed=1)) != trace


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_new_allowed_and_counted(lab: Any, case: tuple[str, str, str]) -> None:
    strategy = build(lab, case)
    generations: list[int] = []
    run(strategy, lab.scorer, lambda s: generations.append(s.generation))
    history, codes = strategy.history, np.stack(strategy.history.rows)
    assert strategy.done and strategy.stopped and strategy.ask() == []
    assert len({row.tobytes() for row in codes}) == len(history) == strategy.evaluations <= strategy.budget
    assert strategy.space.valid(codes).all() and strategy.region.allowed(codes).all()
    assert generations == list(range(1, strategy.generation + 1)) == [row["generation"] + 1 for row in strategy.stats]
    assert [e.index for e in history] == list(range(len(history)))
    entries = list(history)
    assert [e.params for e in entries] == strategy.region.quantities(codes)["params"].tolist()
    assert strategy.space.encode([e.arch for e in entries]).tolist() == codes.tolist()
    for row in strategy.stats:
        assert 0 <= row["acceptance"] <= row["unique"] <= 1
    # The winner is the greatest of all values, and no network without one is near it.
    values = strategy.objective.values([e.scores for e in entries])
    assert strategy.best.value == max(values) == values[strategy.best.index]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = [i for i in order if values[i] > -np.inf]
    assert [e.index for e in strategy.top(10)] == order[:10]
    assert len(strategy.top(10**6)) == len(order)


def test_invalid_and_dropped_networks_count_but_never_win(lab: Any) -> None:
    strategy = build(lab, ("evolution", "accuracy", "small"), population=20, generations=4)
    lab.trace(strategy)
    scores = [e.scores["accuracy"] for e in strategy.history]
    gone = {i for i, s in enumerate(scores) if not s.valid or s.extras.get("dropped")}
    assert any(not s.valid for s in scores) and any(s.extras.get("dropped") for s in scores)
    top = strategy.top(len(scores))
    assert {e.index for e in top} == set(range(len(scores))) - gone
    assert max(s.value for s in scores) > strategy.best.value, "the dropped ones would have won"


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(QUICK), st.sampled_from([1, 3, 7, None]), st.sampled_from([1, 2, None]))
def test_pieces_make_no_difference(lab: Any, case: tuple[str, str, str], asked: int | None, told: int | None) -> None:
    whole, pieces = build(lab, case), build(lab, case)
    trace = lab.trace(whole)
    assert lab.trace(pieces, asked, told) == trace
    assert pieces.stats == whole.stats and list(pieces.history) == list(whole.history)


def interrupted(lab: Any, case: tuple[str, str, str], steps: list[int], asking: bool) -> None:
    """Save and load after each of `steps`, networks told at once; compare with a search that was left alone."""
    whole, now = build(lab, case), build(lab, case)
    trace, found = lab.trace(whole), []
    for n in steps:
        found += lab.step(now, n)
        if asking:
            assert now.ask() == now.ask()  # what was asked and not told will be asked again
        later = build(lab, case)
        later.load_state_dict(lab.saved(now))
        assert later.state_dict() == now.state_dict()
        now = later
    found += lab.trace(now)
    assert found == trace
    assert now.state_dict() == whole.state_dict() and list(now.history) == list(whole.history)
    assert now.best == whole.best and now.stopped == whole.stopped


STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.sampled_from(QUICK), STEPS, st.booleans())
def test_a_saved_search_continues_bit_for_bit(lab: Any, case: Any, steps: list[int], asking: bool) -> None:
    interrupted(lab, case, steps, asking)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*QUICK, *MORE]), STEPS, st.booleans())
def test_any_saved_search_continues_bit_for_bit(lab: Any, case: Any, steps: list[int], asking: bool) -> None:
    interrupted(lab, case, steps, asking)


@pytest.mark.parametrize("case", CASES)
def test_a_search_saved_at_every_generation_continues(lab: Any, case: tuple[str, str, str]) -> None:
    whole, states = build(lab, case), []
    states.append(lab.saved(whole))
    run(whole, lab.scorer, lambda s: states.append(lab.saved(s)))
    for state in states:
        later = build(lab, case)
        later.load_state_dict(state)
        run(later, lab.scorer)
        assert later.state_dict() == whole.state_dict()


def test_a_state_of_another_search_is_refused(lab: Any) -> None:
    state = lab.saved(build(lab, QUICK[0]))
    with pytest.raises(UserError, match="has seed 0, this search 1"):
        build(lab, QUICK[0], seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="settings"):
        build(lab, QUICK[0], population=9).load_state_dict(state)
    with pytest.raises(UserError, match=r"limits .*6"):
        lab.build(QUICK[0][0], lab.region(lab.spaces("small")), QUICK[0][1]).load_state_dict(state)


def test_a_state_of_other_moves_is_refused(lab: Any) -> None:
    state = lab.saved(build(lab, QUICK[0]))
    for version in (None, 1, 3):
        with pytest.raises(UserError, match="whose moves were others"):
            build(lab, QUICK[0]).load_state_dict({**state, "version": version})


def test_what_is_told_must_fit_what_was_asked(lab: Any) -> None:
    strategy = build(lab, ("evolution", "accuracy", "small"))
    archs = strategy.ask(3)
    with pytest.raises(UserError, match="lacks the score of accuracy"):
        strategy.tell([{"accuracy": lab.score(archs[0], "accuracy")}, {"snip": lab.score(archs[1], "snip")}])
    assert strategy.evaluations == 0, "a refused call takes nothing in"
    with pytest.raises(UserError, match="9 results for 8 networks"):
        strategy.tell(lab.scorer([*strategy.ask(), archs[0]], ["accuracy"]))
