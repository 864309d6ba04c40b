"""NASWOT equals its formula on GELU inputs, its counts are exact, and it says when two images are the same to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_tas.proxies.naswot as naswot_file
from lightning_tas.proxies.naswot import agreement


def naive(net: nn.Module, images: Tensor) -> float:
    """The formula with 0 and 1, over all tokens, from the inputs of every GELU."""
    kernel = np.zeros((len(images), len(images)))

    def look(module: nn.Module, inputs: object, output: Tensor) -> None:
        x = (output.flatten(1) > 0).double()
        kernel[...] += (x @ x.t() + (1 - x) @ (1 - x).t()).numpy()

    handles = [layer.register_forward_hook(look) for name, layer in net.named_modules() if name.endswith("mlp.fc1")]
    with torch.no_grad():
        net(images)
    for handle in handles:
        handle.remove()
    return float(np.linalg.slogdet(kernel)[1])


def redrawn(net: nn.Module, seed: int) -> nn.Module:
    """Weights of linear layers and convolutions N(0, 1), their biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.normal_(layer.weight, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return net


def test_equals_formula(small: Any) -> None:
    assert small.score("naswot").value == pytest.approx(naive(small.net, small.images), rel=1e-12)


def test_redraws_weights(small: Any) -> None:
    """Not the network's own weights, and others with another seed; on average what redrawing by hand gives."""
    own = small.score("naswot").value
    found = [small.score("naswot", seed=seed, redraw=True).value for seed in range(20)]
    by_hand = [naive(redrawn(small.net, seed), small.images) for seed in range(20)]
    assert len(set(found)) > 15 and own not in found
    assert abs(np.mean(found) - np.mean(by_hand)) < 3 * np.hypot(np.std(found), np.std(by_hand)) / np.sqrt(20)


def test_counts_are_exact_in_any_number_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    inputs[:, ::7] = 0.0  # not positive
    expected = [[((a > 0) == (b > 0)).sum().item() for b in inputs] for a in inputs]
    assert agreement(inputs).tolist() == expected
    monkeypatch.setattr(naswot_file, "_EXACT", 64)
    assert agreement(inputs).tolist() == expected


def test_two_equal_images_are_no_score(small: Any) -> None:
    small.images[3] = small.images[1]
    found = small.score("naswot")
    assert not found.valid and found.reason == "two images have the same code"


@pytest.mark.slow
@pytest.mark.parametrize(("space", "rows"), [("pit", 4), ("autoformer", 4)])
def test_reference_numbers(auto_prox: Any, golden: Any, space: str, rows: int) -> None:
    """The reference redraws weights from a random state that it does not record: its numbers are such draws.

    Draws spread by about 0.1; of the weights that the files name, its numbers are 0.3 to 1 away.
    """
    by_redrawing, by_own = np.empty(rows), np.empty(rows)
    assert len(golden(f"proxy_{space}_det.json")["rows"]) == rows, "all of them"
    for row in range(rows):
        small, expected = auto_prox(space, row)
        draws = [small.score("naswot", seed=seed, redraw=True).value for seed in range(3)]
        by_redrawing[row] = abs(expected["nwot"] - np.mean(draws))
        by_own[row] = abs(expected["nwot"] - small.score("naswot").value)
    assert by_redrawing.max() < 0.3 and by_redrawing.mean() < 0.15
    assert by_own.min() > 0.3 and by_own.mean() > 0.4
