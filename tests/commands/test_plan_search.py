"""What the plan says of a search: limits in words, and no more evaluations than there are networks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_tas.commands import build, plan
from lightning_tas.commands.compose import config_from
from lightning_tas.search.strategy import strategies


def rows(*arguments: str) -> dict[str, str]:
    """Quantity to value of the plan's table."""
    config = config_from("search", list(arguments))
    with torch.device("meta"):
        net = build.make_supernet(build.space(config), **build.network_options(config, build.data(config)))
    table = plan.search_table(config, net).splitlines()
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in table)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("[null,6M]", "at most 6,000,000"),
        ("[5.5M,null]", "at least 5,500,000"),
        ("[5M,7M]", "5,000,000 to 7,000,000"),
        ("[6102088,6102088]", "exactly 6,102,088"),
        ("null", None),
    ],
)
def test_limits_in_words(limits: str, said: str | None) -> None:
    found = rows("recipe=t_razor_tiny", "search.strategy=random", f"limits.params={limits}")["params"]
    assert found.endswith(" in the space" if said is None else f" in the space; limits: {said}") and "inf" not in found


@pytest.mark.parametrize(("name", "number"), [("pit_ti", 303), ("pit_xs", 215), ("pit_s", 184)])
def test_a_search_evaluates_no_more_networks_than_there_are(name: str, number: int) -> None:
    found = rows(f"recipe=t_razor_{name}")
    assert found["networks within the limits"] == str(number) and found["evaluations"] == f"{number} at most"


@pytest.mark.parametrize("strategy", strategies())
def test_evaluations_of_every_strategy(strategy: str) -> None:
    """The lesser of budget and networks within the limits."""
    small = rows("recipe=t_razor_pit_s", f"search.strategy={strategy}", "search.score=snip")
    assert int(small["evaluations"].split()[0].replace(",", "")) <= 184
    if strategy != "exhaustive":  # which refuses a space as large as this
        large = rows("recipe=t_razor_tiny", f"search.strategy={strategy}", "search.score=snip")
        assert int(large["evaluations"].split()[0].replace(",", "")) < 20_000


def test_the_plan_says_what_a_limit_on_latency_costs_and_does(clock: Any) -> None:
    """By the stopwatch of tests, whatever the machine."""
    found = rows("recipe=quickstart", "search.strategy=random", "search.score=snip", "limits.latency=[null,5]")
    reached = r"0\.\d+ to [01]\.\d+ ms from smallest to largest \(2 passes each\); limits: at most 5"
    assert re.fullmatch(reached, found["latency"])
    assert re.fullmatch(r"a batch of 1 on cpu, \d+ threads?", found["latency is of"])
    table = r"\d+ networks, 20 passes each: about \d+ s, at first; up to 3 times while its error is above 0.15, .*"
    assert re.fullmatch(table, found["latency table"])
    assert "networks within the other limits" in found and "not handed on" in found["networks found"]
