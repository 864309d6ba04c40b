"""Proxies beside supernet training: do they order sub-networks as their inherited accuracies do, and from when on?

A set of sub-networks is drawn once. Before the first step and then between epochs each of them is cut out of the
supernet and scored, and its accuracy with inherited weights is measured on the validation data:

    tau_b = (C - D) / sqrt((pairs untied in score) (pairs untied in accuracy))                   Kendall, 1945

of the scores at initialisation and of those with the current weights, beside parameters and multiply-accumulates.

Training is the same as without this callback (bit for bit, where it repeats itself so: docs/training.md): everything
runs on a private float32 copy of the supernet, draws come from generators of the seed, and what is logged goes to the
loggers directly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from torch import nn

from lightning_tas.analysis.plots import save_figure
from lightning_tas.analysis.plots_scoring import scoring_scatter
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks.contract import check_module
from lightning_tas.callbacks.scoring_record import BASELINES, Column, Record, Scoring
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.evaluator import AUTOCAST, evaluate, preserved_rng
from lightning_tas.launch.files import make_folder
from lightning_tas.launch.strategies import gathered
from lightning_tas.launch.throughput import Throughput
from lightning_tas.proxies import score_many
from lightning_tas.proxies.config import INHERITED
from lightning_tas.proxies.options import components
from lightning_tas.proxies.registry import chosen, proxy
from lightning_tas.proxies.score import INVALID
from lightning_tas.proxies.scorer import check_arch, whole_number
from lightning_tas.randomness import derive


class ProxyScoring(Callback):
    """Score sampled sub-networks between epochs and correlate the scores with inherited accuracies.

        Trainer(callbacks=[ProxyScoring(["snip", "dss"], networks=50)]).fit(SupernetModule(...), train, val)

    Args:
        proxies: names, see ``lightning_tas.proxies()``; parameters and MACs are always beside them.
        networks: how many distinct ones are drawn from the supernet's space, or the architectures themselves, each
            counted once.
        every_n_epochs: scoring happens before the first step, after every so many epochs, and after the last one.
        batch_size: Gaussian images that a proxy sees.
        eval_batches: batches of the validation data (of every process) for the accuracy; None: as validation has.
        seed: of the draw and of the proxies; None: the module's.
        options: of single proxies, as ``{"dss": {"mode": "released"}}``.
        folder: where `scoring.csv`, `scoring.json` (the networks) and `scoring.png` are written; None: the folder of
            the trainer's first logger, else its `default_root_dir`.

    Processes share the networks to score and, as in validation, the data. Scores and accuracies are those of the live
    weights, also where validation reports averaged ones (``train.ema``). A proxy that raises has invalid scores, with
    the reason, and gives a warning; training goes on.

    Logs ``score/<proxy>/initial`` and ``score/<proxy>/current`` (tau-b, where defined), ``score/params``,
    ``score/macs``, ``score/top1`` (the mean, in %) and ``system/scoring_seconds``.
    """

    def __init__(
        self,
        proxies: str | Sequence[str],
        networks: int | Sequence[Architecture] = 50,
        every_n_epochs: int = 1,
        batch_size: int = 16,
        eval_batches: int | None = None,
        seed: int | None = None,
        folder: Path | str | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        asked = [one for one in chosen(proxies) if one.name not in BASELINES]
        if isinstance(networks, Sequence) and not isinstance(networks, str):
            for arch in networks:
                check_arch("networks", arch)
            networks = list(dict.fromkeys(networks))
            whole_number("networks: number of distinct ones", len(networks), 2)
        else:
            networks = whole_number("networks", networks, 2)
        self.networks, self.folder = networks, Path(folder) if folder is not None else None
        self._into: Path | None = None
        self.every_n_epochs = whole_number("every_n_epochs", every_n_epochs, 1)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.eval_batches = None if eval_batches is None else whole_number("eval_batches", eval_batches, 1)
        self.seed = None if seed is None else whole_number("seed", seed, -math.inf)
        parts, self.options = components(asked, {} if options is None else options)
        for part in parts:
            part.check_images(self.batch_size, self.options.get(part.name, {}), "batch_size")
        self.record = Record([one.name for one in asked])

    # --- when -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that trains no supernet, or lacks a seed."""
        if stage == "fit":
            check_module(pl_module, "scoring", seed=self.seed is None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the initial weights, or go on from the record of the checkpoint."""
        net: Any = pl_module.net
        self._into = into = self.folder or Path(trainer.log_dir or trainer.default_root_dir)
        seed = self.seed if self.seed is not None else int(pl_module.seed)  # type: ignore[arg-type]
        archs = draw(net, self.networks, seed)
        prices = [cost(arch, net) for arch in archs]
        settings: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size, "eval_batches": self.eval_batches}
        settings |= {"options": self.options} if self.options else {}
        self.record.begin(archs, prices, settings, trainer.global_step)
        if trainer.is_global_zero:
            make_folder(into, "scoring")
            self.record.rewrite(into)
        if not self.record.scorings:
            if trainer.global_step:
                rank_zero_warn("scoring: the checkpoint holds no scores at initialisation; theirs are left out")
            self._score(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score when it is due; comes before the checkpoint of the epoch, which holds the result."""
        done = trainer.current_epoch + 1
        if done % self.every_n_epochs == 0 or ends(trainer):
            self._score(trainer, pl_module, done)

    # --- what -------------------------------------------------------------------------------------------------------

    def _score(self, trainer: Trainer, module: LightningModule, epoch: int) -> None:
        if any(scoring.epoch == epoch for scoring in self.record.scorings):
            return
        began = time.perf_counter()
        with preserved_rng(), torch.inference_mode(False):
            twin = private_twin(module.net, module.device)  # type: ignore[arg-type]
            scores = self._scores(trainer, twin)
            accuracies = evaluate(
                twin,
                self.record.archs,
                _validation_data(trainer),
                amp_dtype=AUTOCAST.get(str(trainer.precision)),
                progress=shows_bars(trainer),
                max_batches=self._eval_batches(trainer),
            )
        initial = trainer.global_step == 0
        found = Scoring.of(epoch, trainer.global_step, initial, scores, accuracies)
        self.record.scorings.append(found)
        if trainer.is_global_zero:
            self._write(trainer, found, time.perf_counter() - began)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Throughput):
                callback.leave_out(time.perf_counter() - began)

    def _scores(self, trainer: Trainer, twin: nn.Module) -> dict[str, Column]:
        """Scores of all networks by proxy; the processes share the networks. Collective.

        `score_many` raises on every process what was raised on one, so that all of them go on alike.
        """
        try:
            return self._score_many(trainer, twin, self.record.proxies)
        except Exception:
            found: dict[str, Column] = {}
            for name in self.record.proxies:  # those that can be computed
                try:
                    found |= self._score_many(trainer, twin, [name])
                except Exception as error:
                    found[name] = self._raised(name, error)
            return found

    def _score_many(self, trainer: Trainer, twin: nn.Module, names: list[str]) -> dict[str, Column]:
        if not names:
            return {}
        scores = score_many(
            names,
            twin,
            self.record.archs,
            seed=self.record.settings["seed"],
            batch_size=self.batch_size,
            init=INHERITED,
            options={name: given for name, given in self.options.items() if name in _parts(names)},
            progress=shows_bars(trainer),
        )
        return {name: (scores.value(name).tolist(), scores.reason(name)) for name in names}

    def _raised(self, name: str, error: Exception) -> Column:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        rank_zero_warn(f"scoring: {name} raised {reason}; its scores are invalid now, training goes on")
        return [INVALID] * len(self.record.archs), [reason] * len(self.record.archs)

    def _eval_batches(self, trainer: Trainer) -> int | None:
        limit = trainer.num_val_batches[0]
        limits = [value for value in (self.eval_batches, limit) if value is not None and value != float("inf")]
        return int(min(limits)) if limits else None

    # --- what comes out ---------------------------------------------------------------------------------------------

    def _write(self, trainer: Trainer, found: Scoring, seconds: float) -> None:
        assert self._into is not None
        self.record.append(self._into, found)
        taus = self.record.correlations(found)
        picture = self._into / "scoring.png"
        save_figure(self._picture(found, taus), picture)
        row: dict[str, Any] = {f"score/{key}": value for key, value in taus.items() if value is not None}
        row["score/top1"] = float(np.mean(found.top1))
        at = max(trainer.global_step - 1, 0)
        columns, data = self.record.table(found)
        for logger in trainer.loggers:
            logger.log_metrics({**row, "epoch": max(found.epoch - 1, 0)}, at)
            logger.log_metrics({"system/scoring_seconds": seconds, "epoch": max(found.epoch - 1, 0)}, at)
            if hasattr(logger, "log_table") and hasattr(logger, "log_image"):  # W&B's, Lightning's own or ours
                logger.log_table("score/networks", columns=columns, data=data, step=at)
                logger.log_image("score/scatter", [str(picture)], step=at)

    def _picture(self, found: Scoring, taus: Mapping[str, float | None]) -> Any:
        first = self.record.initial
        current = {**self.record.baselines, **found.scores}
        params = [price[0] for price in self.record.prices]
        title = f"{len(self.record.archs)} sub-networks after {found.epoch} epochs"
        return scoring_scatter(current, first.scores if first is not None else {}, found.top1, params, taus, title)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything scored so far, as primitives."""
        return self.record.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds; compared with the settings when training starts."""
        self.record.load_state_dict(state_dict)


