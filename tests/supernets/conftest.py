"""A small space with every axis, supernets with all parameters random, and the reference numbers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_tas import spaces
from lightning_tas.supernets import ElasticViT


@pytest.fixture(scope="session")
def small_space() -> Any:
    """Three widths, depths, heads and ratios; more allocated than any choice uses."""
    return spaces.isotropic(
        "small",
        embed_dim=[24, 40, 56],
        depth=[2, 3, 4],
        num_heads=[1, 2, 3],
        mlp_ratio=[1, 1.5, 2],
        allocated={"embed_dim": 64, "depth": 4, "num_heads": 3, "mlp_ratio": 2},
    )


def randomise(net: nn.Module, seed: int = 0) -> Any:
    """Every parameter random: norms around 1, biases, tables, tokens and weights around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return net


@pytest.fixture
def make_net(small_space: Any) -> Callable[..., ElasticViT]:
    """A randomised supernet of the small space on 12 x 8 images of 4 x 4 patches, in eval mode."""

    def make(seed: int = 0, **options: Any) -> ElasticViT:
        defaults = {"num_classes": 5, "img_size": (12, 8), "patch_size": 4}
        return randomise(ElasticViT(small_space, **{**defaults, **options}), seed).eval()

    return make


@pytest.fixture(scope="session")
def golden(shared: Path) -> Callable[[str], Any]:
    """Reader of a JSON file of the reference numbers."""
    return lambda name: json.loads((shared / "golden" / name).read_text())


@pytest.fixture(scope="session")
def fill(shared: Path) -> Any:
    """The module that makes the reference weights and images."""
    return _load(shared / "golden" / "fill.py")


@pytest.fixture(scope="session")
def naive() -> Any:
    """The written-out form of the network (naive.py)."""
    return _load(Path(__file__).with_name("naive.py"))


@pytest.fixture(scope="session")
def randomised() -> Callable[..., Any]:
    """`randomise`: fills every parameter of a network at random and returns it."""
    return randomise


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"supernet_tests_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
