"""Values of objectives: plain ones as told, ranked ones ranked anew among all networks told, dropped ones none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from lightning_tas.errors import UserError
from lightning_tas.proxies.score import Score
from lightning_tas.search.history import History, pack, unpack
from lightning_tas.search.objective import Objective
from lightning_tas.search.strategy import run
from lightning_tas.spaces import resolve_space


def test_needs_of_objectives() -> None:
    assert Objective.of("accuracy").needs == ("accuracy",) and not Objective.of("accuracy").ranked
    assert Objective.of("dss_pp").needs == ("dss",) and Objective.of("dss_pp").ranked
    assert Objective.of("ntsr").needs == ("ntkt", "sept") and Objective.of("te_nas").ranked
    assert Objective.of("snip").needs == ("snip",) and Objective.of(Objective.of("snip")) == Objective.of("snip")


@pytest.mark.parametrize("name", ["dss_pp", "ntsr", "accuracy"])
def test_all_networks_told_so_far_are_ranked_anew(lab: Any, name: str) -> None:
    strategy = lab.build("evolution", lab.region(lab.spaces("small")), name, generations=5)
    seen = []

    def compare(strategy: Any) -> None:
        rows = strategy.history.scores
        # Naive: the formula on all valid networks at once.
        valid = [all(row[n].valid and not row[n].extras.get("dropped") for n in strategy.needs) for row in rows]
        ok = [row for row, v in zip(rows, valid, strict=True) if v]
        if name == "accuracy":
            truth = [row["accuracy"].value for row in ok]
        elif name == "ntsr":
            truth = sum(rankdata([row[n].value for row in ok]) for n in ("ntkt", "sept")) / 2
        else:
            truth = sum(rankdata([row["dss"].extras[n] for row in ok]) for n in ("diversity", "saliency"))
        values = strategy.history.values
        assert np.isneginf(values[~np.array(valid)]).all()
        # DSS++ tells equal sums of ranks apart by less than a half.
        found = np.floor(2 * values[valid]) / 2 if name == "dss_pp" else values[valid]
        assert np.array_equal(found, truth)
        assert strategy.stats[-1]["best"] == values.max() == strategy.best.value
        seen.append(values[0])

    run(strategy, lab.scorer, compare)
    assert len(seen) == 6
    if Objective.of(name).ranked:
        assert len(set(seen)) > 1, "the first network's rank changes with those that follow"


def test_a_missing_score_is_named() -> None:
    with pytest.raises(UserError, match=r"ntsr: no score of sept was told; got \['ntkt'\]"):
        Objective.of("ntsr").values([{"ntkt": Score(1.0)}])


def test_scores_survive_json() -> None:
    full = Score(1.5, (0.5, 1.0), True, "", 0.25, {"a": float("inf")}, {"diversity": (0.1, 0.2)})
    assert unpack(pack(full)) == full
    bad = Score.invalid("not finite", 0.5)
    assert unpack(pack(bad)) == bad and pack(bad)["value"] == "-inf"


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=40), st.integers(0, 99), st.integers(1, 45))
def test_equals_are_ordered_by_id_whatever_came_first(values: list[float], seed: int, k: int) -> None:
    space = resolve_space("autoformer_tiny")
    rows = space.sample_codes(seed, len(values))
    ids = [arch.id for arch in space.decode(rows)]
    naive = sorted(range(len(rows)), key=lambda i: (-values[i], ids[i]))
    for order in (range(len(rows)), reversed(range(len(rows)))):
        places = list(order)
        history = History(space, Objective.of("snip"))
        for i in places:
            history.add(rows[i], {"snip": Score(values[i])}, {"params": 1, "macs": 1}, 0)
        found = [places[j] for j in history.top(k)]
        assert found == naive[:k] and [places[j] for j in history.top()] == naive
        some = [j for j in range(len(places)) if places[j] % 2]
        assert [places[j] for j in history.top(k, some)] == [i for i in naive if i % 2][:k]
