"""Options go with their strategy and limits with their space, along a recipe's lineage and on the command line."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from lightning_tas.commands.compose import config_from
from lightning_tas.commands.names import check
from lightning_tas.commands.search_keys import belongings
from lightning_tas.errors import UserError
from lightning_tas.search.settings import read_settings
from lightning_tas.search.strategy import strategy_class

TINY = "recipe=t_razor_tiny"


def test_an_heir_of_the_same_strategy_keeps_options_and_adds_its_own() -> None:
    base = {"space": "a", "search": {"strategy": "evolution", "options": {"population": 50, "top": 10}}}
    heir = {"search": {"options": {"population": 20}}}
    assert belongings([base, heir], {}).options == {"population": 20, "top": 10}


@pytest.mark.parametrize(
    ("recipe", "given", "settings"),
    [
        ("autoformer_tiny", "{population: 4}", {"population": 4, "top": 4, "mutants": 2, "children": 2}),
        ("autoformer_tiny", "{population: 20}", {"population": 20, "top": 10, "mutants": 10, "children": 10}),
        ("autoformer_tiny", "{mutations: 40}", {"population": 50, "mutants": 40, "children": 10}),
        ("autoformer_tiny", "{population: 4, top: 9, crossovers: 1}", {"top": 9, "mutants": 3, "children": 1}),
        ("t_razor_tiny", "{population: 4}", {"population": 4, "top": 4, "mutants": 2, "children": 2}),
        ("etas_tiny", "{pool: 2}", {"pool": 2, "keep": 2, "first_pool": 500, "first": 3}),
        ("etas_fashion_mnist", "{first_pool: 2}", {"first_pool": 2, "first": 2, "keep": 3}),
    ],
)
def test_sizes_that_were_not_given_follow_from_those_that_were(
    recipe: str, given: str, settings: dict[str, int]
) -> None:
    single = [f"search.options.{one.strip().replace(': ', '=')}" for one in given[1:-1].split(",")]
    for arguments in ([f"search.options={given}"], single):
        search = config_from("fit", [f"recipe={recipe}", *arguments]).search
        read = read_settings(str(search.strategy), strategy_class(str(search.strategy)).Settings, search.options)
        assert {name: getattr(read, name) for name in settings} == settings


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


def test_groups_are_read_like_single_keys() -> None:
    group = "search={strategy: random, options: {networks: 3}}"
    for given in ([group, "limits={params: [1M, 6M]}"], [group, "limits.params=[1M,6M]"]):
        config = config_from("search", [TINY, *given])
        assert config.search.options == {"networks": 3} and config.limits.params == ["1M", "6M"]
    with pytest.raises(UserError, match=r"limits.params: 5 is one number"):
        config_from("search", [TINY, "limits={params: 5}"])


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
    "wrong", ["space=autoformer_tny", "space={extends: autoformer_tny}", "space={depth: 3}", "space=a/b.yaml"]
)
@pytest.mark.parametrize("remark", [[], ["search.when=fit_start"]])
def test_a_wrong_space_is_told_before_what_it_entails(wrong: str, remark: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=r"^space: "):
            config_from("search", [TINY, wrong, *remark])


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
        ("search.init=nrmal", "search.init: 'nrmal' is not valid.*Did you mean 'normal'"),
    ],
)
def test_mistakes_are_named(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from("search", [TINY, argument])


def test_smoke_says_that_it_drops_limits() -> None:
    with pytest.warns(UserWarning, match="smoke=true: a recipe's limits are dropped") as caught:
        assert config_from("search", [TINY, "smoke=true"]).limits.params is None
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    with pytest.warns(UserWarning, match="smoke=true"):
        assert config_from("search", [TINY, "smoke=true", "limits.params=[1k,2k]"]).limits.params == ["1k", "2k"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_from("search", ["recipe=prenas_tiny", "smoke=true", "search.strategy=random"])
        config_from("search", [TINY])


def test_search_needs_a_recipe_or_a_supernet() -> None:
    with pytest.raises(UserError, match="recipe: nothing to search; name one with recipe=NAME"):
        config_from("search", [])


@pytest.mark.parametrize("names", ["5", "snip", "[[snip]]", "[5]", "null"])
@pytest.mark.parametrize("key", ["objectives", "minimise"])
def test_lists_of_names_are_lists_of_names(key: str, names: str) -> None:
    with pytest.raises(UserError, match=rf"search.options: .*{key}: .* is not valid; valid: a list of names"):
        config_from("search", [TINY, "search.strategy=nsga2", f"search.options={{{key}: {names}}}"])


@pytest.mark.parametrize("score", ["accuracy", "trained"])
def test_the_test_set_chooses_nothing(score: str) -> None:
    config = config_from("search", [TINY, f"search.score={score}", "data.search_val=0", "ckpt=."])
    with pytest.raises(UserError, match=r"data.search_val: 0 holds no images out"):
        check("search", config)


@pytest.mark.parametrize(
    ("command", "given", "reason"),
    [
        ("search", ["search.when=fit_start"], "the search is a phase of its own"),
        ("fit", ["search.every_n_epochs=2"], "the search is a phase of its own"),
        ("fit", ["search.every_n_epochs=2", "phases=[supernet]"], "search.when is fit_end"),
        ("search", ["search.racing=false"], "it is of accuracy, and networks are judged by dss_pp, dss"),
        ("search", ["search.eval_images=9"], "it is of accuracy"),
        ("search", ["search.racing_top=9", "search.score=accuracy", "search.racing=false"], "search.racing is false"),
        ("search", ["search.train_epochs=2"], "it is of search.score=trained"),
        ("search", ["search.init=normal", "search.strategy=random", "search.score=accuracy"], "it is of proxies"),
        ("search", ["limits.latency_batch=2"], "limits.latency limits nothing"),
    ],
)
def test_settings_without_effect_are_named(command: str, given: list[str], reason: str) -> None:
    key = given[0].partition("=")[0]
    with pytest.warns(UserWarning, match=f"^{key} is ignored: {reason}"):
        config_from(command, [TINY, *given])


def test_settings_that_have_an_effect_are_not_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_from("search", [TINY, "search.mode=inherited", "search.batch_size=4", "search.init=normal"])
        config_from("search", [TINY, "search.score=accuracy", "search.racing_top=5", "search.eval_images=100"])
        config_from("search", [TINY, "limits.latency=[null,5]", "limits.latency_batch=2"])
        config_from("fit", [TINY, "phases=[supernet]", "search.when=every_n_epochs", "search.every_n_epochs=2"])


@pytest.mark.parametrize(
    ("given", "who"),
    [
        (["search.score=zen"], "search.score: 'zen'"),
        (["search.score=ntsr", "search.strategy=random"], r"search.score: 'ntsr' \(its ntkt, sept\)"),
        (["search.score=accuracy", "search.strategy=etas"], r"search.options: filter: 'ntsr' \(its ntkt, sept\)"),
        (
            ["search.strategy=nsga2", "search.options={objectives: [dss, te_nas]}"],
            "search.options: objectives: 'te_nas'",
        ),
    ],
)
def test_only_tables_judge_by_inherited_gradients(given: list[str], who: str) -> None:
    config_from("search", [TINY, *given])
    with pytest.raises(
        UserError, match=rf"^{who}.* has no tables .*search.mode=inherited: params, macs, snip, .*=exact$"
    ):
        config_from("search", [TINY, *given, "search.mode=inherited"])


@pytest.mark.parametrize("score", ["dss_pp", "snip", "accuracy", "params"])
def test_tables_judge_by_inherited_gradients(score: str) -> None:
    config_from("search", [TINY, f"search.score={score}", "search.mode=inherited"])
