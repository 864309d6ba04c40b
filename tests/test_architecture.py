"""Architectures are values: immutable, canonical, and read from every published layout."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tas.architecture import RESERVED, Architecture, Block, Stage
from lightning_tas.errors import UserError

TINY = {"layer_num": 2, "embed_dim": [192, 192], "num_heads": [3, 4], "mlp_ratio": [3.5, 4.0]}
PROX = {"hidden_dim": 192, "depth": 2, "num_heads": [3, 4], "mlp_ratio": [3.5, 4.0]}
PIT = {"base_dim": 40, "depth": [1, 2], "num_heads": [2, 4], "mlp_ratio": 2}
S3 = {
    "DEPTHS": [1, 2],
    "EMBED_DIM": [96, 192],
    "NUM_HEADS": [[3], [6, 6, 6]],
    "MLP_RATIO": [[4.0], [4.0, 3.5, 4.0]],
    "WINDOW_SIZE": [[7], [14, 7, 7]],
}

values = st.one_of(st.integers(1, 10**6), st.floats(0.25, 1e6, allow_nan=False), st.sampled_from(["relu", "gelu"]))
keys = st.sampled_from(["alpha", "beta", "gamma", "delta"])
blocks = st.builds(lambda v: Block(**v), st.dictionaries(keys, values, max_size=3))
stages = st.builds(
    lambda b, v: Stage(b, **v), st.lists(blocks, min_size=1, max_size=4), st.dictionaries(keys, values, max_size=3)
)
architectures = st.builds(
    lambda f, s, v: Architecture(f, s, **v),
    st.sampled_from(["autoformer", "s3"]),
    st.lists(stages, min_size=1, max_size=3),
    st.dictionaries(keys, values, max_size=3),
)


@given(architectures)
def test_round_trips_keep_equality_hash_and_id(arch: Architecture) -> None:
    by_json = Architecture.from_dict(json.loads(json.dumps(arch.to_dict())))
    for other in (by_json, pickle.loads(pickle.dumps(arch)), copy.deepcopy(arch), copy.copy(arch)):
        assert other == arch and hash(other) == hash(arch) and other.id == arch.id
    assert len({arch, by_json}) == 1


def test_numbers_are_canonical() -> None:
    whole = Architecture.vit(192, num_heads=[3], mlp_ratio=[4])
    spellings: list[Any] = [(192.0, [3.0], [4.0]), (np.int16(192), np.array([3]), np.ones(1, np.float32) * 4)]
    for width, heads, ratio in spellings:
        same = Architecture.vit(width, num_heads=heads, mlp_ratio=ratio)
        assert same == whole and hash(same) == hash(whole) and same.id == whole.id
        assert json.dumps(same.to_dict()) == json.dumps(whole.to_dict())
    assert isinstance(whole.blocks[0].mlp_ratio, int)


def test_every_part_counts_for_equality_and_id() -> None:
    base = Architecture("a", [Stage([Block(x=1)], width=8)], base=2)
    others = [
        Architecture("b", [Stage([Block(x=1)], width=8)], base=2),
        Architecture("a", [Stage([Block(x=2)], width=8)], base=2),
        Architecture("a", [Stage([Block(y=1)], width=8)], base=2),
        Architecture("a", [Stage([Block(x=1)], width=9)], base=2),
        Architecture("a", [Stage([Block(x=1)], width=8)], base=3),
        Architecture("a", [Stage([Block(x=1)], width=8)]),
        Architecture("a", [Stage([Block(x=1), Block(x=1)], width=8)], base=2),
        Architecture("a", [Stage([Block(x=1)], width=8)] * 2, base=2),
    ]
    assert all(other != base and other.id != base.id for other in others)
    assert len({base, *others}) == len({base.id, *(o.id for o in others)}) == 9


def test_id_is_the_same_in_another_process() -> None:
    code = (
        "from lightning_tas.architecture import Architecture as A;"
        "print(A.vit(192, num_heads=[3, 4], mlp_ratio=[4, 3.5]).id)"
    )
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.strip() == Architecture.vit(192, num_heads=[3, 4], mlp_ratio=[4, 3.5]).id
    assert len(out.stdout.strip()) == 10


@pytest.mark.parametrize(
    "value", [Block(x=1), Stage([Block(x=1)], width=2), Architecture.vit(192, [3], [4])], ids=["block", "stage", "arch"]
)
def test_values_are_immutable(value: object) -> None:
    for name in ("x", "width", "stages", "blocks", "family", "_values"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(value, name, 3)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(value, name)


def test_handed_out_containers_are_copies() -> None:
    arch = Architecture("pit", [Stage([Block(x=1)], num_heads=2)], base_dim=40)
    before = arch.id
    arch.extras["base_dim"] = 1
    arch.to_dict()["stages"][0]["blocks"][0]["x"] = 5
    assert arch.id == before and arch.base_dim == 40


def test_attributes_look_from_the_block_outwards() -> None:
    arch = Architecture("x", [Stage([Block(m=1), Block()], m=2, n=3), Stage([Block()], n=4)], m=9)
    assert arch.per_block("m") == (1, 2, 9)
    assert arch.per_block("n") == (3, 3, 4)
    assert arch.depth == 3 and arch.depths == (2, 1) and len(arch.blocks) == 3
    assert arch.stages[0].n == 3 and arch.stages[0]["n"] == 3 and arch.m == 9 and arch.get("q", 7) == 7
    with pytest.raises(UserError, match="q"):
        arch.per_block("q")
    with pytest.raises(AttributeError, match="nothing"):
        _ = arch.blocks[0].nothing
    with pytest.raises(UserError, match="2 stages"):
        _ = arch.embed_dim


def test_reserved_names_are_all_that_values_would_hide_behind() -> None:
    """What has an attribute of its own is not found by name; the four that look up values are meant to."""
    own = {name for kind in (Block, Stage, Architecture) for name in dir(kind) if not name.startswith("_")}
    assert own | {"self"} == RESERVED | {"depth", "embed_dim", "num_heads", "mlp_ratio"}


def test_vit_wants_lists_of_one_length() -> None:
    with pytest.raises(UserError, match="2 entries but mlp_ratio has 1"):
        Architecture.vit(192, num_heads=[3, 3], mlp_ratio=[4])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), None, [3]])
def test_values_that_are_no_numbers_are_refused(number: object) -> None:
    with pytest.raises(UserError, match="num_heads"):
        Block(num_heads=number)


def test_autoformer_layout() -> None:
    expected = Architecture.vit(192, num_heads=[3, 4], mlp_ratio=[3.5, 4])
    assert Architecture.from_dict(TINY) == Architecture.from_dict({**TINY, "embed_dim": 192}) == expected
    assert expected.family == "autoformer"
    assert Architecture.from_dict(TINY, family="mine").family == "mine"


def test_autoprox_layout_is_another_family() -> None:
    arch = Architecture.from_dict(PROX)
    assert arch == Architecture.vit(192, num_heads=[3, 4], mlp_ratio=[3.5, 4], family="autoprox_vit")
    assert arch != Architecture.from_dict(TINY)


def test_pit_layout_keeps_values_at_their_scope() -> None:
    arch = Architecture.from_dict(PIT)
    assert arch.family == "pit" and arch.extras == {"base_dim": 40, "mlp_ratio": 2} and arch.depths == (1, 2)
    assert arch.num_heads == (2, 4, 4) and arch.mlp_ratio == (2, 2, 2)
    assert Architecture.from_dict({**PIT, "mlp_ratio": [2, 2]}) == arch


def test_s3_layout_ignores_surplus_entries() -> None:
    arch = Architecture.from_dict(S3)
    assert arch.family == "s3" and arch.depths == (1, 2)
    assert [stage.embed_dim for stage in arch.stages] == [96, 192]
    assert arch.num_heads == (3, 6, 6) and arch.mlp_ratio == (4, 4, 3.5) and arch.per_block("window_size") == (7, 14, 7)


@pytest.mark.parametrize(
    ("layout", "change", "field"),
    [
        (TINY, {"layer_num": 3}, "embed_dim"),
        (TINY, {"layer_num": 2.5}, "layer_num"),
        (TINY, {"layer_num": 0}, "layer_num"),
        (TINY, {"embed_dim": [192, 216]}, "embed_dim"),
        (TINY, {"embed_dim": "192"}, "embed_dim"),
        (TINY, {"num_heads": [3]}, "num_heads"),
        (TINY, {"num_heads": [3, 3, 3]}, "num_heads"),
        (TINY, {"num_heads": 3}, "num_heads"),
        (TINY, {"num_heads": [3, 3.5]}, r"num_heads\[1\]"),
        (TINY, {"num_heads": [3, True]}, r"num_heads\[1\]"),
        (TINY, {"mlp_ratio": [3.5, -4]}, r"mlp_ratio\[1\]"),
        (TINY, {"mlp_ratio": None}, "mlp_ratio"),
        (PROX, {"depth": "two"}, "depth"),
        (PROX, {"depth": 3}, "num_heads"),
        (PROX, {"hidden_dim": None}, "hidden_dim"),
        (PIT, {"depth": 3}, "depth"),
        (PIT, {"depth": []}, "depth"),
        (PIT, {"num_heads": [2, 4, 8]}, "num_heads"),
        (PIT, {"mlp_ratio": [2, 4]}, "mlp_ratio"),
        (S3, {"EMBED_DIM": [96]}, "EMBED_DIM"),
        (S3, {"NUM_HEADS": [[3], [6]]}, r"NUM_HEADS\[1\]"),
        (S3, {"WINDOW_SIZE": [7, 7]}, r"WINDOW_SIZE\[0\]"),
    ],
)
def test_malformed_layouts_name_the_field(layout: dict, change: dict, field: str) -> None:
    with pytest.raises(UserError, match=f"^{field}"):
        Architecture.from_dict({**layout, **change})


@pytest.mark.parametrize("layout", [TINY, PROX, PIT, S3], ids=["autoformer", "autoprox", "pit", "s3"])
def test_missing_fields_are_named(layout: dict) -> None:
    first, *rest = layout if layout is not PROX else ["hidden_dim", "depth", "num_heads", "mlp_ratio"]
    for field in rest:
        with pytest.raises(UserError, match=f"^{field}: missing"):
            Architecture.from_dict({key: value for key, value in layout.items() if key != field})
    with pytest.raises(UserError, match="no layout is known"):
        Architecture.from_dict({key: value for key, value in layout.items() if key != first})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "expected a mapping"),
        ({"stages": []}, "family: missing"),
        ({"family": 3, "stages": []}, "family"),
        ({"family": "a", "stages": []}, "stages: the list is empty"),
        ({"family": "a", "stages": 3}, "stages: expected a list"),
        ({"family": "a", "stages": [3]}, r"stages\[0\]: expected a mapping"),
        ({"family": "a", "stages": [{}]}, r"blocks: missing in stages\[0\]"),
        ({"family": "a", "stages": [{"blocks": []}]}, r"stages\[0\].blocks: the list is empty"),
        ({"family": "a", "stages": [{"blocks": [{"num_heads": "3"}]}]}, r"stages\[0\].blocks\[0\].num_heads: '3'"),
        ({"family": "a", "stages": [{"blocks": [{"mlp_ratio": 0}]}]}, r"stages\[0\].blocks\[0\].mlp_ratio: 0"),
        ({"family": "a", "stages": [{"blocks": [{"x": None}]}]}, r"stages\[0\].blocks\[0\].x: None"),
        ({"family": "a", "stages": [{"blocks": [{}], 3: 4}]}, r"stages\[0\].3: a key must be a name"),
        ({"family": "a", "stages": [{"blocks": [{"self": 1}]}]}, r"stages\[0\].blocks\[0\].self: this name means"),
    ],
)
def test_own_json_is_checked_place_by_place(data: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Architecture.from_dict(data)  # type: ignore[arg-type]


def test_published_configurations_are_read(shared: Path) -> None:
    count = 0
    for file in ("model_autoformer.json", "model_prenas.json"):
        for size in json.loads((shared / "golden" / file).read_text()).values():
            for result in size["results"].values():
                config = result["config"]
                arch = Architecture.from_dict(config)
                assert arch.depth == config["layer_num"] and arch.embed_dim == config["embed_dim"][0]
                assert list(arch.num_heads) == config["num_heads"] and list(arch.mlp_ratio) == config["mlp_ratio"]
                count += 1
    assert count > 10
    s3 = Architecture.from_dict(json.loads((shared / "golden" / "model_s3.json").read_text())["S3-T"]["config"])
    assert s3.depths == (2, 2, 6, 2) and s3.per_block("window_size") == (7,) * 4 + (14,) * 6 + (7,) * 2
    for file, family in (("autoformer.json", "autoprox_vit"), ("pit.json", "pit")):
        for entry in json.loads((shared / "vit_bench_101" / file).read_text())["entries"]:
            arch = Architecture.from_dict(entry["arch"])
            assert arch.family == family
            assert arch.depth == (entry["arch"]["depth"] if family == "autoprox_vit" else sum(entry["arch"]["depth"]))
