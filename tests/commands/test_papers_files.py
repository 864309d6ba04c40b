"""Architectures and spaces as the papers' repositories have them: YAML and JSON, lists and single ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lightning_tas as tas
from lightning_tas.catalogue import PUBLISHED
from lightning_tas.commands import build
from lightning_tas.commands.entry import main
from lightning_tas.launch.results import read_architectures
from lightning_tas.supernets import read_arch

SUPERNET = """
SUPERNET:
  MLP_RATIO: 4.0
  NUM_HEADS: 4
  EMBED_DIM: 256
  DEPTH: 14
SEARCH_SPACE:
  MLP_RATIO: [3.5, 4]
  NUM_HEADS: [3, 4]
  DEPTH: [12, 13, 14]
  EMBED_DIM: [192, 216, 240]
"""
T = PUBLISHED["autoformer_t"]
FOUND = f"""
RETRAIN:
  MLP_RATIO: {list(T.mlp_ratio)}
  NUM_HEADS: {list(T.num_heads)}
  DEPTH: 13
  EMBED_DIM: 192
"""
S3 = """
MLP_RATIO: [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [4.0, 4.0]]
NUM_HEADS: [[3,3], [6,6], [12,12,12,12,12,12,12,12], [24,24]]
EMBED_DIM: [96,192,384,768]
DEPTHS: [ 2, 2, 6, 2 ]
WINDOW_SIZE: [[7,7], [7,7], [14,14,14,14,14,14,14,14], [7,7]]
"""
CUT = """
SEARCH_SPACE:
  DEPTH: {192: [12], 240: [12, 14]}
  EMBED_DIM: [192, 240]
  MLP_RATIO: {192: [[4], [3.5]], 240: [[3.5, 4], [4]]}
  NUM_HEADS: {192: [[4], [3]], 240: [[3, 4], [4]]}
SUPERNET: {DEPTH: 14, EMBED_DIM: 256, MLP_RATIO: 4, NUM_HEADS: 4}
"""


def candidate(published: str, **more: Any) -> dict[str, Any]:
    """A network in the layout of PreNAS's lists of candidates."""
    arch = PUBLISHED[published]
    own = {"layer_num": arch.depth, "embed_dim": [arch.embed_dim] * arch.depth}
    return {**own, "num_heads": list(arch.num_heads), "mlp_ratio": list(arch.mlp_ratio), **more}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_network_found_in_autoformers_yaml() -> None:
    Path("AutoFormer-T.yaml").write_text(SUPERNET + FOUND)
    Path("AutoFormer-T.json").write_text(json.dumps({"RETRAIN": {"DEPTH": 13, "EMBED_DIM": [192] * 13, **_columns(T)}}))
    for name in ("AutoFormer-T.yaml", "AutoFormer-T.json"):
        assert build.architecture(name) == ("AutoFormer-T", T) and read_arch(name) == T
    pit = PUBLISHED["tf_tas_pit_ti"]
    found = "RETRAIN: {BASE_DIM: [40, 40, 40], DEPTH: [2, 4, 4], NUM_HEADS: [2, 4, 8], MLP_RATIO: 2}"
    Path("TF_TAS-PiT-Ti.yml").write_text(found)
    assert build.architecture("TF_TAS-PiT-Ti.yml")[1] == pit


def _columns(arch: tas.Architecture) -> dict[str, Any]:
    return {"NUM_HEADS": list(arch.num_heads), "MLP_RATIO": list(arch.mlp_ratio)}


