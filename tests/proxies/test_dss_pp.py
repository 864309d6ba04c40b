"""DSS++: sums of ranks, ties, the published table, and the archive of a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies.archive import Archive
from lightning_tas.proxies.dss_pp import dss_pp
from lightning_tas.proxies.score import INVALID, Score

Pairs = list[tuple[float, float]]


def values(pairs: Pairs) -> list[float]:
    d, s = (np.asarray(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    return dss_pp({"dss.value": d + s, "dss.diversity": d, "dss.saliency": s}).tolist()  # type: ignore[no-any-return]


def rank(column: list[float], i: int) -> float:
    """How many are smaller, plus the middle of those that are equal: 1 for the smallest."""
    smaller, equal = sum(x < column[i] for x in column), sum(x == column[i] for x in column)
    return smaller + (equal + 1) / 2


def sums(pairs: Pairs) -> list[float]:
    d, s = ([float(x) for x in column] for column in zip(*pairs, strict=True))
    return [rank(d, i) + rank(s, i) for i in range(len(pairs))]


def score(diversity: float, saliency: float) -> dict[str, Score]:
    return {"dss": Score(diversity + saliency, extras={"diversity": diversity, "saliency": saliency})}


# T-Razor, Table VI: (diversity, saliency) and DSS++ of PiT-Ti, XS, S and T2T-ViT-7, 10, 12, 14, 19, 24.
TABLE_VI = {
    "pit": [(8.6e3, 2.1e4), (1.1e4, 2.3e4), (1.7e4, 2.7e4)],
    "t2t": [(2.5e4, 8.0e4), (3.1e4, 9.8e4), (3.8e4, 1.2e5), (4.7e4, 5.3e5), (8.3e4, 1.0e6), (1.4e5, 2.2e6)],
}


@pytest.mark.parametrize("family", TABLE_VI)
def test_the_published_table(family: str) -> None:
    assert values(TABLE_VI[family]) == [2.0 * (i + 1) for i in range(len(TABLE_VI[family]))]


def test_a_single_network_has_its_dss() -> None:
    assert values([(3.0, 4.0)]) == [7.0]
    arch = tas.Architecture.vit(24, [1], [2])
    build = {"img_size": 32, "num_classes": 3}
    one, other = (tas.score_one(name, None, arch, build=build).value for name in ("dss", "dss_pp"))
    assert one == other


def test_equal_sums_are_told_apart_by_size() -> None:
    """Ranks (3, 1), (2, 2), (1, 3) all sum to 4; D / 2 + S / 20 is 5.5, 2 and 2.0."""
    found = values([(10.0, 10.0), (2.0, 20.0), (1.0, 30.0)])
    assert found == [4.0 + 0.5 / 2, 4.0, 4.0]
    found = values([(10.0, 10.0), (2.0, 20.0), (1.0, 80.0)])
    assert found == [4.0 + 0.5 * 2 / 3, 4.0, 4.0 + 0.5 * 1 / 3]


small_numbers = st.integers(min_value=1, max_value=6).map(float)
pairs_of_all = st.lists(st.tuples(small_numbers, small_numbers), min_size=2, max_size=25)


@given(pairs_of_all)
@settings(max_examples=100, deadline=None)
def test_values_order_by_sum_of_ranks_then_size(pairs: Pairs) -> None:
    found, plain = values(pairs), sums(pairs)
    assert [math.floor(2 * v) / 2 for v in found] == plain
    d, s = (float(np.median([p[k] for p in pairs])) for k in (0, 1))
    size = [p[0] / d + p[1] / s for p in pairs]
    for i in range(len(pairs)):
        for j in range(len(pairs)):
            if plain[i] == plain[j]:
                assert (found[i] > found[j]) == (size[i] > size[j])
                assert (found[i] == found[j]) == (size[i] == size[j])
        if plain.count(plain[i]) == 1:
            assert found[i] == plain[i]


@given(pairs_of_all, st.integers(min_value=0, max_value=24))
@settings(max_examples=50, deadline=None)
def test_an_archive_ranks_as_if_all_came_at_once(pairs: Pairs, broken: int) -> None:
    archive = Archive("dss_pp")
    for i, pair in enumerate(pairs):
        flawed = i == broken
        given_scores = {"dss": Score.invalid("the output is not finite")} if flawed else score(*pair)
        assert archive.add(given_scores) == i
        kept = [p for k, p in enumerate(pairs[: i + 1]) if k != broken]
        expected = values(kept) if kept else []
        if broken <= i:
            expected.insert(broken, INVALID)
        assert archive.values.tolist() == expected and len(archive) == i + 1


def test_an_archive_equals_score_many() -> None:
    space = tas.spaces.isotropic("s", "autoformer", embed_dim=[24, 32], depth=[1, 2], num_heads=[1], mlp_ratio=[1, 2])
    archs, build = list(space)[:6], {"img_size": 32, "num_classes": 3}
    archive = Archive("dss_pp")
    assert archive.components == ("dss",)
    for arch in archs:
        archive.add({"dss": tas.score_one("dss", None, arch, build=build)})
    together = tas.score_many("dss_pp", None, archs, build=build)
    assert archive.values.tolist() == together.value("dss_pp").tolist()
    archive.values[:] = 0  # a copy
    assert archive.values.tolist() == together.value("dss_pp").tolist()


def test_what_an_archive_refuses() -> None:
    with pytest.raises(UserError, match=r"'snip' does not rank networks.*dss_pp"):
        Archive("snip")
    with pytest.raises(UserError, match=r"dss, which are not given"):
        Archive("dss_pp").add({"snip": Score(1.0)})
    assert Archive("dss_pp").values.shape == (0,)
