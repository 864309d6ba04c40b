"""The AutoFormer spaces: choices, exact sizes, what is allocated, and the variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.spaces import SearchSpace, isotropic, space, space_names

# embed dims, depths, heads, MLP ratios, size, allocated width/heads/ratio/depth: literals from the paper's tables.
TABLE = {
    "autoformer_tiny": ((192, 216, 240), (12, 13, 14), (3, 4), (3.5, 4), 1_056_964_608, (256, 4, 4, 14)),
    "autoformer_small": ((320, 384, 448), (12, 13, 14), (5, 6, 7), (3, 3.5, 4), 77_103_263_459_313, (448, 7, 4, 14)),
    "autoformer_base": ((528, 576, 624), (14, 15, 16), (9, 10), (3, 3.5, 4), 10_108_977_168_384, (640, 10, 4, 16)),
    "autoformer_base_paper": (
        (528, 576, 624),
        (14, 15, 16),
        (8, 9, 10),
        (3, 3.5, 4),
        6_245_364_340_204_353,
        (640, 10, 4, 16),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_autoformer_spaces_are_the_papers(name: str) -> None:
    embed, depth, heads, ratio, size, allocated = TABLE[name]
    s = space(name)
    assert s.name == name and s.family == "autoformer" and name in space_names()
    assert (s.choices("embed_dim"), s.choices("depth"), s.choices("num_heads"), s.choices("mlp_ratio")) == TABLE[name][
        :4
    ]
    assert s.size() == size == len(embed) * sum((len(heads) * len(ratio)) ** d for d in depth)
    assert tuple(s.allocated[k] for k in ("embed_dim", "num_heads", "mlp_ratio", "depth")) == allocated
    assert s.smallest() == Architecture.vit(embed[0], [heads[0]] * depth[0], [ratio[0]] * depth[0])
    assert s.middle().embed_dim == embed[1] and s.middle().depth == depth[1]
    assert s.largest() == Architecture.vit(embed[-1], [heads[-1]] * depth[-1], [ratio[-1]] * depth[-1])


def test_columns_are_stage_choices_then_block_slots() -> None:
    columns = space("autoformer_tiny").columns
    assert [(c.name, c.stage, c.block) for c in columns[:5]] == [
        ("embed_dim", 0, None),
        ("depth", 0, None),
        ("num_heads", 0, 0),
        ("mlp_ratio", 0, 0),
        ("num_heads", 0, 1),
    ]
    assert len(columns) == 2 + 2 * 14 and columns[-1].block == 13 and columns[-1].choices == (3.5, 4)


def test_encoded_form_is_choice_indices() -> None:
    s = isotropic("s", embed_dim=(8, 16), depth=(1, 2), num_heads=(1, 2), mlp_ratio=(1, 2, 4))
    short, long = Architecture.vit(16, [2], [4]), Architecture.vit(8, [1, 2], [2, 1])
    assert s.encode([short, long]).tolist() == [[1, 0, 1, 2, -1, -1], [0, 1, 0, 1, 1, 0]]
    assert s.encode(short).dtype == "int16" and s.decode(s.encode([short, long])) == [short, long]


def test_variants_of_the_papers_and_repositories() -> None:
    assert space("autoformer_base", base_heads={10, 8, 9}) == space("autoformer_base_paper")
    assert space("autoformer_base", base_heads=[9, 10]) == space("autoformer_base")
    released = space("autoformer_small", depths=[13, 14])
    assert released.size() == 3 * (9**13 + 9**14)
    assert space("autoformer_tiny", depth=[12], num_heads=[4]).size() == 3 * 2**12
    assert space("autoformer_tiny", depth=[12]).allocated == space("autoformer_tiny").allocated
    assert space("autoformer_tiny", depth=[16]).allocated["depth"] == 16


def test_autoprox_heads_divide_the_width() -> None:
    # Auto-Prox' plain ViT: qkv width = embed dim, so 192 / 5 is impossible where AutoFormer's 5 x 64 is fine.
    choices: dict[str, Any] = {"embed_dim": [192], "depth": [2], "mlp_ratio": [4]}
    assert isotropic("ok", num_heads=[3, 5], **choices).size() == 4
    assert isotropic("ok", "autoprox_vit", num_heads=[3, 4], **choices).size() == 4
    with pytest.raises(UserError, match=r"num_heads=5 fits no architecture: embed_dim=\[192\] must be a multiple of"):
        isotropic("bad", "autoprox_vit", num_heads=[3, 5], **choices)
    some = isotropic("some", "autoprox_vit", embed_dim=[192, 240], depth=[2], num_heads=[3, 5], mlp_ratio=[4])
    assert some.size() == 1 + 2**2 and "embed_dim=192 must be a multiple of num_heads=5" in str(
        some.why_not(Architecture.vit(192, [3, 5], [4, 4], family="autoprox_vit"))
    )


def test_published_networks_and_why_some_are_outside(shared: Path) -> None:
    published = json.loads((shared / "golden" / "model_autoformer.json").read_text())
    for size, entry in published.items():
        s = space(f"autoformer_{size}")
        for choice, values in entry["search_space"].items():
            name = {"MLP_RATIO": "mlp_ratio", "NUM_HEADS": "num_heads", "DEPTH": "depth", "EMBED_DIM": "embed_dim"}[
                choice
            ]
            assert list(s.choices(name)) == values
        inside = {name: Architecture.from_dict(r["config"]) in s for name, r in entry["results"].items()}
        assert inside["smallest"] and inside["largest"], inside
    # AutoFormer-T itself has an MLP ratio of 3.0, which its own space lacks: usable as a value, refused by encode.
    tiny = space("autoformer_tiny")
    ratios = [3.5, 3.5, 3, 3.5, 3, 3, 4, 4, 3.5, 4, 3.5, 4, 3.5]
    off = Architecture.vit(192, [3] * 10 + [4, 3, 3], ratios)
    assert off not in tiny and tiny.why_not(off) == "blocks[2].mlp_ratio: 3 is not among [3.5, 4]"
    assert Architecture.from_dict(off.to_dict()) == off
    with pytest.raises(UserError, match=r"outside the space 'autoformer_tiny': blocks\[2\].mlp_ratio: 3 is not among"):
        tiny.encode([off])


def test_vit_bench_101_is_inside_its_space(shared: Path) -> None:
    s = isotropic(
        "autoprox", "autoprox_vit", embed_dim=(192, 216, 240), depth=(12, 13, 14), num_heads=(3, 4), mlp_ratio=(3.5, 4)
    )
    entries = json.loads((shared / "vit_bench_101" / "autoformer.json").read_text())["entries"]
    archs = [Architecture.from_dict(entry["arch"]) for entry in entries]
    assert s.decode(s.encode(archs)) == archs


def test_spaces_are_values() -> None:
    a, b = space("autoformer_tiny"), space("autoformer_tiny")
    assert a == b and hash(a) == hash(b) and a.id == b.id
    others = [space(n) for n in space_names()] + [space("autoformer_tiny", depths=[12])]
    assert len({s.id for s in others}) == len(set(others)) == len(others)
    renamed = SearchSpace("other", a.family, a.dimensions, a.predicates, allocated=a.allocated)
    assert renamed == a and renamed.id == a.id
