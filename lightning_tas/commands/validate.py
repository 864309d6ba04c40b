"""Values that have the right type and still cannot be meant: refused before anything is read, built or written."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

from lightning_tas.commands import names, per_phase
from lightning_tas.commands.config import Config
from lightning_tas.commands.per_phase import PHASES, REPEATABLE
from lightning_tas.commands.schema import all_keys
from lightning_tas.errors import UserError, absent, typed, unknown
from lightning_tas.launch.study import phase_labels
from lightning_tas.plugins import check_asked
from lightning_tas.search import config as searches

LOGGERS = ("csv", "tensorboard", "wandb")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true", "64-true", "32", "16", "bf16", "64")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
STRATEGIES = ("auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
_CHOICES: dict[str, tuple[str, ...]] = {
    "source": ("autoformer", "prenas", "autoprox", "timm"),
    "wandb.mode": ("online", "offline", "disabled"),
    "trainer.accelerator": ACCELERATORS,
    "trainer.strategy": STRATEGIES,
    "trainer.float32_matmul_precision": ("highest", "high", "medium"),
    "model.pool": ("avg", "token"),
    "model.bias_rule": ("regroup", "autoformer"),
    "model.init": ("trunc_normal", "library", "tf_tas"),
    "select.mode": ("paper", "released"),
    "select.unit": ("Mparams", "GMACs"),
    "select.allocation": ("dp", "greedy", "released"),
    "select.loss": ("logits", "ce"),
    "select.images": ("gaussian", "data"),
    "select.norm": ("paper", "l1l1", "none"),
    "select.classes": ("sums", "counts"),
    "bench.images": ("gaussian", "data"),
    "sampler.source": ("candidates", "space"),
    "sampler.reduce": ("mean", "sum"),
    **searches.CHOICES,
}
# Key to the least value; None is always allowed where the type allows it.
_AT_LEAST: dict[str, float] = {
    "seed": 0,
    "trainer.max_epochs": 1,
    "trainer.max_steps": -1,
    "trainer.num_nodes": 1,
    "trainer.accumulate_grad_batches": 1,
    "trainer.gradient_clip_val": 0,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.log_every_n_steps": 1,
    "model.patch_size": 1,
    "model.patch_stride": 1,
    "sampler.middle": 0,
    "select.low": 0,
    "select.high": 0,
    "select.top": 1,
    "select.batch_size": 1,
    "select.micro_batch": 1,
    "scoring.networks": 2,
    "scoring.every_n_epochs": 1,
    "scoring.batch_size": 1,
    "scoring.eval_batches": 1,
    "bench.networks": 2,
    "bench.inits": 1,
    "bench.batch_size": 2,
    "bench.zen_repeat": 1,
    "bench.eval_batches": 1,
    "bench.bootstrap": 0,
    **searches.AT_LEAST,
}
_WITHOUT = {"trainer.max_epochs": "; to train nothing, leave the phase out of `phases` (phases=[measure] ckpt=RUN)"}
_PROBABILITIES = ("model.drop_rate", "model.attn_drop_rate", "model.drop_path_rate")


def validate(config: Config) -> None:
    """Check everything that a value alone, or two together, can tell. Raises UserError."""
    _phases(config)
    _values(config)
    if config.ckpt is not None and not os.path.exists(config.ckpt):
        raise absent("ckpt", config.ckpt, "give a checkpoint or the folder of a run")
    own = per_phase.dotted(config.per_phase)
    for i, (label, resolved) in enumerate(per_phase.configs(config).items()):
        try:
            if label in (config.per_phase or {}):
                _values(resolved)
            _phase(resolved, label, phase_labels(config.phases)[:i])
        except UserError as error:
            key = str(error).partition(":")[0]
            raise UserError(f"per_phase.{label}.{error}") if f"{label}.{key}" in own else error from None


def _values(config: Config) -> None:
    """What is wrong with the values of a phase, or of what all phases share."""
    from lightning_tas.data.config import check as check_data

    _finite(config)
    for key, choices in _CHOICES.items():
        value = get(config, key)
        if value is not None and value not in choices:
            raise unknown(key, value, choices)
    for key, least in _AT_LEAST.items():
        value = get(config, key)
        if value is not None and not value >= least:
            raise UserError(f"{key}: {value!r} is not valid; valid: {least:g} or above{_WITHOUT.get(key, '')}")
    for key in _PROBABILITIES:
        if not 0 <= get(config, key) < 1:
            raise UserError(f"{key}: {get(config, key)!r} is not valid; valid: at least 0, below 1")
    if not config.select.margin > 0:
        raise UserError(
            f"select.margin: {config.select.margin!r} is not valid; valid: above 0, in {config.select.unit}"
        )
    _loggers(config)
    _trainer(config)
    _sampler(config)
    check_data(config.data)
    config.train.check()
    config.checkpoint.check()
    _select(config)
    _scoring(config)
    _search(config)


def _phase(config: Config, label: str, before: Sequence[str]) -> None:
    """What is wrong with the settings of one phase, `before` which others run."""
    if config.train.compile and per_phase.kind(label) == "supernet":
        raise UserError(
            "train.compile: true is not valid for a supernet: every sub-network would be compiled anew; "
            "valid: false, or true with phases=[retrain] or as per_phase.retrain.train.compile"
        )
    start = config.train.from_checkpoint
    if start is not None and start not in before and not os.path.exists(start):
        raise absent("train.from_checkpoint", start, "give a checkpoint, the folder of a run, or an earlier phase")


def get(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _finite(config: Config) -> None:
    """No number may be infinite or NaN: comparisons would let infinity through."""
    for key in all_keys():
        value = get(config, key)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{key}: {value!r} is not valid; valid: finite numbers")


def _phases(config: Config) -> None:
    order = f"phases run in the order {', '.join(PHASES)}"
    if not config.phases:
        raise UserError(f"phases: empty; give some; {order}")
    for name in config.phases:
        if name not in PHASES:
            raise unknown("phases", name, PHASES)
        if config.phases.count(name) > 1 and name not in REPEATABLE:
            raise UserError(f"phases: {name!r} is listed twice; only {' and '.join(REPEATABLE)} may be repeated")
    ordered = sorted(config.phases, key=PHASES.index)
    if config.phases != ordered:
        raise UserError(f"phases: {typed(config.phases)} is not valid: {order}; give phases={typed(ordered)}")


def _loggers(config: Config) -> None:
    asked = [config.logger] if isinstance(config.logger, str) else config.logger
    if asked is None:
        return
    if not isinstance(asked, list):
        raise UserError(f"logger: {asked!r} is not valid; valid: {', '.join(LOGGERS)}, or a list of them")
    for name in asked:
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)


def _trainer(config: Config) -> None:
    trainer = config.trainer
    if str(trainer.precision) not in PRECISIONS:
        raise unknown("trainer.precision", trainer.precision, PRECISIONS)
    if not isinstance(trainer.deterministic, bool) and trainer.deterministic != "warn":
        raise unknown("trainer.deterministic", trainer.deterministic, ("true", "false", "warn"))
    for key in ("limit_train_batches", "limit_val_batches"):
        value = getattr(trainer, key)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and value >= 0) and not (isinstance(value, float) and 0 <= value <= 1):
            raise UserError(
                f"trainer.{key}: {value!r} is not valid; valid: a number of batches, or a share from 0.0 to 1.0"
            )
    if trainer.limit_train_batches is not None and trainer.limit_train_batches == 0:
        raise UserError(
            f"trainer.limit_train_batches: {trainer.limit_train_batches!r} is not valid; valid: 1 batch or more"
        )
    if trainer.max_steps == 0:
        raise UserError("trainer.max_steps: 0 is not valid; valid: 1 or above, or null")
    devices = trainer.devices
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    indices = isinstance(devices, list) and devices and all(isinstance(i, int) and i >= 0 for i in devices)
    number = isinstance(devices, int) and not isinstance(devices, bool) and (devices == -1 or devices >= 1)
    if devices != "auto" and not indices and not number:
        raise UserError(
            f"trainer.devices: {trainer.devices!r} is not valid; valid: auto, -1 (all), a number, or a list of indices"
        )


def _sampler(config: Config) -> None:
    from lightning_tas import samplers

    if ":" in config.sampler.name:
        check_asked("sampler.name", config.sampler.name)  # imported where it is built
    elif config.sampler.name not in samplers.names():
        raise unknown("sampler.name", config.sampler.name, samplers.names())
    if "supernet" in config.phases:
        samplers.check_source(config.sampler, "select" in config.phases)
        if config.sampler.source == "space" and config.select.cut_supernet:
            warnings.warn(
                "select.cut_supernet is ignored: sampler.source=space trains networks of the whole space", stacklevel=2
            )


def _select(config: Config) -> None:
    select = config.select
    if select.low is not None and select.high is not None and select.low > select.high:
        raise UserError(f"select.low: {select.low!r} is above select.high: {select.high!r}")
    if select.loss == "ce" and select.images != "data":
        raise UserError("select.loss: 'ce' needs labels; give select.images=data, or select.loss=logits")


def _scoring(config: Config) -> None:
    if not config.scoring.proxies:
        return
    names.proxies("scoring", config.scoring.proxies, config.scoring.options)
    if config.trainer.limit_val_batches is not None and config.trainer.limit_val_batches == 0:
        raise UserError(
            "scoring.proxies: accuracies are measured on the validation data, of which trainer.limit_val_batches: 0 "
            "leaves nothing; valid: 1 batch or more, or scoring.proxies=[]"
        )


def _search(config: Config) -> None:
    search = config.search
    if config.limits.stated:
        from lightning_tas.limits import Limits

        Limits.read(config.limits.stated)
    if search.strategy is not None:
        from lightning_tas.callbacks.search_check import check_search

        check_search(search, config.limits)
