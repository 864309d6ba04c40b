"""Small networks of every family with all parameters random, and the networks of the reference numbers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.architecture import Architecture, Block, Stage

FAMILIES = ("autoformer", "autoprox_vit", "pit")
# Names of modules in the released Auto-Prox networks, and ours.
AUTO_PROX = {"attn.qkv_transform.": "attn.qkv.", "attn.projection.": "attn.proj.", "transformers.": "stages."}


@dataclass
class Small:
    """A small network with a batch of four images."""

    arch: Architecture
    net: Any
    images: Tensor
    labels: Tensor

    def score(self, name: str, **options: Any) -> tas.Score:
        return tas.score_one(name, self.net, images=self.images, labels=self.labels, **options)


def small_arch(family: str) -> Architecture:
    """Blocks of different sizes; a PiT with a square pooling layer for its class token and one that is not."""
    if family == "pit":
        stages = [Stage([Block()] * depth, num_heads=heads) for depth, heads in ((2, 1), (1, 2), (1, 2))]
        return Architecture(family, stages, base_dim=12, mlp_ratio=2)
    return Architecture.vit(24, [1, 2], [1.5, 2], family=family)


def randomise(net: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random: norms around 1, all others around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + drawn if "norm" in name and name.endswith("weight") else drawn)
    return net


@pytest.fixture(params=FAMILIES)
def small(request: pytest.FixtureRequest) -> Small:
    """A small random network of every family in turn."""
    arch = small_arch(request.param)
    net = randomise(tas.network(arch, num_classes=5, img_size=32, patch_size=16)).eval()
    generator = torch.Generator().manual_seed(1)
    return Small(arch, net, torch.randn(4, 3, 32, 32, generator=generator), torch.tensor([0, 3, 1, 4]))


@pytest.fixture(scope="session")
def golden(shared: Path) -> Callable[[str], Any]:
    """Reader of a JSON file of the reference numbers."""
    return lambda name: json.loads((shared / "golden" / name).read_text())


@pytest.fixture(scope="session")
def fill(shared: Path) -> Any:
    """The module that makes the reference weights and images."""
    spec = importlib.util.spec_from_file_location("proxy_tests_fill", shared / "golden" / "fill.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def auto_prox(golden: Any, fill: Any) -> Callable[[str, int], tuple[Small, dict[str, float]]]:
    """Network number `row` of a file of Auto-Prox's scores, with its batch of four, and these scores."""

    def make(space: str, row: int) -> tuple[Small, dict[str, float]]:
        record = golden(f"proxy_{space}_det.json")["rows"][row]
        net = tas.network(record["arch"], num_classes=100, drop_path_rate=0.0)
        state = {}
        for name, parameter in net.named_parameters():
            theirs = name.replace("patch_embed.proj.", f"patch_embed.{'conv' if space == 'pit' else 'projection'}.")
            for released, ours in AUTO_PROX.items():
                theirs = theirs.replace(ours, released)
            state[theirs] = torch.from_numpy(fill.values(theirs, tuple(parameter.shape)))
        net.load_reference(state, source="autoprox")
        labels = np.random.Generator(np.random.PCG64(1)).integers(0, 100, 4)
        small = Small(net.arch, net.eval(), torch.from_numpy(fill.images()), torch.from_numpy(labels))
        return small, record["scores"]

    return make
