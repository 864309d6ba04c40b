"""The truth of a search by training: every network alone, for a few epochs, measured on the held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytorch_lightning import Trainer

from lightning_tas.architecture import Architecture
from lightning_tas.commands import build
from lightning_tas.commands.config import Config
from lightning_tas.data import TASDataModule
from lightning_tas.evaluator import evaluate
from lightning_tas.launch.strategies import build_strategy
from lightning_tas.launch.trainer import accelerator, quiet, settings_of, world_size
from lightning_tas.proxies.score import Score
from lightning_tas.search.objective import TRAINED
from lightning_tas.search.scorers import Result


class TrainedScorer:
    """Trains networks from scratch by the recipe's settings for `search.train_epochs`, all from the same seed.

    The schedule is the one that `trainer.max_epochs` of that length has. The score is top-1 [%] on the
    search-validation split. All processes train each network together.
    """

    def __init__(self, config: Config, data: TASDataModule) -> None:
        trainer = replace(config.trainer, max_epochs=config.search.train_epochs, max_steps=None)
        self._config = replace(config, trainer=trainer, ckpt=None)
        self._data = data

    def __call__(self, archs: Sequence[Architecture], names: Sequence[str]) -> list[Result]:
        return [{TRAINED: self._train(arch)} for arch in archs]

    def _train(self, arch: Architecture) -> Score:
        config = self._config
        module = build.retrain_module(config, self._data, arch)
        strategy = build_strategy(
            config.trainer.strategy, world_size(config.trainer), accelerator(config.trainer), find_unused=False
        )
        with quiet():
            trainer = Trainer(
                **{**settings_of(config.trainer), "limit_val_batches": 0},
                strategy=strategy,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                callbacks=list(module.callbacks()),
            )
            trainer.fit(module, datamodule=self._data)
        if module.untrained is not None:
            return Score.invalid(module.untrained)
        found = evaluate(module.net, [None], self._data.val_dataloader(), device=build.device(config))[0]
        return Score(found.top1, extras={"images": float(found.samples)})
