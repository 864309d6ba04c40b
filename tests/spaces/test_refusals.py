"""Impossible spaces are refused when they are built, with the numbers in the message; nothing unknown is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_tas.architecture import Architecture, Block, Stage
from lightning_tas.errors import UserError
from lightning_tas.spaces import Dimension, Predicate, SearchSpace, isotropic, register_predicate, space
from lightning_tas.spaces.factors import MAX_ROWS

GOOD: dict[str, Any] = {"embed_dim": [8, 16], "depth": [1, 2], "num_heads": [1, 2], "mlp_ratio": [1, 2]}
DEPTH = Dimension("depth", "stage", (1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": []}, "depth: no choices"),
        ({"depth": 12}, "depth: expected a list of choices, got 12"),
        ({"depth": [0, 1]}, r"depth: choices must be positive, got 0 in \[0, 1\]"),
        ({"depth": [-1, 1]}, "depth: choices must be positive, got -1"),
        ({"depth": [12.5]}, "depth: choices must be whole numbers, got 12.5"),
        ({"depth": [13, 12]}, r"depth: choices must ascend, but 12 follows 13 in \[13, 12\]"),
        ({"depth": [12, 12]}, r"depth: 12 is listed twice in \[12, 12\]"),
        ({"depth": [12, 12.0]}, "depth: 12 is listed twice"),
        ({"depth": [[1], [2]]}, "depth: 2 lists of choices for 1 stages"),
        ({"embed_dim": [8, "16"]}, "embed_dim: '16' is not a number"),
        ({"embed_dim": [float("nan")]}, "embed_dim: nan is not a finite number"),
        ({"num_heads": [1.5]}, "num_heads: choices must be whole numbers, got 1.5"),
        ({"num_heads": "12"}, "num_heads: expected a list of choices, got '12'"),
        ({"mlp_ratio": [0]}, "mlp_ratio: choices must be positive, got 0"),
        ({"mlp_ratio": [0.1]}, "embed_dim 8 with mlp_ratio 0.1 leaves no hidden unit"),
        ({"allocated": {"embed_dim": 8}}, "allocated.embed_dim: 8 cannot hold the choice 16"),
        ({"allocated": {"dept": 3}}, "allocated: 'dept' is not valid.*Did you mean 'depth'"),
        ({"allocated": {"depth": [3, 4]}}, "allocated.depth: 2 values for 1 stages"),
        (
            {"family": "autoprox_vit", "num_heads": [1, 3]},
            r"num_heads=3 fits no architecture: embed_dim=\[8, 16\] must be",
        ),
    ],
)
def test_impossible_choices(change: dict[str, Any], message: str) -> None:
    assert isotropic("good", **GOOD).size() == 2 * (4 + 16)
    with pytest.raises(UserError, match=message):
        isotropic("bad", **{**GOOD, **change})


@pytest.mark.parametrize(
    ("dimensions", "predicates", "stages", "message"),
    [
        ([Dimension("a", "block", (1,))], [], 1, "a stage dimension 'depth' is needed"),
        ([Dimension("depth", "network", (1,))], [], 1, "a stage dimension 'depth' is needed"),
        ([DEPTH, DEPTH], [], 1, "'depth' is defined twice"),
        ([DEPTH], [], 0, "stages must be a positive count, got 0"),
        ([{"name": "depth"}], [], 1, "expected Dimension values"),
        ([Dimension("depth", "stage", ((1,), (2,)))], [], 3, "depth: 2 lists of choices for 3 stages"),
        ([DEPTH], [Predicate("divisible", ("dept", 2))], 1, "Did you mean 'depth'"),
        (
            [DEPTH, Dimension("a", "block", (1, 2))],
            [Predicate("divides_next", ("a",))],
            2,
            "a is chosen per block; path rules look at stages",
        ),
        (
            [DEPTH],
            [Predicate("at_least", ("depth", 1, 3))],
            1,
            r"depth=1 fits no architecture: depth=\[1\] must be at least",
        ),
        (
            [DEPTH, Dimension("a", "block", (3, 5))],
            [Predicate("divisible", (768, "a"))],
            1,
            r"a=5 fits no architecture: 768 must be a multiple of a=\[5\]",
        ),
        (
            [DEPTH, Dimension("a", "network", (5,)), Dimension("b", "block", (2,))],
            [Predicate("divisible", ("a", "b"))],
            1,
            r"a=5 fits no architecture: a=\[5\] must be a multiple of b=\[2\]",
        ),
        (
            [DEPTH, Dimension("a", "stage", ((2, 3), (4,)))],
            [Predicate("divides_next", ("a",))],
            2,
            r"a=3 in stage 0 fits no architecture",
        ),
        ([DEPTH], [Predicate("total_between", ("depth", 5, 9))], 2, "depth=1 in stage 0 fits no architecture"),
    ],
)
def test_impossible_spaces(dimensions: list, predicates: list, stages: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchSpace("bad", "any", dimensions, predicates, stages)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dimension("two words", "block", (1,)), "'two words' is not a name"),
        (lambda: Dimension("family", "network", (1,)), "'family' means something else on architectures"),
        (lambda: Dimension("a", "blocks", (1,)), "Did you mean 'block'"),  # type: ignore[arg-type]
        (lambda: Dimension("a", "network", ((1,), (2,))), "a network dimension has one list"),
        (lambda: Predicate("divisibel", ("a", "b")), "Did you mean 'divisible'"),
        (lambda: Dimension.from_dict({"name": "a", "scope": "block"}), "dimension 'a': choices is missing"),
        (lambda: Dimension.from_dict({"name": "a", "scopes": 1}), "Did you mean 'scope'"),
        (lambda: Dimension.from_dict([1]), "expected mappings with name, scope and choices"),  # type: ignore[arg-type]
        (lambda: Predicate.from_dict({"name": "divisible"}), "expected mappings with name and args"),
        (lambda: register_predicate("divisible", "twice")(lambda: True), "'divisible' is registered already"),
    ],
)
def test_impossible_parts(build: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_zero_is_a_choice_only_where_it_is_declared() -> None:
    layers = Dimension("stem_layers", "network", (0, 1, 2), zero=True)
    s = SearchSpace("stem", "any", [DEPTH, layers])
    assert s.smallest().stem_layers == 0 and SearchSpace.from_dict(s.to_dict()) == s
    with pytest.raises(UserError, match="must be positive"):
        Dimension("stem_layers", "network", (0, 1))


def test_predicates_that_tie_too_much_are_refused_at_once() -> None:
    many = [Dimension(f"x{i}", "network", tuple(range(1, 200))) for i in range(4)]
    rules = [Predicate("at_least", (f"x{i}", 0, f"x{i + 1}")) for i in range(3)]
    with pytest.raises(UserError, match=f"{MAX_ROWS:,} combinations"):
        SearchSpace("huge", "any", [DEPTH, *many], rules)
    assert SearchSpace("free", "any", [DEPTH, *many]).size() == 2 * 199**4


def test_two_spellings_of_one_space_are_equal() -> None:
    flat = SearchSpace("x", "any", [DEPTH], stages=2)
    nested = SearchSpace("x", "any", [Dimension("depth", "stage", ((1, 2), (1.0, 2.0)))], stages=2)
    assert flat == nested and flat.id == nested.id


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        (Architecture.vit(192, [3] * 12, [4] * 12, family="s3"), "family: 's3' is not 'autoformer'"),
        (Architecture("autoformer", Architecture.vit(192, [3] * 12, [4] * 12).stages * 2), "stages: 2 instead of 1"),
        (Architecture.vit(192, [3] * 11, [4] * 11), "depth: 11 is not among [12, 13, 14]"),
        (Architecture.vit(192, [3] * 15, [4] * 15), "depth: 15 is not among [12, 13, 14]"),
        (Architecture.vit(200, [3] * 12, [4] * 12), "embed_dim: 200 is not among [192, 216, 240]"),
        (Architecture.vit(192, [3] * 11 + [5], [4] * 12), "blocks[11].num_heads: 5 is not among [3, 4]"),
        (Architecture("autoformer", [Stage([Block(num_heads=3)] * 12, embed_dim=192)]), "blocks[0].mlp_ratio: missing"),
        (Architecture("autoformer", [Stage([Block(num_heads=3, mlp_ratio=4)] * 12)]), "embed_dim: missing"),
        (
            Architecture("autoformer", [Stage([Block(num_heads=3, mlp_ratio=4, window=7)] * 12, embed_dim=192)]),
            "blocks[0].window: the space has no such choice here",
        ),
        (
            Architecture("autoformer", [Stage([Block(num_heads=3, mlp_ratio=4)] * 12, embed_dim=192)], base=1),
            "base: the space has no such choice here",
        ),
        (
            Architecture("autoformer", [Stage([Block(num_heads=3, mlp_ratio=4)] * 12, embed_dim=192, heads=1)]),
            "heads: the space has no such choice here",
        ),
    ],
)
def test_strangers_are_told_why_and_not_encoded(arch: Architecture, reason: str) -> None:
    s = space("autoformer_tiny")
    assert arch not in s and s.why_not(arch) == reason
    with pytest.raises(UserError) as error:
        s.encode([s.smallest(), arch])
    assert str(error.value) == f"architecture 1 is outside the space 'autoformer_tiny': {reason}"


def test_what_is_no_architecture_is_refused() -> None:
    s = space("autoformer_tiny")
    assert "x" not in s and None not in s
    with pytest.raises(UserError, match="not an Architecture"):
        s.encode(["x"])  # type: ignore[list-item]
    good = s.encode(s.sample(n=3))
    for bad in (good[:, :-1], good.astype(float), good[None]):
        with pytest.raises(UserError, match=r"expected integers of shape \(N, 30\)"):
            s.decode(bad)
    assert s.decode(good[0]) == s.decode(good[:1]) and s.decode(good[:0]) == [] and s.encode([]).shape == (0, 30)
    shallow = s.encode(s.smallest())
    shallow[0, -1] = 0  # a slot beyond the depth must stay empty
    hole = s.encode(s.largest())
    hole[0, 5] = -1  # and one within it must not
    assert not s.valid(np.concatenate([shallow, hole])).any()
    with pytest.raises(UserError, match="'heads' is not valid"):
        s.choices("heads")
    with pytest.raises(UserError, match="stage: 1"):
        s.choices("num_heads", stage=1)
