"""A small real supernet, a small data set, and a Trainer that is quiet: what the tests of training share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_tas import spaces
from lightning_tas.samplers import Sampler, SamplerConfig
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import ElasticViT, supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.supernet_module import SupernetModule


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    return spaces.isotropic("mini", embed_dim=[16, 32], depth=[1, 2, 3], num_heads=[1, 2], mlp_ratio=[1, 2])


@pytest.fixture
def make_net(space: SearchSpace) -> Callable[..., ElasticViT]:
    def make(seed: int = 0, **options: Any) -> ElasticViT:
        """With every parameter random, so that no layer computes what a fresh one would."""
        torch.manual_seed(seed)
        net = supernet(space, **{"num_classes": 4, "img_size": 8, "in_chans": 1, "patch_size": 4, **options})
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return net

    return make


@pytest.fixture
def make_module(make_net: Callable[..., ElasticViT]) -> Callable[..., SupernetModule]:
    def make(
        train: TrainConfig | None = None, sampler: str | Sampler = "uniform", seed: int = 0, **given: Any
    ) -> SupernetModule:
        options: dict[str, Any] = {
            "net": given.pop("net", None) or make_net(),
            "sampler": None if isinstance(sampler, str) else sampler,
            "sampler_config": SamplerConfig(sampler) if isinstance(sampler, str) else None,
            "train": train or TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=1),
            "global_batch": 8,
            "seed": seed,
        }
        return SupernetModule(**{**options, **given})

    return make


def separable(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) of noise whose mean brightness tells the class (n,), one of four."""
    targets = torch.arange(n) % 4
    images = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return images + (targets - 1.5).view(n, 1, 1, 1), targets


@pytest.fixture
def make_loader() -> Callable[..., DataLoader[Any]]:
    def make(n: int = 32, batch_size: int = 8, seed: int = 0, **given: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*separable(n, seed)), batch_size=batch_size, **given)

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., pl.Trainer]:
    def make(**given: Any) -> pl.Trainer:
        options: dict[str, Any] = {
            "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
            "enable_checkpointing": False, "use_distributed_sampler": False, "default_root_dir": tmp_path,
            "max_epochs": 2,
        }  # fmt: skip
        return pl.Trainer(**{**options, **given})

    return make
