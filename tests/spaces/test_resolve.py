"""`tas.space` reads names, values, mappings and files, with overrides, and knows what users register."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.spaces import SearchSpace, isotropic, register, registry, resolve_space, space_names

KEYWORDS: dict[str, Any] = {"embed_dim": [8, 16], "depth": [1, 2], "num_heads": [1, 2], "mlp_ratio": [1.5, 2]}
SMALL = isotropic("small", **KEYWORDS)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    yield


def test_public_name() -> None:
    assert tas.space("autoformer_tiny") == resolve_space("autoformer_tiny")
    assert tas.SearchSpace is SearchSpace


def test_a_space_is_itself() -> None:
    assert resolve_space(SMALL) is SMALL


@pytest.mark.parametrize(
    "mapping",
    [
        SMALL.to_dict(),
        KEYWORDS,
        {"name": "small", "family": "autoformer", **KEYWORDS},
        {"extends": "autoformer_tiny", **KEYWORDS, "allocated": SMALL.allocated},
    ],
    ids=["dict", "keywords", "named keywords", "extended"],
)
@pytest.mark.parametrize("kind", ["mapping", "yaml", "json", "path"])
def test_mappings_and_files(tmp_path: Path, mapping: dict[str, Any], kind: str) -> None:
    if kind == "mapping":
        assert resolve_space(mapping) == SMALL
        return
    file = tmp_path / f"space.{'json' if kind == 'json' else 'yaml'}"
    file.write_text(json.dumps(mapping) if kind == "json" else yaml.safe_dump(mapping))
    found = resolve_space(file if kind == "path" else str(file))
    assert found == SMALL and found.id == SMALL.id
    assert resolve_space(file, depth=[2]).size() == 2 * 16


def test_a_file_without_a_name_is_called_like_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(KEYWORDS))
    assert resolve_space(tmp_path / "mine.yaml").name == "mine"


def test_extending_keeps_what_is_not_said() -> None:
    found = resolve_space({"extends": "autoformer_base", "base_heads": [8, 9, 10], "depths": [14], "name": "mine"})
    assert found.choices("num_heads") == (8, 9, 10) and found.choices("depth") == (14,) and found.name == "mine"
    assert found.allocated == tas.space("autoformer_base").allocated


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ("autoformer_tini", {}, "Did you mean 'autoformer_tiny'"),
        ("autoformer_tiny", {"base_heads": [3]}, "override of space 'autoformer_tiny': 'base_heads' is not valid"),
        ("autoformer_tiny", {"dept": [12]}, "Did you mean 'depths?'"),
        ("autoformer_tiny", {"depths": [12.5]}, "depth: choices must be whole"),
        (SMALL, {"dept": [12]}, "Did you mean 'depth'"),
        (SMALL, {"depth": []}, "depth: no choices"),
        (SMALL, {"allocated": {"depth": 1}}, "allocated.depth: 1 cannot hold the choice 2"),
        (3, {}, "expected a name"),
        ("nowhere/space.yaml", {}, "no file 'nowhere/space.yaml'"),
        ({"embed_dim": [8]}, {}, "space: depth is missing"),
        ({**KEYWORDS, "num_head": [1]}, {}, "Did you mean 'num_heads'"),
        ({**SMALL.to_dict(), "dimension": []}, {}, "Did you mean 'dimensions'"),
        ({"dimensions": []}, {}, "family is missing"),
        ({"extends": "autoformer_tiny", "dept": [12]}, {}, "Did you mean 'depths?'"),
        ({**SMALL.to_dict(), "dimensions": 3}, {}, "dimensions: expected a list"),
        ({**SMALL.to_dict(), "predicates": 3}, {}, "predicates: expected a list"),
        ({**SMALL.to_dict(), "allocated": 3}, {}, "allocated: expected a mapping"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest(source: Any, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_space(source, **overrides)


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not valid YAML"), ("- 1", "must hold a mapping, got list")])
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        resolve_space(tmp_path / "space.yaml")


def test_users_register_spaces(own_registry: None) -> None:
    @register("mine")
    def mine(depth: Any = (1, 2)) -> SearchSpace:
        return isotropic("mine", **{**KEYWORDS, "depth": depth})

    assert "mine" in space_names() and tas.space("mine") == SMALL
    assert tas.space("mine", depth=[1]).size() == 2 * 4 and tas.space("mine", num_heads=[1]).size() == 2 * (2 + 4)
    with pytest.raises(UserError, match="'mine' is registered already"):
        register("mine")(mine)


def test_entry_points_offer_spaces(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("plugged", "lightning_tas.spaces.autoformer:autoformer_tiny", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    assert "plugged" in space_names() and tas.space("plugged", depths=[12]).size() == 3 * 4**12


def test_a_file_that_extends_itself_is_refused(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"extends: {second}\n")
    second.write_text(f"extends: {first}\n")
    with pytest.raises(UserError, match="extends itself"):
        resolve_space(first)
    second.write_text("extends: autoformer_tiny\n")
    assert resolve_space(first).size() == 1_056_964_608
