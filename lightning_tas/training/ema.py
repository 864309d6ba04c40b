"""Exponential moving average of the weights, through Lightning's own callback.

While it is on, validation and `fit`'s end see the averaged weights; checkpoints hold them in ``state_dict`` and the
live ones in ``current_model_state`` (see `lightning_tas.training.checkpoint`).
"""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback, EMAWeightAveraging

from lightning_tas.training.config import TrainConfig


def ema_callbacks(train: TrainConfig) -> list[Callback]:
    """The callback that `train.ema` asks for, none when it is off.

    All parameters are averaged after every update; the first update copies, so that nothing of the initial weights
    remains. Blocks not sampled at a step are averaged with their unchanged values.
    """
    return [EMAWeightAveraging(decay=train.ema_decay)] if train.ema else []
