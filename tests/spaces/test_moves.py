"""Random moves never leave the space, always end, and are functions of their seed: on arbitrary small spaces."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.spaces import Dimension, Predicate, SearchSpace, isotropic, space

Naive = Callable[[SearchSpace], Iterator[Architecture]]

ascending = st.sets(st.integers(1, 6), min_size=1, max_size=3).map(lambda v: tuple(sorted(v)))
seeds = st.integers(0, 2**63 - 1)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Small spaces with dimensions at every scope and predicates between any of them; impossible ones are skipped."""
    stages = draw(st.integers(1, 2))
    depth = draw(st.one_of(ascending, st.tuples(*[ascending] * stages)))
    dimensions = [Dimension("depth", "stage", depth)]
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)):
        scope: Any = draw(st.sampled_from(["network", "stage", "block"]))
        per_stage = scope != "network" and draw(st.booleans())
        dimensions.append(Dimension(name, scope, draw(st.tuples(*[ascending] * stages) if per_stage else ascending)))
    names = [d.name for d in dimensions]
    outer = [d.name for d in dimensions if d.scope != "block"]
    number = st.sampled_from(names)
    predicates = draw(
        st.lists(
            st.one_of(
                st.builds(lambda x, y: Predicate("divisible", (x, y)), number, number),
                st.builds(lambda x, y: Predicate("at_least", (x, 1, y)), number, number),
                st.builds(lambda x: Predicate("at_least", (x, 2, 1)), number),
                st.builds(lambda x: Predicate("divides_next", (x,)), st.sampled_from(outer)),
                st.builds(lambda x: Predicate("total_between", (x, 3, 6)), st.sampled_from(outer)),
            ),
            max_size=2,
        )
    )
    try:
        return SearchSpace("drawn", "any", dimensions, predicates, stages)
    except UserError:
        assume(False)
        raise


def bounded(s: SearchSpace, limit: int = 3000) -> bool:
    """Whether the naive enumeration of `s` without its predicates is short."""
    return SearchSpace("free", s.family, s.dimensions, stages=s.stages).size() <= limit


@settings(max_examples=40, deadline=None)
@given(spaces())
def test_size_enumeration_and_extremes_equal_the_naive_ones(naive: Naive, s: SearchSpace) -> None:
    assume(bounded(s))
    truth = set(naive(s))
    found = list(s.enumerate())
    assert s.size() == len(found) == len(set(found)) and set(found) == truth
    assert {s.smallest(), s.middle(), s.largest()} <= truth
    assert s.decode(s.encode(found)) == found
    assert all(arch in s for arch in found)


@settings(max_examples=40, deadline=None)
@given(spaces(), st.data())
def test_membership_in_both_forms_equals_the_naive_one(naive: Naive, s: SearchSpace, data: st.DataObject) -> None:
    assume(bounded(s))
    truth = set(naive(s))
    free = SearchSpace("free", s.family, s.dimensions, stages=s.stages)
    every = list(free.enumerate())
    assert [arch in s for arch in every] == [arch in truth for arch in every]
    assert s.valid(free.encode(every)).tolist() == [arch in truth for arch in every]
    # Codes that are no architecture of the free space either: any disturbance is seen.
    codes = s.encode(s.sample(seed=0, n=8))
    row, column = data.draw(st.integers(0, 7)), data.draw(st.integers(0, codes.shape[1] - 1))
    codes[row, column] = data.draw(st.sampled_from([-2, 7]))
    assert s.valid(codes).tolist() == [i != row for i in range(8)]
    with pytest.raises(UserError, match=f"row {row}"):
        s.decode(codes)


@settings(max_examples=50, deadline=None)
@given(spaces(), seeds, st.sampled_from(["gene", "block"]), st.floats(0, 1))
def test_moves_stay_in_the_space_and_repeat(s: SearchSpace, seed: int, unit: Any, rate: float) -> None:
    a, b = s.sample(seed, n=2)
    assert a in s and b in s
    rates = {"network_prob": rate, "stage_prob": rate, "block_prob": rate}
    child = s.mutate(a, seed, unit=unit, **rates)
    assert child in s and child == s.mutate(a, seed, unit=unit, **rates)
    assert child != a or s.size() == 1
    mixed = s.crossover(a, b, seed, unit=unit)
    assert mixed in s and mixed == s.crossover(a, b, seed, unit=unit)
    assert s.crossover(a, a, seed, unit=unit) == a