def _parts(names: Iterable[str]) -> set[str]:
    """The proxies that are run for these."""
    return {part.name for name in names for part in proxy(name).parts}


def draw(net: Any, networks: int | Sequence[Architecture], seed: int) -> list[Architecture]:
    """The networks to score: those given, or so many distinct ones of the supernet's space (all, where it has fewer).

    A function of (space, seed): the same in every epoch, on every process, and in a resumed run.
    """
    if not isinstance(networks, int):
        archs = list(dict.fromkeys(networks))
        for arch in archs:
            net.check(arch)
        return archs
    if net.space.size() <= networks:
        return list(net.space.enumerate())
    found: dict[Architecture, None] = {}
    attempt = 0
    while len(found) < networks:
        found |= dict.fromkeys(net.space.sample(derive(seed, "scoring", attempt), n=networks))
        attempt += 1
    return list(found)[:networks]


def private_twin(net: nn.Module, device: torch.device) -> nn.Module:
    """A float32 copy of a supernet on `device` that shares nothing with it: no tensor, hook or wrapper. Collective.

    Built from its space and options, because a deep copy would take DeepSpeed's engine along.
    """
    with torch.device("meta"):
        twin: nn.Module = type(net)(net.space, **net.options)  # type: ignore[call-arg, arg-type]
    with gathered(net):
        state = {
            key: value.detach().to(device, torch.float32 if value.is_floating_point() else value.dtype, copy=True)
            for key, value in net.state_dict().items()
        }
    twin.load_state_dict(state, assign=True)
    return twin.eval()


def _validation_data(trainer: Trainer) -> Iterable[Any]:
    """This process's share of the validation data, as Lightning made it; before the first validation it has not yet."""
    if trainer.val_dataloaders is None:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    loader: Any = trainer.val_dataloaders
    if isinstance(loader, Sequence):
        loader = loader[0] if loader else None
    if loader is None:
        raise UserError("scoring: needs validation data for inherited accuracies; this training has none")
    return loader  # type: ignore[no-any-return]


def ends(trainer: Trainer) -> bool:
    """Whether the epoch that ends is the last one."""
    if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps):
        return True
    return trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs


def shows_bars(trainer: Trainer) -> bool:
    bar = trainer.progress_bar_callback
    return trainer.is_global_zero and bar is not None and bool(getattr(bar, "is_enabled", True))
