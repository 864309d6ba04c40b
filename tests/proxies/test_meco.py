"""MeCo equals its formula with numpy's correlation and general eigenvalues, for every choice of rows and modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies.meco import least_eigenvalue
from lightning_tas.proxies.roles import find_layers


def naive(output: Tensor, rows: str) -> float:
    """Least eigenvalue of the Pearson correlation of one image's features; one row and what is no number count 0."""
    if output.ndim == 1:
        return 0.0  # logits: one observation of each
    matrix = output.double().numpy()
    matrix = matrix.reshape(len(matrix), -1)
    if (rows == "channels" and output.ndim == 2) or (rows == "min" and len(matrix) > matrix.shape[1]):
        matrix = matrix.T
    if matrix.shape[1] == 1 or len(matrix) == 1:
        return 0.0
    correlation = np.nan_to_num(np.corrcoef(matrix), nan=0.0)
    return float(np.linalg.eigvals(correlation).real.min())


@pytest.mark.parametrize("rows", ["tokens", "channels", "min"])
@pytest.mark.parametrize("modules", ["layers", "all"])
def test_equals_formula(small: Any, rows: str, modules: str) -> None:
    """17 tokens of 24 channels, or 37, of which 24 are linearly independent; a PiT has both at once."""
    side = 16 if rows == "tokens" else 24
    net = tas.network(small.arch, num_classes=5, img_size=side, patch_size=4).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.1)
    images = torch.randn(2, 3, side, side, generator=generator)
    found = tas.score_one("meco", net, images=images, rows=rows, modules=modules)
    layers = [layer.module for layer in find_layers(net) if layer.role != "norm"]
    outputs: list[Tensor] = []
    for module in net.modules() if modules == "all" else layers:
        module.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with torch.no_grad():
        net(images)
    terms = [naive(output, rows) for output in outputs]
    assert sum(term > 1e-6 for term in terms) >= 2
    assert found.value == pytest.approx(sum(terms), abs=1e-7 * len(terms), rel=1e-5)


def test_more_rows_than_observations_are_dependent() -> None:
    """What is not computed would be 0 up to rounding; one row fewer is not."""
    rows = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    assert least_eigenvalue(rows) == 0.0 and abs(naive(rows, "tokens")) < 1e-12
    assert least_eigenvalue(rows[:5]).item() == pytest.approx(naive(rows[:5], "tokens"), abs=1e-12) != 0.0


def test_constant_rows_count_as_the_reference_counts_them() -> None:
    """Their correlations are no numbers, hence 0, also with themselves."""
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    rows[1] = 2.0
    assert least_eigenvalue(rows) == 0.0


def test_one_row_says_nothing() -> None:
    """Its correlation with itself is 1 whatever it holds."""
    assert least_eigenvalue(torch.randn(1, 8, generator=torch.Generator().manual_seed(0))) == 0.0


def test_unknown_choices_are_refused(small: Any) -> None:
    with pytest.raises(UserError, match=r"rows of meco: 'token' is not valid.*tokens"):
        small.score("meco", rows="token")
    with pytest.raises(UserError, match=r"modules of meco: 'every' is not valid.*layers"):
        small.score("meco", modules="every")