@settings(max_examples=25, deadline=None)
@given(spaces(), seeds)
def test_crossover_takes_what_is_outside_blocks_from_a_parent(s: SearchSpace, seed: int) -> None:
    a, b = s.sample(seed, n=2)
    pair, child = s.encode([a, b]), s.encode(s.crossover(a, b, seed))[0]
    for c, column in enumerate(s.columns):
        if column.block is None or (not s.predicates and child[c] != -1):
            assert child[c] in pair[:, c]


@given(seeds, st.integers(0, 20))
def test_samples_are_functions_of_the_seed_and_start_alike(seed: int, n: int) -> None:
    s = space("autoformer_small")
    more = s.sample(seed, n=25)
    assert s.sample(seed, n=n) == more[:n]
    assert s.sample(seed) == more[0] and more != s.sample(seed ^ 1, n=25)
    assert np.array_equal(s.sample_codes(seed, 25), s.encode(more))


def test_global_random_state_is_neither_read_nor_moved() -> None:
    s = space("autoformer_tiny")
    np.random.seed(0)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    first = (s.sample(3), s.mutate(s.largest(), 3), s.crossover(s.smallest(), s.largest(), 3))
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]
    np.random.seed(1)
    assert first == (s.sample(3), s.mutate(s.largest(), 3), s.crossover(s.smallest(), s.largest(), 3))


def test_samples_are_uniform_per_choice() -> None:
    s = space("autoformer_tiny")
    codes = s.sample_codes(0, 30_000)
    for c, column in enumerate(s.columns[:20]):
        values, counts = np.unique(codes[:, c][codes[:, c] >= 0], return_counts=True)
        assert list(values) == list(range(len(column.choices)))
        # Five standard deviations of a binomial.
        share = 1 / len(column.choices)
        assert np.abs(counts / counts.sum() - share).max() < 5 * math.sqrt(share * (1 - share) / counts.sum()), column


def test_samples_are_uniform_over_what_predicates_allow(families: dict[str, SearchSpace]) -> None:
    s = families["pit"]
    heads = Counter(tuple(stage.num_heads for stage in arch.stages) for arch in s.sample(0, n=5000))
    assert len(heads) == 10 and max(abs(n - 500) for n in heads.values()) < 5 * math.sqrt(450)


def test_mutation_follows_its_rates_and_depth_rules() -> None:
    s = space("autoformer_tiny")
    parent = s.sample(1)
    only_depth = {"stage_prob": 0, "block_prob": 0, "probs": {"depth": 1}}
    depths = set()
    for seed in range(20):
        child = s.mutate(parent, seed, **only_depth)
        shared = min(child.depth, parent.depth)
        assert child.blocks[:shared] == parent.blocks[:shared] and child.embed_dim == parent.embed_dim
        depths.add(child.depth)
    assert depths == {12, 13, 14} - {parent.depth}
    tails = {s.mutate(s.smallest(), seed, **only_depth).blocks[12:] for seed in range(30)}
    assert len({len(tail) for tail in tails}) == 2 and len(tails) > 5  # new blocks are random, not copies
    assert all(s.mutate(parent, i, stage_prob=0).depth == parent.depth for i in range(20))
    changed = [
        sum(
            x.num_heads != y.num_heads
            for x, y in zip(s.mutate(parent, i, stage_prob=0).blocks, parent.blocks, strict=True)
        )
        for i in range(300)
    ]
    # Redrawn with probability .2, and then different half of the time.
    assert sum(changed) / (300 * parent.depth) == pytest.approx(0.1, abs=0.02)


