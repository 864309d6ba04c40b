"""Options go with their strategy and limits with their space, along a recipe's lineage and on the command line."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from lightning_tas.commands.compose import config_from
from lightning_tas.commands.search_keys import belongings
from lightning_tas.errors import UserError

TINY = "recipe=t_razor_tiny"


def test_an_heir_of_the_same_strategy_keeps_options_and_adds_its_own() -> None:
    base = {"space": "a", "search": {"strategy": "evolution", "options": {"population": 50, "top": 10}}}
    heir = {"search": {"options": {"population": 20}}}
    assert belongings([base, heir], {}).options == {"population": 20, "top": 10}


def test_another_strategy_begins_with_its_own_defaults() -> None:
    base = {"search": {"strategy": "evolution", "options": {"population": 50}}}
    heir = {"search": {"strategy": "etas", "options": {"filter": "sept"}}}
    assert belongings([base, heir], {}).options == {"filter": "sept"}
    assert belongings([base], {"search.strategy": "random"}).options == {}
    assert belongings([base], {"search.strategy": "evolution"}).options == {"population": 50}


def test_options_of_the_command_line() -> None:
    assert config_from("search", [TINY]).search.options["generations"] == 160
    config = config_from("search", [TINY, "search.options={generations: 3}"])
    assert config.search.options["generations"] == 3 and config.search.options["population"] == 50
    config = config_from("search", [TINY, "search.options.generations=4"])
    assert config.search.options["generations"] == 4 and config.search.options["population"] == 50
    assert config_from("search", [TINY, "search.strategy=random"]).search.options is None


def test_limits_go_with_the_space(tmp_path: Path) -> None:
    assert config_from("search", [TINY]).limits.params == ["5M", "7M"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_from("search", ["recipe=t_razor_small"]).limits.params == ["20M", "23M"]
        assert config_from("search", ["recipe=prenas_tiny", "phases=[search]"]).limits.params is None
        given = config_from("search", [TINY, "space=pit_ti", "limits.params=[1M,2M]"]).limits.params
        assert given == ["1M", "2M"]
    with pytest.warns(UserWarning, match="limits of the recipe are dropped: they are of the space 'autoformer_tiny'"):
        assert config_from("search", [TINY, "space=pit_ti"]).limits.params is None
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [t_razor_tiny]\nspace: autoformer_small\n")
    assert config_from("search", [f"recipe={mine}"]).limits.params is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("search.strategy=evolutoin", "search.strategy: 'evolutoin' is not valid.*Did you mean 'evolution'"),
        ("search.score=dsspp", "search.score: 'dsspp' is not valid.*Did you mean 'dss_pp'"),
        ("search.options={populaton: 3}", "search.options: .*'populaton'.*Did you mean 'population'"),
        ("search.options={population: 0}", "search.options: population .*0"),
        ("search.options=3", "search.options: 3 is not valid; valid: a mapping"),
        ("search.racing_error=2", "search.racing_error: 2"),
        ("search.when=never", "search.when: 'never' is not valid"),
        ("limits.params=5", r"limits.params: 5 is one number"),
        ("limits.params=[7M,5M]", "limits.params: the lower bound, 7M, exceeds the upper one, 5M"),
        ("limits.param=[1,2]", "limits.param: no such key.*Did you mean 'limits.params'"),
        ("search.proxy_options={dss: {mode: papers}}", "search.proxy_options: .*papers.*paper"),
        ("search.proxy_options={snip: {a: 1}}", "search.proxy_options: 'snip' is not valid"),
    ],
)
def test_mistakes_are_named(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from("search", [TINY, argument])


def test_search_needs_a_recipe_or_a_supernet() -> None:
    with pytest.raises(UserError, match="recipe: nothing to search; name one with recipe=NAME"):
        config_from("search", [])
