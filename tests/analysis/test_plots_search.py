"""The picture of a search shows every network, the course, the front and the winners."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_tas.analysis.plots_search import search_figure
from lightning_tas.architecture import Architecture
from lightning_tas.proxies.score import Score
from lightning_tas.search.history import Entry


def entry(index: int, value: float, params: int) -> Entry:
    return Entry(Architecture.vit(16, [1], [2]), value, {}, params, 10 * params, 0, index)


def test_a_search_is_drawn() -> None:
    history = [entry(0, 1.0, 1_000_000), entry(1, 3.0, 2_000_000), entry(2, -math.inf, 3_000_000)]
    generations = [
        {"generation": 0, "evaluations": 2, "best": None, "mean": None},
        {"generation": 1, "evaluations": 3, "best": 3.0, "mean": 2.0},
    ]
    course, scatter = search_figure(generations, history, history[1:2], history[:2], "snip").axes
    best, mean = course.lines
    assert list(best.get_xdata()) == [2, 3] and math.isnan(best.get_ydata()[0]) and best.get_ydata()[1] == 3
    assert mean.get_ydata()[1] == 2 and course.get_ylabel() == "snip"
    scored, winners = scatter.collections
    assert scored.get_offsets().tolist() == [[1.0, 1.0], [2.0, 3.0]]  # what is invalid has no place
    assert winners.get_offsets().tolist() == [[2.0, 3.0]]
    assert scatter.lines[0].get_xydata().tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert scatter.get_xlabel() == "parameters [M]"


def test_what_racing_gave_up_is_drawn_apart() -> None:
    scores = {"accuracy": Score(40.0, extras={"dropped": 1.0})}
    gone = replace(entry(1, -math.inf, 2_000_000), scores=scores, estimate=40.0)
    _, scatter = search_figure([], [entry(0, 50.0, 1_000_000), gone], [], [], "accuracy").axes
    scored, given_up = scatter.collections
    assert scored.get_offsets().tolist() == [[1.0, 50.0]] and given_up.get_offsets().tolist() == [[2.0, 40.0]]
    assert given_up.get_label() == "given up by racing (estimates)"


def test_an_exact_search_has_no_course() -> None:
    course, scatter = search_figure([], [], [entry(0, 1.0, 1_000_000)], [], "snip").axes
    assert not course.lines and len(scatter.collections) == 1