def test_mutation_by_blocks_redraws_all_choices_of_a_block_or_none() -> None:
    s = isotropic("wide", embed_dim=[8], depth=[40], num_heads=range(1, 101), mlp_ratio=range(1, 101))
    parent = s.sample(0)
    for unit, together in (("block", True), ("gene", False)):
        child = s.mutate(parent, 0, unit=unit, block_prob=0.5)
        moved = [
            (x.num_heads != y.num_heads, x.mlp_ratio != y.mlp_ratio)
            for x, y in zip(child.blocks, parent.blocks, strict=True)
        ]
        split = sum(h != m for h, m in moved)
        assert split <= 3 if together else split > 10


def test_crossover_between_depths_takes_blocks_from_those_that_have_them() -> None:
    s = isotropic("two", embed_dim=[8, 16], depth=[2, 6], num_heads=[1, 2], mlp_ratio=[1, 2])
    short, long = Architecture.vit(8, [1] * 2, [1] * 2), Architecture.vit(16, [2] * 6, [2] * 6)
    children = [s.crossover(short, long, seed) for seed in range(200)]
    assert {(c.embed_dim, c.depth) for c in children} == {(8, 2), (8, 6), (16, 2), (16, 6)}
    assert all(block == long.blocks[0] for c in children for block in c.blocks[2:])
    assert {(b.num_heads, b.mlp_ratio) for c in children for b in c.blocks[:2]} == set(
        itertools.product([1, 2], [1, 2])
    )
    whole = [s.crossover(short, long, seed, unit="block") for seed in range(200)]
    assert {(c.embed_dim, c.depth) for c in whole} == {(8, 2), (16, 6)}
    assert {b for c in whole for b in c.blocks} == {short.blocks[0], long.blocks[0]}


def test_predicates_repair_blocks_after_a_move(families: dict[str, SearchSpace]) -> None:
    # d_model from 128 to 1024 forbids every d_inner under 2048: all blocks must follow.
    s = families["gpt_lts"]
    for seed in range(10):
        child = s.mutate(s.smallest(), seed, network_prob=0, stage_prob=0, block_prob=0, probs={"d_model": 1})
        assert child in s and child.d_model != 128 and all(b.d_inner >= 2 * child.d_model for b in child.blocks)
        assert s.crossover(s.smallest(), child, seed) in s


def test_a_lonely_architecture_mutates_to_itself() -> None:
    s = isotropic("one", embed_dim=[8], depth=[2], num_heads=[1], mlp_ratio=[2])
    assert s.size() == 1 and s.mutate(s.smallest()) == s.smallest() == s.largest()


def test_stratified_samples_reach_further_than_independent_choices() -> None:
    s = isotropic("deep", embed_dim=[8], depth=[30], num_heads=[1, 2], mlp_ratio=[1])

    def heads(codes: np.ndarray) -> np.ndarray:
        return codes[:, 2::2].sum(axis=1)

    plain, spread = heads(s.sample_codes(0, 64)), heads(s.sample_codes(0, 64, stratify=heads))
    assert spread.std() > 1.3 * plain.std() and np.ptp(spread) > np.ptp(plain)
    archs = s.sample(0, n=64, stratify=heads)
    assert len(archs) == 64 and archs == s.sample(0, n=64, stratify=heads) and all(arch in s for arch in archs)
    assert s.sample(0, n=0, stratify=heads) == []
    with pytest.raises(UserError, match="stratify"):
        s.sample(0, n=4, stratify=lambda codes: codes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "genes"}, "Did you mean 'gene'"),
        ({"probs": {"dept": 0.5}}, "Did you mean 'depth'"),
        ({"block_prob": 1.5}, r"num_heads must be in \[0, 1\], got 1.5"),
    ],
)
def test_bad_options_of_moves_are_refused(options: dict[str, Any], message: str) -> None:
    s = space("autoformer_tiny")
    with pytest.raises(UserError, match=message):
        s.mutate(s.smallest(), **options)


def test_moves_refuse_strangers() -> None:
    s = space("autoformer_tiny")
    stranger = Architecture.vit(200, [3] * 12, [4] * 12)
    for move in (lambda: s.mutate(stranger), lambda: s.crossover(s.smallest(), stranger), lambda: s.encode(stranger)):
        with pytest.raises(UserError, match="embed_dim: 200 is not among"):
            move()
    with pytest.raises(UserError, match="negative"):
        s.sample(0, n=-1)
