"""Samplers: functions of (seed, step), with any number of candidates, in the proportions that they promise."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import lightning_tas as tas
from lightning_tas import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.samplers import (
    Sampler,
    SamplerConfig,
    Source,
    balanced,
    build_sampler,
    names,
    preferred,
    register,
    sandwich,
    uniform,
)
from lightning_tas.spaces import isotropic

SPACE = tas.space("autoformer_tiny")
SMALL = isotropic("small", embed_dim=[24, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])


def archs(*shapes: tuple[int, int, int]) -> list[Architecture]:
    """(width, depth, ratio) each."""
    return [Architecture.vit(width, [3] * depth, [ratio] * depth) for width, depth, ratio in shapes]


# The groups of the released tiny list: two of one candidate, then two of two.
LIST = archs((192, 12, 4), (216, 12, 4), (240, 12, 3), (240, 12, 4), (240, 14, 3), (240, 14, 4))


def all_samplers(seed: int = 0) -> dict[str, Sampler]:
    return {
        "uniform": uniform(SPACE, seed),
        "sandwich of a space": sandwich(SPACE, seed),
        "sandwich of a small space": sandwich(SMALL, seed),
        "sandwich of a list": sandwich(SPACE, seed, candidates=LIST),
        "preferred": preferred(LIST, seed),
        "balanced": balanced(LIST, seed),
    }


@pytest.mark.parametrize("name", all_samplers())
def test_function_of_seed_and_step(name: str) -> None:
    sampler = all_samplers()[name]
    assert isinstance(sampler, Sampler)
    trace = [sampler(step) for step in range(40)]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    state = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    fresh = all_samplers()[name]
    backwards = [fresh(step) for step in reversed(range(40))]  # as after a resume: no step needs the earlier ones
    assert trace == backwards[::-1]
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist() and state[2] == random.getstate()  # type: ignore[index]
    assert trace != [all_samplers(seed=1)[name](step) for step in range(40)]
    assert len({tuple(group) for group in trace}) > 1
    assert all(len(set(group)) == len(group) > 0 for group in trace)


def test_uniform_over_the_space() -> None:
    sampler = uniform(SPACE, 3)
    drawn = [arch for step in range(600) for arch in sampler(step)]
    assert len(drawn) == 600 and all(arch in SPACE for arch in drawn)
    for key in ("embed_dim", "depth"):
        assert chisquare(list(Counter(getattr(arch, key) for arch in drawn).values())).pvalue > 0.01
    heads = Counter(h for arch in drawn for h in arch.num_heads)
    assert chisquare(list(heads.values())).pvalue > 0.01
    assert sampler.archs == ()


def test_preferred_is_uniform_over_the_list() -> None:
    sampler = preferred(LIST, 0)
    counts = Counter(arch for step in range(6000) for arch in sampler(step))
    assert set(counts) == set(LIST)
    assert chisquare(list(counts.values())).pvalue > 0.01
    assert sampler.archs == tuple(LIST)


def test_balanced_is_uniform_over_groups_then_inside() -> None:
    sampler = balanced(LIST, 0)
    counts = Counter(arch for step in range(8000) for arch in sampler(step))
    expected = [2000, 2000, 1000, 1000, 1000, 1000]
    assert chisquare([counts[arch] for arch in LIST], expected).pvalue > 0.01
    # The test has the power to tell it from uniform sampling of the list.
    flat = Counter(arch for step in range(8000) for arch in preferred(LIST, 0)(step))
    assert chisquare([flat[arch] for arch in LIST], expected).pvalue < 1e-6
    groups = Counter((arch.embed_dim, arch.depth) for step in range(8000) for arch in sampler(step))
    assert len(groups) == 4 and chisquare(list(groups.values())).pvalue > 0.01


def test_balanced_ignores_the_order_of_the_list() -> None:
    forth, back = balanced(LIST, 5), balanced(LIST[::-1], 5)
    same = [(a.embed_dim, a.depth) for step in range(50) for a in forth(step)]
    assert same == [(a.embed_dim, a.depth) for step in range(50) for a in back(step)]


@pytest.mark.parametrize("make", [preferred, balanced, lambda c, s=0: sandwich(None, s, candidates=c)])
@pytest.mark.parametrize("number", range(1, 7))
def test_any_number_of_candidates(make: object, number: int) -> None:
    sampler = make(LIST[:number])  # type: ignore[operator]
    seen: set[Architecture] = set()
    for step in range(200):
        drawn = sampler(step)
        assert 1 <= len(drawn) == len(set(drawn)) <= number
        seen |= set(drawn)
    assert seen == set(LIST[:number])


@pytest.mark.parametrize("middle", [0, 1, 2, 5])
def test_sandwich_of_a_list(middle: int) -> None:
    sampler = sandwich(SPACE, 2, middle, candidates=LIST)
    by_size = sorted(LIST, key=lambda arch: cost(arch).params)
    middles: Counter[Architecture] = Counter()
    for step in range(400):
        drawn = sampler(step)
        assert drawn[:2] == [by_size[-1], by_size[0]] and len(drawn) == 2 + min(middle, 4)
        middles.update(drawn[2:])
    if 0 < middle < 4:
        assert set(middles) == set(by_size[1:-1]) and chisquare(list(middles.values())).pvalue > 0.01


@pytest.mark.parametrize("space", [SPACE, SMALL], ids=["large", "small"])
def test_sandwich_of_a_space(space: tas.SearchSpace) -> None:
    sampler = sandwich(space, 2)
    assert sampler.archs == () and sampler.covers_all_parameters
    for step in range(50):
        drawn = sampler(step)
        assert len(drawn) == len(set(drawn)) == 4 and all(arch in space for arch in drawn)
        assert drawn[0] == space.largest() and drawn[1] == space.smallest()
    assert len({arch for step in range(50) for arch in sampler(step)}) > 10
    lonely = isotropic("one", embed_dim=[24], depth=[1], num_heads=[1], mlp_ratio=[1])
    assert sandwich(lonely, 0)(7) == [lonely.smallest()]
    pair = isotropic("two", embed_dim=[24, 32], depth=[1], num_heads=[1], mlp_ratio=[1])
    assert sandwich(pair, 0)(7) == [pair.largest(), pair.smallest()]


def test_balanced_groups_networks_of_several_stages_by_width_and_depth() -> None:
    groups = balanced(tas.space("pit_ti").sample(seed=0, n=40)).groups
    shapes = [{(arch.base_dim, arch.depths, tuple(s.num_heads for s in arch.stages)) for arch in g} for g in groups]
    widths = [{tuple(b * h for h in heads) for b, _, heads in shape} for shape in shapes]
    assert len(groups) > 20 and all(len(each) == 1 for each in widths)


def test_covers_all_parameters_says_whether_blocks_are_skipped() -> None:
    deep = [arch for arch in LIST if arch.depth == 14]
    assert not uniform(SPACE).covers_all_parameters
    assert uniform(isotropic("flat", embed_dim=[24, 32], depth=[2], num_heads=[1], mlp_ratio=[1])).covers_all_parameters
    assert not balanced(LIST).covers_all_parameters and not preferred(LIST).covers_all_parameters
    assert balanced(deep).covers_all_parameters and preferred(LIST[:1]).covers_all_parameters
    assert sandwich(None, candidates=LIST).covers_all_parameters
    # Stages: every one of fixed depth; and none of 12 to 14 blocks is deepest in all of them.
    assert uniform(tas.space("pit_ti", depth=((1,), (4,), (2,)))).covers_all_parameters
    assert not uniform(tas.space("pit_ti")).covers_all_parameters
    assert sandwich(tas.space("pit_ti")).covers_all_parameters
    assert not sandwich(tas.space("autoprox_pit")).covers_all_parameters
    # The largest by parameters need not be the deepest.
    wide = archs((192, 14, 1), (640, 12, 4))
    assert not sandwich(None, candidates=wide).covers_all_parameters


def test_repeated_candidates_count_once() -> None:
    assert preferred(LIST[:2] * 3).archs == tuple(LIST[:2])


@pytest.mark.parametrize("name", ["uniform", "sandwich"])
def test_every_sampler_draws_from_the_candidates_where_there_are_some(name: str) -> None:
    """All of them and nothing else, unless `source` says the space: then they make no difference."""
    for source in (None, "candidates"):
        sampler = build_sampler(SamplerConfig(name, source=source), SPACE, LIST, 1)
        assert sampler.archs == tuple(LIST)
        assert {arch for step in range(100) for arch in sampler(step)} == set(LIST)
    whole = build_sampler(SamplerConfig(name, source="space"), SPACE, LIST, 1)
    assert whole.archs == ()
    alone = build_sampler(SamplerConfig(name), SPACE, None, 1)
    assert [whole(step) for step in range(20)] == [alone(step) for step in range(20)]


def test_build_sampler() -> None:
    assert {"uniform", "sandwich", "preferred", "balanced"} <= set(names())
    for name, sampler in (
        ("uniform", uniform(SPACE, 4)),
        ("sandwich", sandwich(SPACE, 4, 3, LIST)),
        ("preferred", preferred(LIST, 4)),
        ("balanced", balanced(LIST, 4)),
    ):
        candidates = None if name == "uniform" else LIST
        built = build_sampler(SamplerConfig(name, middle=3), SPACE, candidates, 4)
        assert [built(s) for s in range(20)] == [sampler(s) for s in range(20)]
    assert build_sampler(SamplerConfig("sandwich", middle=0), SPACE, None, 4)(0) == [SPACE.largest(), SPACE.smallest()]


def test_users_register_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @register("test_largest_only")
    def build(config: SamplerConfig, source: Source, seed: int) -> Sampler:
        return preferred([source.ends()[0]], seed)

    assert "test_largest_only" in names()
    own = SamplerConfig("test_largest_only")
    assert build_sampler(own, SPACE)(3) == [SPACE.largest()]
    assert build_sampler(own, SPACE, LIST[:2])(3) == [LIST[1]]
    assert build_sampler(replace(own, source="space"), SPACE, LIST[:2])(3) == [SPACE.largest()]
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "@register" in block)
    exec(compile(code, "docs/training.md", "exec"), {})
    documented = build_sampler(SamplerConfig("largest_too"), SPACE, LIST)
    assert isinstance(documented, Sampler) and LIST[-1] in documented(10) and len(documented(11)) == 1
    register("test_no_sampler")(lambda config, source, seed: source)
    with pytest.raises(UserError, match="'test_no_sampler' gives a Source without covers_all_parameters, __call__"):
        build_sampler(SamplerConfig("test_no_sampler"), SPACE)
    for name, message in (("nowhere:mine", "cannot be imported"), ("lightning_tas.samplers:mine", "is not registered")):
        with pytest.raises(UserError, match=f"sampler.name: '{name}' {message}"):
            build_sampler(SamplerConfig(name), SPACE)
    (tmp_path / "ends_python.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="'ends_python:mine' cannot be imported: SystemExit"):
        build_sampler(SamplerConfig("ends_python:mine"), SPACE)
    with pytest.raises(UserError, match="registered already"):
        register("uniform")(build)


def test_mistakes() -> None:
    for name, space, candidates, message in (
        ("balance", SPACE, LIST, "Did you mean 'balanced'"),
        ("balanced", SPACE, None, "phases needs 'select'"),
        ("preferred", SPACE, [], "list of candidates is empty"),
        ("uniform", None, None, "needs a space or a list"),
        ("sandwich", None, None, "needs a space or a list"),
    ):
        with pytest.raises(UserError, match=message):
            build_sampler(SamplerConfig(name), space, candidates)
    for name, source, candidates, message in (
        ("balanced", "space", LIST, "'space' is no list"),
        ("uniform", "candidates", None, "phases needs 'select'"),
        ("uniform", "candidate", LIST, "Did you mean 'candidates'"),
    ):
        with pytest.raises(UserError, match=rf"sampler\.source: .*{message}"):
            build_sampler(SamplerConfig(name, source=source), SPACE, candidates)
    with pytest.raises(UserError, match=r"sampler\.middle"):
        sandwich(SPACE, middle=-1)
