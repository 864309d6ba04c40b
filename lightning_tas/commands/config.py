"""The configuration of a run: one tree of dataclasses, which Hydra checks names and types against.

Sections that belong to a part of the library are defined there (`data/config.py`, `training/config.py`, ...); the
sections of the shell, trainer, checkpoint and W&B, are defined here. `to_yaml` writes what `config=` reads.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from lightning_tas.errors import UserError
from lightning_tas.reading import sealed

if TYPE_CHECKING:
    from lightning_tas.data.config import DataConfig
    from lightning_tas.proxies.config import BenchConfig, ScoringConfig
    from lightning_tas.samplers import SamplerConfig
    from lightning_tas.search.config import LimitsConfig, SearchConfig, SelectConfig
    from lightning_tas.supernets.config import ModelConfig
    from lightning_tas.training.config import TrainConfig


def _alone(name: str) -> ModuleType:
    """Import the module `lightning_tas.<name>` without its package, which may import torch.

    `--help` and a misspelt key answer in a fraction of a second that way. The module is registered under its real
    name, so that there is only ever one class of each section.
    """
    full = f"lightning_tas.{name}"
    if full not in sys.modules:
        path = Path(__file__).resolve().parents[1].joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


if not TYPE_CHECKING:
    DataConfig = _alone("data.config").DataConfig
    BenchConfig = _alone("proxies.config").BenchConfig
    ScoringConfig = _alone("proxies.config").ScoringConfig
    SamplerConfig = _alone("samplers").SamplerConfig
    LimitsConfig = _alone("search.config").LimitsConfig
    SearchConfig = _alone("search.config").SearchConfig
    SelectConfig = _alone("search.config").SelectConfig
    ModelConfig = _alone("supernets.config").ModelConfig
    TrainConfig = _alone("training.config").TrainConfig


@dataclass
class WandbConfig:
    """Weights & Biases, used where `logger` names it."""

    project: str = "lightning_tas"
    entity: str | None = None
    name: str | None = None  # None: recipe and run
    mode: str = "online"  # online, offline, disabled


@dataclass
class TrainerConfig:
    """Settings of Lightning's Trainer, under Lightning's names."""

    max_epochs: int = 500
    max_steps: int | None = None  # None: as many as the epochs have
    accelerator: str = "auto"
    devices: Any = "auto"  # a number, a list of indices, or auto
    num_nodes: int = 1
    strategy: str = "auto"  # auto (DDP where there are several processes), ddp, deepspeed_stage_1, _2, _3
    precision: Any = "32-true"
    float32_matmul_precision: str = "high"  # of float32 products on a GPU; high: TF32, highest: no
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    deterministic: Any = False  # true: the same bits again on a GPU, slower, an error where that is impossible; or warn
    limit_train_batches: Any = None  # a number of batches (int) or a share (float); None: all
    limit_val_batches: Any = None
    check_val_every_n_epoch: int = 1
    log_every_n_steps: int = 50


@dataclass
class CheckpointConfig:
    """When to save, and how much to keep. SIGTERM and SIGUSR1 save as well."""

    every_n_epochs: int = 1
    every_n_steps: int | None = None  # also in the middle of epochs; resuming from there is exact
    keep_last: int = 2  # how many to keep of each phase; -1: all

    def check(self) -> None:
        """UserError when it asks for something that cannot be done."""
        for key, valid in (("every_n_epochs", "1, 2, ..."), ("every_n_steps", "null, 1, 2, ...")):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{key}: {value} is not valid; valid: {valid}")
        if self.keep_last < 1 and self.keep_last != -1:
            raise UserError(f"checkpoint.keep_last: {self.keep_last} is not valid; valid: 1, 2, ... or -1 (keep all)")


@dataclass
class Config:
    """Everything about a run. A recipe sets some of it, the command line overrides the recipe."""

    recipe: str = ""  # a name from the list above, or a YAML file of your own
    config: str | None = None  # config.yaml of a run: repeat it exactly
    seed: int = 0
    run: str | None = None  # name of the run's folder; None: Slurm job id, else time and seed
    output_dir: str = "runs"  # evaluate and export write into the run itself unless this is given
    resume: str | None = None  # a run, a checkpoint in it (what came later is redone), auto: run=NAME or the newest
    ckpt: str | None = None  # folder of a run, or a checkpoint
    arch: Any = None  # a label, an id, a JSON file (result.json), or an architecture as a mapping
    source: str | None = None  # whose weights ckpt and train.from_checkpoint are: autoformer, prenas, autoprox, timm
    weights: str = "auto"  # of several sets in their file: auto (averaged where there are some), live, ema, or an entry
    space: Any = "autoformer_tiny"  # a name, a file, or the space itself
    phases: list[str] = field(default_factory=lambda: ["supernet", "measure"])  # select, supernet, search, measure, ...
    per_phase: dict[str, Any] | None = None  # of one phase: {retrain: {train: {lr: 1e-3}}}; a second one: supernet-2
    plan: bool = False  # print sizes, steps, costs and memory, or how long scoring takes; do nothing
    trust: bool = False  # import code (MODULE:NAME) that a recipe or a run's config.yaml names; of a command line only
    smoke: bool = False  # run the whole recipe in seconds on synthetic data
    logger: Any = "csv"  # further loggers: csv (always on), tensorboard, wandb, or a list
    wandb: WandbConfig = field(default_factory=WandbConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, every value written out; `config=FILE` reads it back equal, or sees damage."""
    return sealed(OmegaConf.to_yaml(OmegaConf.structured(config)))
