"""A small space with every axis, supernets with all parameters random, and the reference numbers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_tas as tas
from lightning_tas import spaces
from lightning_tas.supernets import ElasticViT

vit = tas.Architecture.vit


def prox(embed_dim: int, num_heads: list[int], mlp_ratio: list[float]) -> tas.Architecture:
    """A plain ViT of Auto-Prox's class."""
    return vit(embed_dim, num_heads, mlp_ratio, family="autoprox_vit")


def pit(base_dim: int, mlp_ratio: float, depth: list[int], num_heads: list[int]) -> tas.Architecture:
    """A PiT, in the layout of the released files."""
    data = {"base_dim": base_dim, "mlp_ratio": mlp_ratio, "depth": depth, "num_heads": num_heads}
    return tas.Architecture.from_dict(data)


@dataclass
class Case:
    """A small supernet of one family and architectures on every axis; `mixed` leaves out the blocks `unused`."""

    space: Any
    mixed: tas.Architecture
    corners: list[tas.Architecture]  # the last is off the space, but the allocated weights can hold it
    different: list[tas.Architecture]  # one step from each other
    unused: str
    options: dict[str, Any] = field(default_factory=lambda: {"num_classes": 5, "img_size": (12, 8), "patch_size": 4})

    def make(self, seed: int = 0, **options: Any) -> Any:
        """A randomised supernet in eval mode."""
        return randomise(tas.supernet(self.space, **{**self.options, **options}), seed).eval()


def plain_case(family: str, build: Callable[..., tas.Architecture]) -> Case:
    """Three widths, depths, heads and ratios; more allocated than any choice uses."""
    space = spaces.isotropic(
        "small",
        family,
        embed_dim=[24, 36, 60] if family == "autoprox_vit" else [24, 40, 56],
        depth=[2, 3, 4],
        num_heads=[1, 2, 3],
        mlp_ratio=[1, 1.5, 2],
        allocated={"embed_dim": 64, "depth": 4, "num_heads": 3, "mlp_ratio": 2},
    )
    low, middle, high = space.choices("embed_dim")
    mixed = build(middle, [1, 3, 2], [2, 1, 1.5])
    corners = [
        build(low, [1] * 2, [1] * 2),
        build(middle, [2] * 3, [1.5] * 3),
        build(high, [3] * 4, [2] * 4),
        mixed,
        build(low, [3, 1, 2, 1], [2, 1.5, 1, 2]),
        build(high, [1, 2], [1, 2]),
        build(50, [2, 5] if family == "autoprox_vit" else [2, 3], [1.3, 2.05]),
    ]
    different = [
        build(high, [2, 2, 2], [1.5, 1.5, 1.5]),
        build(middle, [2, 2], [1.5, 1.5]),
        build(middle, [2, 3, 2], [1.5, 1.5, 1.5]),
        build(middle, [2, 2, 2], [1.5, 1.5, 2]),
        build(middle, [2, 2, 2], [1.5, 1.5, 1.5]),
    ]
    return Case(space, mixed, corners, different, r"blocks\.3\.")


def pit_case() -> Case:
    """Three stages of up to two blocks; images of 5 x 3 overlapping patches, so grids of 5 x 3, 3 x 2, 2 x 1."""
    space = spaces.SearchSpace(
        "small",
        "pit",
        [
            spaces.Dimension("base_dim", "network", (6, 8, 12)),
            spaces.Dimension("mlp_ratio", "network", (1, 1.5, 2)),
            spaces.Dimension("num_heads", "stage", (1, 2, 4)),
            spaces.Dimension("depth", "stage", (1, 2)),
        ],
        [spaces.Predicate("divides_next", ("num_heads",))],
        stages=3,
        allocated={"base_dim": 16},
    )
    mixed = pit(8, 1.5, [2, 1, 2], [1, 2, 4])
    corners = [
        pit(6, 1, [1, 1, 1], [1, 1, 1]),
        pit(8, 1.5, [1, 2, 1], [2, 2, 4]),
        pit(12, 2, [2, 2, 2], [4, 4, 4]),
        mixed,
        pit(12, 1, [1, 2, 2], [1, 4, 4]),
        pit(7, 1.3, [2, 1, 1], [1, 3, 6]),
    ]
    base: dict[str, Any] = {"base_dim": 8, "mlp_ratio": 1.5, "depth": [2, 1, 2], "num_heads": [1, 2, 2]}
    steps: list[dict[str, Any]] = [
        {},
        {"base_dim": 12},
        {"mlp_ratio": 2},
        {"depth": [2, 2, 2]},
        {"num_heads": [1, 2, 4]},
        {"num_heads": [2, 2, 2]},
    ]
    return Case(space, mixed, corners, [pit(**{**base, **step}) for step in steps], r"stages\.1\.blocks\.1\.")


CASES: dict[str, Callable[[], Case]] = {
    "autoformer": lambda: plain_case("autoformer", vit),
    "autoprox_vit": lambda: plain_case("autoprox_vit", prox),
    "pit": pit_case,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Every family in turn."""
    return CASES[request.param]()


@pytest.fixture(scope="session")
def cases() -> dict[str, Callable[[], Case]]:
    """Makers of the small supernets by family."""
    return CASES


@pytest.fixture(scope="session")
def small_space() -> Any:
    """The small space of family "autoformer"."""
    return CASES["autoformer"]().space


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
