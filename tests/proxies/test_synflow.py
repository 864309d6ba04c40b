"""SynFlow and SNIP against their formulas and Auto-Prox's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tas.proxies.score import Score


def naive(net: nn.Module, images: Tensor, labels: Tensor | None) -> tuple[list[float], float]:
    """(sum |g w| by block, in all) over linear layers and convolutions, in float64; without labels SynFlow's R."""
    net = copy.deepcopy(net).double()
    if labels is None:
        for parameter in net.parameters():
            parameter.data = parameter.data.abs()
        net(torch.ones_like(images[:1]).double()).sum().backward()
    else:
        F.cross_entropy(net(images.double()), labels).backward()
    blocks: list[float] = []
    total = 0.0
    for name, module in net.named_modules():
        if name.endswith("attn"):
            blocks.append(0.0)
        if isinstance(module, nn.Linear | nn.Conv2d):
            assert isinstance(module.weight.grad, Tensor)
            term = (module.weight * module.weight.grad).abs().sum().item()
            total += term
            if "blocks." in name:
                blocks[-1] += term
    return blocks, total


def test_synflow_is_its_formula(small: Any) -> None:
    blocks, total = naive(small.net, small.images, None)
    found: Score = small.score("synflow")
    assert found.parts == pytest.approx(blocks, rel=1e-12)
    assert found.value == pytest.approx(total, rel=1e-12)


def test_snip_is_its_formula(small: Any) -> None:
    blocks, total = naive(small.net, small.images, small.labels)
    found: Score = small.score("snip")
    assert found.parts == pytest.approx(blocks, rel=2e-5)
    assert found.value == pytest.approx(total, rel=2e-5)


ROWS = [("pit", 0), ("pit", 2), ("pit", 3)]
SLOW_ROWS = [("pit", 1), *(("autoformer", row) for row in range(4))]


@pytest.mark.parametrize(("space", "row"), [*ROWS, *(pytest.param(*r, marks=pytest.mark.slow) for r in SLOW_ROWS)])
def test_scores_equal_auto_proxs(space: str, row: int, auto_prox: Any) -> None:
    net, scores = auto_prox(space, row)
    assert net.score("synflow").value == pytest.approx(scores["synflow"], rel=1e-12)
    assert net.score("snip").value == pytest.approx(scores["snip"], rel=1e-6)
