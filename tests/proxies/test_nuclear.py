"""Nuclear norms by Gram matrices against singular values, and the memo for shared weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from lightning_tas.proxies import nuclear
from lightning_tas.proxies.nuclear import NormCache, nuclear_norms


def draw(rows: int, columns: int, rank: int | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(rows, columns, generator=generator)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


def singular(matrix: Tensor) -> float:
    return torch.linalg.svdvals(matrix.double()).sum().item()


def test_norms_are_sums_of_singular_values() -> None:
    matrices = [draw(60, 20), draw(20, 60), draw(30, 30), draw(1, 7), draw(60, 20, seed=1)]
    found = nuclear_norms(matrices)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([singular(m) for m in matrices], rel=1e-12)
    assert nuclear_norms([]).shape == (0,)


def test_low_rank_costs_few_digits() -> None:
    """A Gram matrix in float32 would be off by 1e-3: 59 eigenvalues of rounding, each under a root."""
    low = draw(200, 60, rank=1)
    assert nuclear_norms([low, torch.zeros(4, 3)]).tolist() == pytest.approx([singular(low), 0.0], rel=1e-6, abs=0)
    rough = torch.linalg.eigvalsh(low.t() @ low).clamp_min(0).sqrt().sum().item()
    assert rough != pytest.approx(singular(low), rel=1e-4)


def test_zero_padding_changes_nothing() -> None:
    matrix = draw(18, 12)
    padded = torch.nn.functional.pad(matrix, (0, 4, 0, 6))
    assert nuclear_norms([padded]).item() == pytest.approx(singular(matrix), rel=1e-12)


def test_threads_and_company_change_no_bit() -> None:
    matrices = [draw(40 + i, 30, seed=i) for i in range(6)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [nuclear_norms([m]).item() for m in matrices]
        torch.set_num_threads(3)
        assert nuclear_norms(matrices).tolist() == alone
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 3 and seen == [3]
    finally:
        torch.set_num_threads(before)


def test_shapes_that_a_gpu_batches() -> None:
    matrices = [draw(9, 6), draw(5, 7), draw(9, 6, seed=2)]
    assert nuclear._by_shape(matrices).tolist() == pytest.approx([singular(m) for m in matrices], rel=1e-5)


def test_a_memo_knows_weights_by_their_content() -> None:
    cache = NormCache()
    first, second = draw(12, 8), draw(12, 8, seed=1)
    expected = [singular(first), singular(second)]
    assert cache.norms(["a", "b"], [first, second]).tolist() == pytest.approx(expected, rel=1e-12)
    assert cache.computed == 2
    assert cache.norms(["b", "a"], [second.clone(), first.clone()]).tolist() == pytest.approx(expected[::-1], rel=1e-12)
    assert cache.computed == 2
    # The same layer with other weights (another seed, a training step) or another slice is computed anew.
    assert cache.norms(["a"], [second]).item() == pytest.approx(expected[1], rel=1e-12)
    assert cache.norms(["a"], [first[:6]]).item() == pytest.approx(singular(first[:6]), rel=1e-12)
    assert cache.computed == 4
    assert cache.norms([], []).shape == (0,)


def test_a_memo_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nuclear, "_KEPT", 3)
    cache = NormCache()
    matrices = [draw(4, 3, seed=i) for i in range(5)]
    assert cache.norms(["a"] * 5, matrices).tolist() == pytest.approx([singular(m) for m in matrices], rel=1e-12)
    assert len(cache) == 3
    cache.norms(["a"], [matrices[2]])  # now the youngest
    cache.norms(["a"] * 2, matrices[:2])
    assert cache.computed == 7
    cache.norms(["a"], [matrices[2]])
    assert cache.computed == 7
