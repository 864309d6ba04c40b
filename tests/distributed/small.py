"""A small supernet, trained for a few steps by any strategy: what the processes of these tests run."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_tas import spaces
from lightning_tas.architecture import Architecture
from lightning_tas.launch.strategies import build_strategy, gathered, unused_semantics, zero_stage
from lightning_tas.samplers import SamplerConfig, Source, build_sampler
from lightning_tas.supernets import ElasticViT, supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.retrain import RetrainModule
from lightning_tas.training.supernet_module import SupernetModule

GLOBAL_BATCH = 8


@dataclass
class Fit:
    """What came out of a fit; whole parameters also where they were shards."""

    weights: dict[str, Tensor]
    metrics: dict[str, float]
    rates: list[float]
    depths: list[int]
    warned: list[str] = field(default_factory=list)

    def distance(self, other: Fit) -> float:
        """The largest difference of any weight."""
        assert self.weights.keys() == other.weights.keys()
        return max(float((w - other.weights[name]).abs().max()) for name, w in self.weights.items())


def space() -> Any:
    return spaces.isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])


def candidates() -> list[Architecture]:
    """Networks of both depths."""
    return [Architecture.vit(16, [1], [2]), Architecture.vit(32, [2, 1], [1, 2]), Architecture.vit(32, [1], [1])]


def make_net(dtype: torch.dtype = torch.float32, **options: Any) -> ElasticViT:
    """With every parameter random, so that no layer computes what a fresh one would."""
    torch.manual_seed(0)
    given = {"num_classes": 4, "img_size": 8, "in_chans": 1, "patch_size": 4, **options}
    net = supernet(space(), **given).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return net


def make_module(
    net: Any, strategy: str = "auto", sampler: str = "uniform", **train: Any
) -> Any:  # fmt: skip
    """Of a supernet, or of a network alone."""
    plain = {"lr": 1e-3, "lr_batch": None, "warmup_epochs": 0, "weight_decay": 0.05, "mixup": 0.0, "cutmix": 0.0}
    recipe = TrainConfig(**{**plain, **train})
    module: SupernetModule | RetrainModule
    if isinstance(net, ElasticViT):
        source = "space" if sampler == "uniform" else "candidates"
        built = build_sampler(SamplerConfig(sampler, source, middle=1), space(), candidates(), seed=3)
        ends = Source.of(space(), built.archs or None).ends()
        report = dict(zip(("largest", "smallest"), ends, strict=True))
        module = SupernetModule(net, built, recipe, GLOBAL_BATCH, report=report)
    else:
        module = RetrainModule(net, recipe, GLOBAL_BATCH)
    module.unused = unused_semantics(recipe, strategy)
    return module


class Watch(pl.Callback):
    """The rate and the depth of each optimiser step; saves after the first epoch where it is told a path."""

    def __init__(self, save: str | None) -> None:
        self.save = save
        self.rates: list[float] = []
        self.depths: list[int] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        archs = module.architectures(trainer.global_step)
        self.depths.append(max((arch or module.net.arch).depth for arch in archs))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self.save is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.save)


def loader(rank: int, ranks: int) -> DataLoader[Any]:
    """This rank's share of 32 images; the ranks' batches together are the batches of one rank of one."""
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(images[rank::ranks], torch.arange(32)[rank::ranks] % 4), GLOBAL_BATCH // ranks)


def fit(
    strategy: str, sampler: str = "uniform", trainer: dict[str, Any] | None = None, net: dict[str, Any] | None = None,
    ckpt_path: str | None = None, save: str | None = None, persist: int = 0, place: tuple[int, int] | None = None,
    alone: Architecture | None = None, **train: Any,
) -> Fit:  # fmt: skip
    """Train for 8 steps (fewer with accumulation) on the processes that there are, and validate at the end.

    `persist`: ZeRO-3 leaves parameters up to this size whole; 0 has all of them as shards. `place`: rank and number of
    processes where a launcher (Lightning's own, for one) has yet to make the group. `alone`: the sub-network to train,
    by itself, in place of the supernet.
    """
    # Not from the environment: Lightning tidies its variables away after a fit.
    rank, ranks = place or ((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1))
    made: Any = make_net(**(net or {}))
    module = make_module(made if alone is None else made.subnet(alone), strategy, sampler, **train)
    find_unused = alone is None and not module.sampler.covers_all_parameters
    built = build_strategy(strategy, ranks, "cpu", find_unused)
    if zero_stage(strategy) == 3:
        built.config["zero_optimization"]["stage3_param_persistence_threshold"] = persist  # type: ignore[union-attr]
    watch = Watch(save)
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": ranks, "strategy": built, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "use_distributed_sampler": False,
        "max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 2,
        "callbacks": [watch],
    }  # fmt: skip
    runner = pl.Trainer(**{**options, **(trainer or {})})
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning 2.6 on torch 2.14
        runner.fit(module, loader(rank, ranks), loader(rank, ranks), ckpt_path=ckpt_path, weights_only=True)
    with gathered(module.net):
        weights = {name: p.detach().float().clone() for name, p in module.net.named_parameters()}
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    return Fit(weights, metrics, watch.rates, watch.depths, [str(w.message) for w in caught])


if __name__ == "__main__":
    # small.py STRATEGY NODES DEVICES OUTPUT: as a user's own script, started by Lightning or by torchrun.
    name, nodes, devices, output = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    own = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    done = fit(name, trainer={"num_nodes": nodes, "devices": devices}, place=(own, nodes * devices), unused="zero")
    torch.save(done, f"{output}-{own}")
