"""Block-wise evolution: ranks of blocks against naive ones, what mutants and children change, the swarm's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata

from lightning_tas.errors import UserError
from lightning_tas.proxies.score import Score
from lightning_tas.search.blockwise import _places
from lightning_tas.search.sites import Sites
from lightning_tas.search.strategy import run
from lightning_tas.spaces import Dimension, SearchSpace

STILL = {"depth_prob": 0.0, "embed_prob": 0.0}
TEN = {"population": 10, "top": 10, "mutations": 5, "crossovers": 5}


def begun(lab: Any, space: str, objective: str = "dss_pp", **settings: Any) -> Any:
    """A search whose next generation has its parents chosen."""
    strategy = lab.build("blockwise", lab.region(lab.spaces(space)), objective, **{**TEN, **settings})
    for _ in range(2):
        strategy.tell(lab.scorer(strategy.ask(), strategy.needs))
    assert strategy._begin()
    return strategy


def naive_ranks(strategy: Any, quantities: list[Any]) -> list[dict[tuple[int, int], float]]:
    """b of every valid network by (stage, block), from `rankdata` of each position over all of them."""
    table: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for i, e in enumerate(strategy.history):
        if not e.scores["dss"].valid:
            continue
        places = [(s, b) for s, depth in enumerate(e.arch.depths) for b in range(depth)]
        for q, quantity in enumerate(quantities):
            for place, number in zip(places, quantity(e.scores["dss"]), strict=True):
                table.setdefault((q, *place), []).append((i, number))
    out: list[dict[tuple[int, int], float]] = [{} for _ in strategy.history]
    for (_, s, b), entries in table.items():
        for (i, _), rank in zip(entries, rankdata([n for _, n in entries]) / len(entries), strict=True):
            out[i][s, b] = out[i].get((s, b), 0.0) + rank
    return out


@pytest.mark.parametrize("space", ["autoformer", "s3", "pit"])
@pytest.mark.parametrize("guide", ["dss_pp", "dss"])
def test_ranks_of_blocks_equal_naive_ones(lab: Any, space: str, guide: str) -> None:
    strategy = begun(lab, space, guide=guide)
    quantities: list[Any] = [lambda s: s.parts]
    if guide == "dss_pp":
        quantities = [lambda s: s.blocks["diversity"], lambda s: s.blocks["saliency"]]
    truth = naive_ranks(strategy, quantities)
    first = strategy.sites.first
    found = strategy.block_scores(range(len(strategy.history)))
    for row, expected in zip(found, truth, strict=True):
        positions = {first[s] + b: value for (s, b), value in expected.items()}
        assert {p for p in range(len(row)) if not np.isnan(row[p])} == set(positions)
        assert all(row[p] == pytest.approx(value, abs=1e-12) for p, value in positions.items())


def test_medians_of_positions_change_no_rank() -> None:
    numbers = np.random.default_rng(0).uniform(1, 2, 50)
    assert np.array_equal(rankdata(numbers), rankdata(numbers / np.median(numbers)))


def test_a_mutant_changes_its_lowest_blocks_and_each_of_them(lab: Any) -> None:
    strategy = begun(lab, "autoformer", pso=False, **STILL)
    rows = {strategy.history.rows[i].tobytes(): p for p, i in enumerate(strategy._slots)}
    blocks = [site.columns for site in strategy.sites.sites]
    assert len(blocks) == 14
    for slot in range(40):
        rng = strategy.rng("mutant", slot, 0)
        place = int(rng.integers(len(strategy._slots)))
        parent = strategy.history.rows[strategy._slots[place]]
        assert rows[parent.tobytes()] == place
        child = strategy._mutant(strategy.draft(), slot, 0)
        scores = strategy._site_scores[place]
        depth = int((~np.isnan(scores)).sum())
        lowest = np.argsort(scores)[: max(1, round(0.3 * depth))]
        changed = [j for j, columns in enumerate(blocks) if (child[columns] != parent[columns]).any()]
        assert changed == sorted(lowest.tolist())
        assert np.array_equal(child[:2], parent[:2])


def test_depth_and_width_move_by_their_own_probability(lab: Any) -> None:
    strategy = begun(lab, "autoformer", pso=False)
    moved = 0
    for slot in range(200):
        place = int(strategy.rng("mutant", slot, 0).integers(len(strategy._slots)))
        moved += strategy._mutant(strategy.draft(), slot, 0)[0] != strategy.history.rows[strategy._slots[place]][0]
    # Redrawn with probability .4 among three widths.
    assert pytest.approx(moved / 200, abs=0.12) == 0.4 * 2 / 3


@pytest.mark.parametrize("donor", ["same", "best"])
def test_a_child_takes_over_the_blocks_that_are_better(lab: Any, donor: str) -> None:
    strategy = begun(lab, "autoformer", pso=False, donor=donor)
    sites, scores = strategy.sites.sites, strategy._site_scores
    pairs = 0
    for a, b in np.argwhere(strategy._partners).tolist():
        first, second = (strategy.history.rows[strategy._slots[i]] for i in (a, b))
        better = [j for j in range(len(sites)) if scores[a][j] < scores[b][j]]
        chosen = sorted(better, key=lambda j, a=a: scores[a][j])
        chosen = chosen[: max(1, round(0.3 * int((~np.isnan(scores[a])).sum())))]
        child = strategy._child(strategy.draft(), a, b)
        if not chosen:
            assert child is None
            continue
        expected = first.copy()
        for j in chosen:
            source = j if donor == "same" else int(np.nanargmax(scores[b]))
            expected[sites[j].columns] = second[sites[source].columns]
        if expected.tobytes() in strategy.history.seen:  # a known network is no child: others of the pair are
            assert child is None or child.tobytes() not in strategy.history.seen
            continue
        assert np.array_equal(child, expected)
        pairs += 1
    assert pairs > 10


def test_any_blocks_may_change(lab: Any) -> None:
    strategy = begun(lab, "autoformer", pso=False, changed="any", exchanged="any", **STILL)
    sites, taken, changed = strategy.sites.sites, set(), set()
    for slot in range(30):
        place = int(strategy.rng("mutant", slot, 0).integers(len(strategy._slots)))
        parent, child = strategy.history.rows[strategy._slots[place]], strategy._mutant(strategy.draft(), slot, 0)
        different = [j for j, site in enumerate(sites) if (child[site.columns] != parent[site.columns]).any()]
        assert len(different) == strategy._count[place]
        changed |= set(different)
    for a, b in np.argwhere(strategy._partners)[:30].tolist():
        first, second = (strategy.history.rows[strategy._slots[i]] for i in (a, b))
        child = strategy._child(strategy.draft(), a, b)
        for j, site in enumerate(sites):
            if child is not None and (child[site.columns] != first[site.columns]).any():
                assert np.array_equal(child[site.columns], second[site.columns])
                taken |= {bool(strategy._site_scores[a][j] < strategy._site_scores[b][j])}
    assert len(changed) > 10 and taken == {True, False}


def test_partners_have_the_same_width_where_there_are_any(lab: Any) -> None:
    strategy = begun(lab, "autoformer")
    widths = [int(strategy.history.rows[i][0]) for i in strategy._slots]
    for a, partners in enumerate(strategy._partners):
        alike = [b for b, w in enumerate(widths) if b != a and w == widths[a]]
        assert np.flatnonzero(partners).tolist() == (alike or [b for b in range(len(widths)) if b != a])


def test_where_blocks_have_no_choices_their_stage_changes(lab: Any) -> None:
    strategy = begun(lab, "pit", pso=False, **STILL)
    sites = strategy.sites
    names = [c.name for c in strategy.space.columns]
    assert sites.kind == "stage"
    assert [[names[c] for c in site.columns] for site in sites.sites] == [["num_heads", "depth"]] * 3
    assert [names[c] for c in sites.others] == ["base_dim", "mlp_ratio"]
    # A stage has the mean score of its blocks.
    blocks = strategy.block_scores(strategy._slots)
    for row, means in zip(blocks, strategy._site_scores, strict=True):
        parts = [row[0:3], row[3:11], row[11:17]]
        assert means == pytest.approx([np.nanmean(part) for part in parts])
    for slot in range(30):
        place = int(strategy.rng("mutant", slot, 0).integers(len(strategy._slots)))
        parent, child = strategy.history.rows[strategy._slots[place]], strategy._mutant(strategy.draft(), slot, 0)
        lowest = sites.sites[int(np.argmin(strategy._site_scores[place]))]
        assert strategy.space.valid(child[None])[0]
        assert (child[lowest.columns] != parent[lowest.columns]).any() and np.array_equal(child[:2], parent[:2])


def test_where_stages_have_no_choices_the_network_changes(lab: Any) -> None:
    space = SearchSpace("net", "any", [Dimension("width", "network", (1, 2, 3)), Dimension("depth", "stage", (2,))])
    sites = Sites(space)
    assert sites.kind == "network" and len(sites.sites) == 1 and not sites.others
    strategy = lab.build("blockwise", lab.region(space), "dss_pp")
    assert len(lab.trace(strategy)) == 3


def test_the_velocity_is_eq_12_and_13(lab: Any) -> None:
    strategy = lab.build("blockwise", lab.region(lab.spaces("autoformer")), "dss_pp", generations=5, **TEN)
    velocity, best = np.zeros(10), np.zeros(10)
    while not strategy.done:
        strategy.tell([{"dss": lab.score(arch, "dss", flaws=False)} for arch in strategy.ask()])
        if strategy.done:
            break
        # The generation that is pending has been proposed with these.
        told = strategy.history.values
        x = np.array([(told < told[i]).sum() + ((told == told[i]).sum() - 1) / 2 for i in strategy._slots])
        x /= len(told) - 1
        best = np.maximum(best, x)
        u1, u2 = strategy.rng("velocity").random((2, 10))
        velocity = 0.7 * velocity + 1.5 * u1 * (best - x) + 1.5 * u2 * (1 - x)
        assert strategy._velocity == pytest.approx(velocity.tolist()) and strategy._own_best == best.tolist()
        share = np.clip(0.1 + 0.4 * np.maximum(velocity, 0), 0.1, 0.6)
        depths = (~np.isnan(strategy._site_scores)).sum(axis=1)
        assert strategy._count == [max(1, int(s * d + 0.5)) for s, d in zip(share, depths, strict=True)]
        assert sorted(strategy._slots) == sorted(strategy.history.top(10, range(10 * strategy.generation)))


def test_members_keep_their_place_in_the_population() -> None:
    assert _places([], [5, 3, 9]) == [5, 3, 9]
    assert _places([5, 3, 9], [9, 7, 5]) == [5, 7, 9]
    assert _places([5, 3], [9, 7, 5]) == [5, 9, 7]


CHANGES: list[dict[str, Any]] = [
    {"pso": False},
    {"pso_noise": False},
    {"donor": "best"},
    {"final": "population"},
    {"changed": "any"},
    {"exchanged": "any"},
]


@pytest.mark.parametrize("change", CHANGES)
def test_switches_leave_the_budget_as_it_is(lab: Any, change: dict[str, Any]) -> None:
    one = lab.build("blockwise", lab.region(lab.spaces("autoformer")), "dss_pp", **TEN)
    other = lab.build("blockwise", lab.region(lab.spaces("autoformer")), "dss_pp", **TEN, **change)
    first, second = lab.trace(one), lab.trace(other)
    assert one.budget == other.budget == len(first) == len(second) == 40
    assert first[:10] == second[:10]
    if "final" in change:
        assert first == second
        last = {e.index for e in other.history if e.generation == 3} | set(other._slots)
        assert other.best.index in last and {e.index for e in other.top(100)} <= last
    else:
        assert first != second


@pytest.mark.parametrize(
    ("objective", "guide", "needs"),
    [
        ("dss_pp", None, ("dss",)),
        ("dss", None, ("dss",)),
        ("accuracy", None, ("accuracy", "dss")),
        ("snip", "snip", ("snip",)),
        ("ntsr", None, ("ntkt", "sept", "dss")),
    ],
)
def test_any_objective_with_a_guide(lab: Any, objective: str, guide: str | None, needs: tuple[str, ...]) -> None:
    strategy = lab.build("blockwise", lab.region(lab.spaces("small")), objective, guide=guide)
    assert strategy.needs == needs
    assert strategy._quantities == (("diversity", "saliency") if objective not in ("dss", "snip") else ("",))
    run(strategy, lab.scorer)
    assert strategy.evaluations == strategy.budget


def test_a_score_without_blocks_is_refused(lab: Any) -> None:
    strategy = lab.build("blockwise", lab.region(lab.spaces("small")), "dss_pp")
    arch = strategy.ask()[0]
    with pytest.raises(UserError, match=rf"dss in result 0 has diversity numbers of 0 blocks, .* has {arch.depth}"):
        strategy.tell([{"dss": Score(1.0, extras={"diversity": 1.0, "saliency": 1.0})}])
