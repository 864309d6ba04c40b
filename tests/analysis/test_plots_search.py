"""The picture of a search shows every network, the course, the front and the winners."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_tas.analysis.plots_search import search_figure
from lightning_tas.analysis.strategies import Curve, comparison_figure, comparison_table
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks.search_record import Found, generations_table, networks_table
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
    (scatter,) = search_figure([], [entry(0, 50.0, 1_000_000), gone], [], [], "accuracy").axes
    scored, given_up = scatter.collections
    assert scored.get_offsets().tolist() == [[1.0, 50.0]] and given_up.get_offsets().tolist() == [[2.0, 40.0]]
    assert given_up.get_label() == "given up by racing (estimates)"


def test_an_exact_search_has_no_course() -> None:
    """One panel, and a legend of what is there; none where nothing is."""
    (networks,) = search_figure([], [], [entry(0, 1.0, 1_000_000)], [], "snip").axes
    assert len(networks.collections) == 1 and networks.get_title() == "Networks"
    assert [text.get_text() for text in networks.get_legend().get_texts()] == ["handed on"]
    (empty,) = search_figure([], [], [], [], "snip").axes
    assert empty.get_legend() is None and [text.get_text() for text in empty.texts] == ["no network has a score"]


def test_one_generation_and_a_front_of_one_network_can_be_seen() -> None:
    """A course of one point says nothing, and a line through one point is not drawn."""
    one = [entry(0, 1.0, 1_000_000)]
    generations = [{"generation": 0, "evaluations": 1, "best": 1.0, "mean": 1.0}]
    (networks,) = search_figure(generations, one, one, one, "snip").axes
    assert networks.lines[0].get_label() == "Pareto front" and networks.lines[0].get_marker() == "o"
    figure = comparison_figure([Curve.of("random", 0, [1.0])], "snip", 1, "title")
    assert figure.axes[0].lines[0].get_marker() == "."
    assert figure.axes[0].get_legend().get_title().get_text() == "line: mean of the seeds, band: their range"


def test_a_course_without_a_score_says_so() -> None:
    generations = [{"generation": g, "evaluations": g, "best": None, "mean": None} for g in (1, 2)]
    course, networks = search_figure(generations, [], [], [], "snip").axes
    for axes in (course, networks):
        assert [text.get_text() for text in axes.texts] == ["no network has a score"]


@pytest.mark.parametrize(("score", "name"), [("accuracy", "top-1 [%]"), ("trained", "top-1 [%]"), ("dss_pp", "dss_pp")])
def test_accuracies_have_their_unit(score: str, name: str) -> None:
    """In every table and figure that a search, or a comparison of searches, shows."""
    one = entry(0, 97.2222, 1_000_000)
    rows = [{"generation": 0, "evaluations": 1, "best": 97.2, "mean": 97.0, "acceptance": 1.0, "unique": 1.0}]
    found = Found([one], rows, 1, "end", [one])
    assert [axes.get_ylabel() for axes in search_figure(2 * rows, [one], [one], [one], score).axes] == [name, name]
    assert f"  {name}  generation  id" in networks_table(found, score).splitlines()[0]
    assert f"best {name}  mean {name}" in generations_table(rows, score).splitlines()[0]
    curve = Curve.of("random", 0, [97.0])
    assert f"best {name} after 1" in comparison_table([curve], score, [1])
    assert comparison_figure([curve], score, 1, "title").axes[0].get_ylabel() == f"best {name} so far"


def test_a_search_without_generations_names_none() -> None:
    table = networks_table(Found([entry(0, 1.0, 1_000_000)], [], 1, "end", []), "snip")
    assert table.splitlines()[0].split() == ["network", "params", "[M]", "MACs", "[G]", "snip", "id"]


@pytest.mark.parametrize(
    ("number", "shown", "last"), [(161, 12, "(12 of 161 generations; all are in search.json)"), (12, 12, "11")]
)
def test_a_thinned_course_says_so(number: int, shown: int, last: str) -> None:
    rows = [
        {"generation": i, "evaluations": 50 * i + 50, "best": 1.0, "mean": 1.0, "acceptance": 1.0, "unique": 1.0}
        for i in range(number)
    ]
    lines = generations_table(rows, "snip").splitlines()
    assert lines[-1].startswith(last) or lines[-1].split()[0] == last
    cells = [line.split() for line in lines[2:] if not line.startswith("(")]
    assert len(cells) == shown and [cells[0][0], cells[-1][0]] == ["0", str(number - 1)]
