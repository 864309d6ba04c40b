"""SEPT against whole numbers of any size; NTSR's ranks."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.ntsr import ntsr
from lightning_tas.proxies.sept import separation_rank, sizes


def log(value: Fraction) -> float:
    """Natural logarithm of a whole number larger than any float."""
    assert value.denominator == 1
    return math.log(value.numerator)


def exact(d: list[int], tokens: list[int]) -> float:
    """Equation 16 in whole numbers; the sum of a geometric series where d = 1."""
    total = sum(sum(Fraction(width) ** i for i in range(t + 1)) for width, t in zip(d, tokens, strict=True))
    return log(Fraction(sum(d))) + log(Fraction(total))


def test_the_published_sizes() -> None:
    """AutoFormer-Tiny's smallest width at 224 pixels; the value is the specification's."""
    assert separation_rank([192] * 12, [197] * 12) == pytest.approx(1045.959119, abs=5e-7)
    assert exact([192] * 12, [197] * 12) == pytest.approx(1045.959119, abs=5e-7)
    # The widest block rules: 240 instead of 192 is worth far more than two more blocks.
    assert separation_rank([240] * 12, [197] * 12) - separation_rank([192] * 12, [197] * 12) == pytest.approx(44, abs=1)
    assert separation_rank([192] * 14, [197] * 14) - separation_rank([192] * 12, [197] * 12) == pytest.approx(
        0.3, abs=0.05
    )


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(1, 200)), min_size=1, max_size=6))
def test_equals_exact_whole_numbers(blocks: list[tuple[int, int]]) -> None:
    d, tokens = [width for width, _ in blocks], [t for _, t in blocks]
    assert separation_rank(d, tokens) == pytest.approx(exact(d, tokens), rel=1e-12)


def test_a_network_is_read_off_its_architecture() -> None:
    net = tas.network(Architecture.vit(24, [1, 3], [1, 2]), num_classes=3, img_size=32, patch_size=8)
    assert tas.score_one("sept", net, batch_size=1).value == pytest.approx(exact([24, 24], [17, 17]), rel=1e-12)
    queries = tas.score_one("sept", net, batch_size=1, width="qkv")
    assert queries.value == pytest.approx(exact([64, 192], [17, 17]), rel=1e-12)


def test_every_stage_has_its_own_width_and_tokens() -> None:
    pit = Architecture.from_dict({"base_dim": 16, "mlp_ratio": 4, "depth": [2, 1, 1], "num_heads": [2, 4, 8]})
    assert sizes(pit, (27, 27)) == ([32, 32, 64, 128], [730, 730, 197, 50])
    assert sizes(pit, (27, 27), "qkv") == sizes(pit, (27, 27))


def test_autoformer_tiny_has_nine_values() -> None:
    space = tas.space("autoformer_tiny")
    values = {round(separation_rank(*sizes(arch, (14, 14))), 9) for arch in space.sample(seed=0, n=300)}
    assert len(values) == 9


def test_mistakes() -> None:
    net = tas.network(Architecture.vit(24, [1], [1]), num_classes=3, img_size=32, patch_size=8)
    with pytest.raises(UserError, match="embed"):
        tas.score_one("sept", net, batch_size=1, width="embde")
    other = Architecture.vit(24, [1], [1], family="elsewhere")
    assert sizes(other, (2, 2)) == ([24], [5])
    with pytest.raises(UserError, match="'elsewhere'"):
        sizes(other, (2, 2), "qkv")
    del net.arch
    score = tas.score_one("sept", net, batch_size=1)
    assert not score.valid and "net.arch" in str(score.reason)


def test_ntsr_is_the_mean_rank_of_the_comparison_set() -> None:
    table = {"ntkt.value": np.array([5.0, 1.0, 9.0, 5.0]), "sept.value": np.array([2.0, 2.0, 2.0, 7.0])}
    assert ntsr(table).tolist() == [(2.5 + 2) / 2, (1 + 2) / 2, (4 + 2) / 2, (2.5 + 4) / 2]


def test_ntsr_of_networks() -> None:
    archs = [Architecture.vit(width, [1] * depth, [1] * depth) for width, depth in ((8, 1), (16, 1), (8, 2))]
    build = {"num_classes": 3, "img_size": 16, "patch_size": 8}
    found = tas.score_many(["ntsr", "ntkt", "sept"], None, archs, batch_size=2, build=build)
    assert found.value("ntsr").tolist() == ntsr({f"{k}.value": found.value(k) for k in ("ntkt", "sept")}).tolist()