def test_s3_is_read_and_refused_where_a_network_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    Path("S3-T.yaml").write_text(S3)
    label, arch = build.architecture("S3-T.yaml")
    assert (label, arch.family, arch.depths) == ("S3-T", "s3", (2, 2, 6, 2))
    assert arch.stages[2].blocks[0].window_size == 14
    assert main("fit", ["recipe=retrain", "arch=S3-T.yaml", "smoke=true", "plan=true"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("lightning_tas.fit: arch: family: 's3' is not valid; valid: autoformer, ")


def test_many_networks_in_one_file() -> None:
    bins = {"6.0": [candidate("prenas_ti", score=1.0)], "7.0": [candidate("tf_tas_ti"), candidate("autoformer_t")]}
    Path("prenas_tiny.json").write_text(json.dumps(bins))
    assert list(read_architectures("prenas_tiny.json")) == ["6.0", "7.0", "7.0-2"]
    assert build.architecture("prenas_tiny.json@6.0") == ("6.0", PUBLISHED["prenas_ti"])
    assert build.architecture("prenas_tiny.json@7.0-2") == ("7.0-2", T)
    with pytest.raises(tas.UserError, match=r"holds several architectures; name one: .*'6.0', '7.0', '7.0-2'"):
        build.architecture("prenas_tiny.json")
    Path("bins.yaml").write_text(f"6.0:\n- {json.dumps(candidate('prenas_ti'))}\n")
    assert build.architecture("bins.yaml") == ("6.0", PUBLISHED["prenas_ti"])
    Path("list.json").write_text(json.dumps([candidate("prenas_ti", name="mine"), {"arch": candidate("tf_tas_ti")}]))
    assert read_architectures("list.json") == {"mine": PUBLISHED["prenas_ti"], "1": PUBLISHED["tf_tas_ti"]}
    Path("names.json").write_text(json.dumps({"a": candidate("prenas_ti"), "b": candidate("tf_tas_ti")}))
    assert build.architecture("names.json@b") == ("b", PUBLISHED["tf_tas_ti"])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", SUPERNET, ["a search space, without RETRAIN", "space="]),
        ("a.yaml", "RETRAIN: {EMBED_DIM: 3}", ["depth: missing in RETRAIN"]),
        ("a.yaml", "RETRAIN: [1]", ["RETRAIN: expected a mapping"]),
        ("a.yaml", "a: [1\n", ["is not valid YAML"]),
        ("a.json", "{", ["is not valid JSON"]),
        ("a.json", '{"6.0": [{"layer": 1}]}', ["6.0: architecture: no layout", "layer_num (AutoFormer", "DEPTHS (S3)"]),
        ("a.json", "[3]", ["expected a mapping, got 3"]),
        ("a.json", "3", ["expected a list of mappings"]),
        ("a.json", "[]", ["the list is empty"]),
    ],
)
def test_files_of_networks_that_cannot_be_read(name: str, text: str, words: list[str]) -> None:
    Path(name).write_text(text)
    with pytest.raises(tas.UserError) as caught:
        build.architecture(name)
    assert str(caught.value).startswith(f"arch: {name!r}")
    assert all(word in str(caught.value) for word in words), caught.value


def test_spaces() -> None:
    Path("supernet-T.yaml").write_text(SUPERNET)
    Path("AutoFormer-T.yaml").write_text(SUPERNET + FOUND)
    known = tas.space("autoformer_tiny")
    for name in ("supernet-T.yaml", "AutoFormer-T.yaml"):
        space = tas.space(f"./{name}")
        assert (space.name, space.size()) == (Path(name).stem, known.size())
        assert (space.dimensions, dict(space.allocated)) == (known.dimensions, dict(known.allocated))
    Path("heir.json").write_text(json.dumps({"extends": "supernet-T.yaml", "depth": [12]}))
    assert tas.space("./heir.json").choices("depth") == (12,)


def test_a_cut_space_of_prenas_is_united_with_a_warning() -> None:
    Path("tiny.yaml").write_text(CUT)
    with pytest.warns(UserWarning, match="DEPTH, NUM_HEADS, MLP_RATIO differ by width or block and are united"):
        space = tas.space("./tiny.yaml")
    assert [space.choices(key) for key in ("embed_dim", "depth", "mlp_ratio")] == [(192, 240), (12, 14), (3.5, 4)]
    assert space.allocated["embed_dim"] == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SUPERNET: {DEPTH: 1}", "SEARCH_SPACE is missing"),
        (SUPERNET.replace("DEPTH: [", "RSTB_NUM: ["), "'RSTB_NUM' is not valid"),
        (SUPERNET.replace("  DEPTH: [12, 13, 14]\n", ""), "SEARCH_SPACE.DEPTH is missing"),
        (SUPERNET.replace("[3, 4]", "[three]"), "SEARCH_SPACE.NUM_HEADS: 'three' is not a number"),
        (SUPERNET + "other: 1", "'other' is not valid"),
    ],
)
def test_spaces_that_cannot_be_read(text: str, words: str) -> None:
    Path("a.yaml").write_text(text)
    with pytest.raises(tas.UserError, match=words) as caught:
        tas.space("./a.yaml")
    assert str(caught.value).startswith("space")
