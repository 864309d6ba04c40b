"""The guard against a second design: S3, PiT, BERT, GPT-2 and CNN spaces are `SearchSpace` values like any other.

They are written down in conftest.py. Their sizes are exact even at 1e22 to 1e50 and under predicates, and everything
that works on a plain ViT works on them.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lightning_tas.architecture import Architecture
from lightning_tas.spaces import SearchSpace

_PAIRS = sum(1 for m in range(128, 1025, 64) for f in range(256, 4097, 64) if f >= 2 * m)

SIZES = {
    "tiny": 1_056_964_608,
    "s3": 333_396**4,
    "s3_evolved": 2 * (6 + 6**2) * (12**2) * 2 * (12**5 + 12**6 + 12**7) * 2 * (6**2 + 6**3),
    "pit": 4_320,
    "pit_unconstrained": 11_664,
    "pit_autoprox": 1_600,
    "bert": sum(16**depth for depth in (6, 8, 10, 12)),
    "gpt_shared": 95_175,
    "gpt_lts": 3
    * sum(
        sum((3 * sum(f >= 2 * m for f in range(256, 4097, 64))) ** d for d in range(2, 17))
        for m in range(128, 1025, 64)
    ),
    "gpt_hetero": 3 * sum((3 * 705) ** d for d in range(2, 17)),
    "cnn_stage_kernels": 36_864_000 * 2 * 17 * 5,
    "cnn_layer_kernels": 4 * 4 * 24 * 56 * 372 * 496 * 30 * 2 * 17 * 5,
}
# What the papers' readers computed, to the digits they give.
ROUNDED = {
    "s3": 1.2e22,
    "bert": 2.83e14,
    "gpt_lts": 1.1e37,
    "cnn_stage_kernels": 6.3e9,
    "cnn_layer_kernels": 1.19e11 * 34 * 5,
}


@pytest.mark.parametrize("name", SIZES)
def test_exact_sizes(families: dict[str, SearchSpace], name: str) -> None:
    assert families[name].size() == SIZES[name]
    if name in ROUNDED:
        assert families[name].size() == pytest.approx(ROUNDED[name], rel=0.05)
    assert _PAIRS == 705


@pytest.mark.parametrize("name", SIZES)
def test_everything_works_on_every_family(families: dict[str, SearchSpace], name: str) -> None:
    space = families[name]
    archs = space.sample(seed=1, n=12)
    archs += [space.smallest(), space.middle(), space.largest(), *itertools.islice(space.enumerate(), 5)]
    archs += [space.mutate(arch, seed=i) for i, arch in enumerate(archs)]
    archs += [space.crossover(a, b, seed=i) for i, (a, b) in enumerate(itertools.pairwise(archs))]
    archs += [space.crossover(a, b, seed=i, unit="block") for i, (a, b) in enumerate(itertools.pairwise(archs))]
    assert [space.why_not(arch) for arch in archs] == [None] * len(archs)
    codes = space.encode(archs)
    assert codes.shape == (len(archs), len(space.columns)) and codes.dtype == np.int16
    assert space.decode(codes) == archs and space.valid(codes).all()
    assert [Architecture.from_dict(json.loads(json.dumps(arch.to_dict()))) for arch in archs] == archs
    again = SearchSpace.from_dict(json.loads(json.dumps(space.to_dict())))
    assert again == space == pickle.loads(pickle.dumps(space)) and again.id == space.id and again.size() == space.size()


@pytest.mark.parametrize("name", ["pit", "pit_autoprox"])
def test_enumeration_equals_the_naive_one(
    families: dict[str, SearchSpace], naive: Callable[[SearchSpace], Iterator[Architecture]], name: str
) -> None:
    found = list(families[name].enumerate())
    assert len(found) == len(set(found)) == families[name].size()
    assert set(found) == set(naive(families[name]))


def test_enumeration_is_lazy_at_any_size(families: dict[str, SearchSpace]) -> None:
    for space in families.values():
        first = list(itertools.islice(space, 100))
        assert len(set(first)) == 100


def test_values_lie_at_their_scope(families: dict[str, SearchSpace]) -> None:
    pit = families["pit"].largest()
    assert pit.extras == {"base_dim": 40, "mlp_ratio": 8} and pit.depths == (3, 8, 6)
    assert pit.num_heads == (8,) * 17 and pit.mlp_ratio == (8,) * 17 and pit.stages[0].num_heads == 8
    s3 = families["s3"].smallest()
    assert s3.depths == (2, 2, 2, 2) and s3.stages[3].embed_dim == 224 and s3.blocks[0].window_size == 7
    cnn = families["cnn_stage_kernels"].largest()
    assert cnn.extras["resolution"] == 320 and cnn.stages[6].width == 352 and cnn.depths == (2, 3, 3, 4, 6, 6, 2)
    assert families["s3_evolved"].allocated["embed_dim"] == (128, 192, 384, 768)
    assert families["s3_evolved"].choices("depth", stage=2) == (5, 6, 7)
    assert families["cnn_stage_kernels"].allocated["resolution"] == 320


def test_published_networks_of_other_families_are_members(families: dict[str, SearchSpace], shared: Path) -> None:
    for entry in json.loads((shared / "vit_bench_101" / "pit.json").read_text())["entries"]:
        arch = Architecture.from_dict(entry["arch"])
        assert arch in families["pit"] and arch in families["pit_autoprox"]
    s3 = Architecture.from_dict(json.loads((shared / "golden" / "model_s3.json").read_text())["S3-T"]["config"])
    assert s3 not in families["s3"] and "stages[0].embed_dim: 96 is not among [224, 256, 288]" in str(
        families["s3"].why_not(s3)
    )


def test_reasons_hold_the_numbers_of_a_broken_rule(families: dict[str, SearchSpace]) -> None:
    data = families["pit"].smallest().to_dict()
    data["stages"][0]["num_heads"], data["stages"][1]["num_heads"] = 4, 2
    broken = Architecture.from_dict(data)
    assert families["pit_unconstrained"].why_not(broken) is None
    assert families["pit"].why_not(broken) == "num_heads=(4, 2, 2) of every stage must divide that of the next"
    gpt = families["gpt_lts"].largest().to_dict()
    gpt["stages"][0]["blocks"][0]["d_inner"] = 1984
    assert (
        families["gpt_lts"].why_not(Architecture.from_dict(gpt)) == "d_inner=1984 must be at least 2 times d_model=1024"
    )
    with pytest.raises(ValueError, match="d_inner=1984"):
        families["gpt_lts"].encode(Architecture.from_dict(gpt))
