"""Under autocast, attention's softmax and the loss are computed in float32; what lower precision would give beside it.

References are in float64 on the same rounded inputs, so that the only errors are those of computing and of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tas.supernets.relative_position import HEAD_DIM, RelativePosition, attention, slots
from lightning_tas.training.config import TrainConfig

Make = Callable[..., Any]
GRID = (4, 4)


def reference(qkv: Tensor, tables: tuple[Tensor, Tensor] | None, softmax: torch.dtype) -> Tensor:
    """Attention (B, N, H * 64) in float64 but for the softmax, with the (N, N, 64) tensors of relative position."""
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, 64)
    logits = q @ k.transpose(-1, -2)
    relative = None
    if tables is not None:
        index, member = slots(GRID, qkv.device)
        of_keys, relative = (torch.einsum("nsd,ms->nmd", table.double()[index], member.double()) for table in tables)
        logits = logits + torch.einsum("bhnd,nmd->bhnm", q, of_keys)
    weights = (logits * HEAD_DIM**-0.5).to(softmax).softmax(-1).double()
    out = weights @ v
    if relative is not None:
        out = out + torch.einsum("bhnm,nmd->bhnd", weights, relative)
    return out.transpose(1, 2).flatten(2)


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


# Attention with dropout takes another kernel; so rare a dropout drops nothing here.
@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_attention_is_not_rounded(dtype: torch.dtype, relative: bool, dropout: float) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(4, 17, 3, 2, HEAD_DIM)
    qkv[:, :, :2] *= 3
    qkv = qkv.to(dtype)
    keys, values = (RelativePosition(GRID), RelativePosition(GRID)) if relative else (None, None)
    tables = None
    if keys is not None and values is not None:
        for parameter in (*keys.parameters(), *values.parameters()):
            torch.nn.init.normal_(parameter, std=0.2)
        tables = (keys().to(dtype), values().to(dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        got = attention(qkv, keys, values, GRID, dropout)
    assert got.dtype == dtype
    exact, rounded = reference(qkv, tables, torch.float64), reference(qkv, tables, dtype)
    assert float((qkv[:, :, 0].double() @ qkv[:, :, 1].double().transpose(-1, -2)).abs().max()) > 80  # large logits
    error, of_output = rms(got.double() - exact), rms(exact.to(dtype).double() - exact)
    # Nearly all of it comes from rounding what is returned; with relative position, which sums two such products, and
    # rounds a query's scores of positions as the query itself is rounded, up to half as much again.
    assert error < (1.5 if relative else 1.1) * of_output
    assert rms(rounded - exact) > 2 * error  # what a softmax in `dtype` would cost, before its output is rounded


def test_float16_logits_beyond_its_range_stay_finite() -> None:
    torch.manual_seed(0)
    qkv = (torch.randn(2, 17, 3, 1, HEAD_DIM) * 200).half()
    assert float((qkv[:, :, 0, 0].double() @ qkv[:, :, 1, 0].double().transpose(-1, -2)).abs().max()) > 1e6
    with torch.autocast("cpu", torch.float16):
        assert torch.isfinite(attention(qkv, None, None, GRID)).all()


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_is_computed_in_float32(make_module: Make, soft: bool) -> None:
    module = make_module(TrainConfig(label_smoothing=0.1))
    torch.manual_seed(0)
    logits, targets = (torch.randn(64, 4) * 40).bfloat16(), torch.randint(4, (64,))
    wanted = torch.rand(64, 4).softmax(-1) if soft else targets
    smoothing = 0.0 if soft else 0.1
    exact = F.cross_entropy(logits.double(), wanted.double() if soft else wanted, label_smoothing=smoothing)
    with torch.autocast("cpu", torch.bfloat16):
        got = module.criterion(logits, wanted)
    low = F.cross_entropy(logits, wanted.bfloat16() if soft else wanted, label_smoothing=smoothing)
    assert got.dtype == torch.float32 and float(got) == pytest.approx(float(exact), rel=1e-6)
    assert float(low) != pytest.approx(float(exact), rel=1e-4)


def test_a_step_in_mixed_precision_gives_a_float32_loss_and_bfloat16_products(
    make_module: Make, make_loader: Make, make_trainer: Make
) -> None:
    module, seen = make_module(), {}
    sound = module.criterion
    module.net.blocks[0].attn.proj.register_forward_hook(lambda _, __, out: seen.update(product=out.dtype))

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        loss = sound(logits, targets)
        seen.update(loss=loss.dtype, targets=targets.dtype)
        return loss

    module.criterion = criterion
    make_trainer(max_steps=1, precision="bf16-mixed").fit(module, make_loader())
    assert seen == {"product": torch.bfloat16, "loss": torch.float32, "targets": torch.float32}
