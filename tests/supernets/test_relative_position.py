"""Factorised relative position against the written-out (N, N, 64) form, its geometry, precision and transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_tas.supernets.relative_position import RelativePosition, attention, slots, table_rows


def tables(grid: tuple[int, int], seed: int, dtype: torch.dtype = torch.float64) -> RelativePosition:
    torch.manual_seed(seed)
    module = RelativePosition(grid).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def explicit(
    naive: Any, qkv: Tensor, keys: RelativePosition, values: RelativePosition, grid: tuple[int, int]
) -> Tensor:
    vertical, horizontal = naive.offsets(*grid)
    r_k, r_v = (t.vertical[vertical] + t.horizontal[horizontal] for t in (keys, values))
    heads = [naive.attention(*qkv[:, :, :, h].unbind(2), r_k, r_v) for h in range(qkv.shape[3])]
    return torch.cat(heads, dim=-1)


@given(gh=st.integers(1, 5), gw=st.integers(1, 5), heads=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_equals_the_explicit_form_with_gradients(naive: Any, gh: int, gw: int, heads: int, seed: int) -> None:
    grid = (gh, gw)
    keys, values = tables(grid, seed), tables(grid, seed + 1)
    qkv = torch.randn(2, 1 + gh * gw, 3, heads, 64, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 1 + gh * gw, 64 * heads, dtype=torch.float64)
    wanted = [qkv, *keys.parameters(), *values.parameters()]
    results = []
    forms: list[Callable[..., Tensor]] = [attention, partial(explicit, naive)]
    for form in forms:
        out = form(qkv, keys, values, grid)
        results.append((out, *torch.autograd.grad((out * weights).sum(), wanted, allow_unused=False)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-10, rtol=1e-10)


def test_deterministic_operations_compute_the_same() -> None:
    """Slots by products with indicators in place of gather and scatter_add, with all gradients; no such op is left."""
    grid = (3, 2)
    keys, values = tables(grid, 0), tables(grid, 1)
    qkv = torch.randn(2, 7, 3, 2, 64, dtype=torch.float64, requires_grad=True)
    wanted = [qkv, *keys.parameters(), *values.parameters()]
    results, used = [], set()
    for exact in (False, True):
        torch.use_deterministic_algorithms(exact)
        try:
            out = attention(qkv, keys, values, grid)
        finally:
            torch.use_deterministic_algorithms(False)
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted, retain_graph=True)))
        left, seen = [out.grad_fn], set()
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [following for following, _ in node.next_functions]
        used = {type(node).__name__ for node in seen}
        assert any(name.startswith(("GatherBackward", "ScatterAddBackward")) for name in used) != exact
    for fast, exact_one in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact_one, atol=1e-12, rtol=1e-12)


def test_sizes_of_the_published_tables() -> None:
    module = RelativePosition((14, 14))
    assert table_rows(14) == 30
    assert module().shape == (60, 64)
    assert [tuple(p.shape) for p in module.parameters()] == [(30, 64), (30, 64)]
    assert slots((14, 14), torch.device("cpu"))[0].shape == (197, 32)


def test_dropout_is_the_same_for_values_and_their_tables(naive: Any) -> None:
    """Values that are indicators of their token read the dropped weights off; the tables must have met the same."""
    grid = (3, 4)
    n = 13
    keys, values = tables(grid, 0), tables(grid, 1)
    qkv = torch.randn(1, n, 3, 1, 64, dtype=torch.float64)
    qkv[:, :, 2] = torch.eye(n, 64, dtype=torch.float64)[None, :, None]
    without = copy.deepcopy(values)
    with torch.no_grad():
        for parameter in without.parameters():
            parameter.zero_()
    outs = []
    for table in (without, values):
        torch.manual_seed(3)
        outs.append(attention(qkv, keys, table, grid, dropout=0.4))
    weights = outs[0][0, :, :n]
    assert (weights == 0).any() and (weights > 0).any()
    vertical, horizontal = naive.offsets(*grid)
    r_v = values.vertical[vertical] + values.horizontal[horizontal]
    torch.testing.assert_close((outs[1] - outs[0])[0], torch.einsum("nm,nmd->nd", weights, r_v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("relative", [True, False])
def test_logits_beyond_float16_stay_finite_under_autocast(dtype: torch.dtype, relative: bool) -> None:
    grid = (2, 2)
    keys, values = tables(grid, 0, torch.float32), tables(grid, 1, torch.float32)
    qkv = 300 * torch.randn(1, 5, 3, 1, 64)
    assert (qkv[0, :, 0, 0] @ qkv[0, :, 1, 0].T).abs().max() > torch.finfo(torch.float16).max
    used = (keys, values) if relative else (None, None)
    exact = attention(qkv.to(dtype).float(), used[0], used[1], grid)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(qkv.to(dtype), used[0], used[1], grid)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.float(), exact, atol=2.0, rtol=2e-2)


def test_index_made_under_inference_mode_serves_training() -> None:
    grid = (2, 7)
    slots.cache_clear()
    keys, values = tables(grid, 0), tables(grid, 1)
    qkv = torch.randn(1, 15, 3, 1, 64, dtype=torch.float64)
    with torch.inference_mode():
        attention(qkv, keys, values, grid)
    attention(qkv.requires_grad_(), keys, values, grid).sum().backward()
    assert keys.vertical.grad is not None


def test_works_under_function_transforms() -> None:
    """Per-sample gradients by vmap and second derivatives, which proxies need, on the mathematical kernel."""
    grid = (2, 2)
    keys, values = tables(grid, 0), tables(grid, 1)
    qkv = torch.randn(3, 5, 3, 2, 64, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        module = _Call(keys, values, grid)
        out: Tensor = torch.func.functional_call(module, parameters, (one[None],))
        return out.pow(2).sum()

    parameters = {k: v.detach() for k, v in _Call(keys, values, grid).named_parameters()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        batched = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, qkv)
        single = [torch.func.grad(loss)(parameters, one) for one in qkv]
        twice = torch.autograd.functional.hvp(lambda x: loss(parameters, x), qkv[0], torch.ones_like(qkv[0]))[1]
    for name, value in batched.items():
        torch.testing.assert_close(value, torch.stack([s[name] for s in single]))
    assert torch.isfinite(twice).all() and twice.abs().sum() > 0


class _Call(torch.nn.Module):
    def __init__(self, keys: RelativePosition, values: RelativePosition, grid: tuple[int, int]) -> None:
        super().__init__()
        self.keys, self.values, self.grid = keys, values, grid

    def forward(self, qkv: Tensor) -> Any:
        return attention(qkv, self.keys, self.values, self.grid)
