"""Relative position on a GPU: same numbers as on the CPU, in each precision, also where float16 overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lightning_tas as tas
from lightning_tas.supernets.relative_position import RelativePosition, attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIXED = tas.Architecture.vit(40, [1, 3, 2], [2, 1, 1.5])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str
)
@pytest.mark.parametrize("grid", [(3, 5), (14, 14), (24, 24)], ids=str)
def test_attention_equals_the_cpu(grid: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    results = []
    qkv = torch.randn(2, 1 + grid[0] * grid[1], 3, 2, 64)
    keys, values = RelativePosition(grid), RelativePosition(grid)
    for tables in (keys, values):
        for parameter in tables.parameters():
            parameter.data.normal_(std=0.5)
    for device, kind in (("cpu", torch.float64), ("cuda", torch.float32)):
        keys, values = keys.to(device, kind), values.to(device, kind)
        x = qkv.to(device, kind).requires_grad_()
        with torch.autocast("cuda", dtype=dtype, enabled=device == "cuda" and dtype != torch.float32):
            out = attention(x.to(dtype) if device == "cuda" else x, keys, values, grid)
        gradients = torch.autograd.grad(out.float().square().sum(), [x, *keys.parameters(), *values.parameters()])
        results.append([t.detach().double().cpu() for t in (out, *gradients)])
    for here, there in zip(*results, strict=True):
        assert (here - there).norm() < tolerance * here.norm()


def test_float16_logits_do_not_overflow() -> None:
    keys, values = RelativePosition((2, 2)).cuda(), RelativePosition((2, 2)).cuda()
    qkv = (300 * torch.randn(1, 5, 3, 1, 64, device="cuda")).half()
    with torch.autocast("cuda", dtype=torch.float16):
        out = attention(qkv, keys, values, (2, 2))
    assert out.dtype == torch.float16 and torch.isfinite(out).all()


def test_subnet_equals_the_supernet(make_net: Callable[..., Any]) -> None:
    net = make_net().cuda()
    x = torch.randn(4, 3, 12, 8, device="cuda")
    torch.testing.assert_close(net(x, MIXED), net.subnet(MIXED)(x), atol=1e-5, rtol=1e-5)
