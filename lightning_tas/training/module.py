"""What training a supernet and training one network have in common, as a LightningModule.

One optimiser step: mix the batch, run the step's architectures on it, one backward of the mean of their losses
(automatic optimisation). Randomness is a function of counters: `on_train_batch_start` seeds torch (all devices) from
(seed, epoch, batch, rank), so dropout and drop path repeat after a resume; mixing has a seed of its own from the same
counters. The global torch state is not put back: during `fit` it belongs to training, and every batch sets it anew.
What is logged stays a tensor. The host waits for the device once per optimiser step, in `StepGuard.decide`; DDP that
has to look for unused parameters waits once more in every backward pass that leaves some out.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.utilities import rank_zero_warn
from timm.data.mixup import Mixup
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tas.architecture import Architecture
from lightning_tas.errors import Stopped, UserError
from lightning_tas.evaluator import Meter, compute_all
from lightning_tas.randomness import derive
from lightning_tas.training.checkpoint import EMA, KEY, VERSION
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.ema import ema_callbacks
from lightning_tas.training.gradients import Gradients, gradients_of
from lightning_tas.training.guard import StepGuard
from lightning_tas.training.mixing import Mixing
from lightning_tas.training.optim import build_optimiser
from lightning_tas.training.schedule import attach, plan

Batch = tuple[Tensor, Tensor]
_BAR_WIDTH = 3
"""Accuracies of so many networks fit into a progress bar."""
DIVERGED = 3
"""Exit status of training that ends because too many steps in a row were bad."""


class ClassifierModule(LightningModule):
    """Trains `net` to classify; subclasses say which architectures a step trains and which ones are reported.

    Args:
        net: called ``net(images, arch)``, or ``net(images)`` for the architecture None; has `num_classes`.
        train: the recipe.
        global_batch: images per update over all processes and accumulated batches; scales the learning rate.
        seed: of everything random in training.
        class_names: kept in checkpoints for whoever uses the network.

    Besides its losses a module logs ``train/grad_norm`` (before clipping) and ``train/bad_steps``: how many optimiser
    steps were left out so far because a loss or gradient was not finite on some rank. Such a step counts as a step:
    schedule and sampler go on.
    """

    kind: ClassVar[str]
    compiles: ClassVar[bool] = False  # whether one network runs at every step, as torch.compile needs it

    def __init__(
        self, net: nn.Module, train: TrainConfig, global_batch: int, seed: int, class_names: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        train.check()
        if global_batch < 1:
            raise UserError(f"data.batch_size: the global batch is {global_batch}, it must be at least 1")
        self.net = net.train()  # also where it was loaded for evaluation: Lightning leaves modes alone
        self.train_config = train
        self.global_batch = global_batch
        self.seed = seed
        self.class_names = list(class_names) if class_names is not None else None
        self.trained_on: list[Any] | None = None  # kept in checkpoints, see `TASDataModule.check_unseen`
        self.num_classes = int(net.num_classes)  # type: ignore[arg-type]
        self.mixing = _build_mixing(train, self.num_classes)
        self.guard = StepGuard()
        self.unused = "skip"  # what AdamW does to parameters that a step leaves out, see `train.unused`
        self._meters: dict[str, Meter] = {}
        self._gradients: Gradients | None = None
        self._batches: list[int] = []
        self._archs: Sequence[Architecture | None] = ()
        self._prepare_net()

    def _prepare_net(self) -> None:
        """What the recipe asks for to save memory and time."""
        if self.train_config.checkpoint_activations:
            self.net.set_grad_checkpointing(True)  # type: ignore[operator]
        if self.train_config.compile:
            if not self.compiles:
                raise UserError(
                    "train.compile: true is not valid for a supernet: every sub-network would be compiled anew, for "
                    "longer than it trains; valid: false, or true for a phase that trains one network (retrain)"
                )
            # The tables of slots are traced instead of remembered, which is right.
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
            self.net.compile()  # in place: parameters keep their names

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up, scaled linearly to the global batch where `train.lr_batch` is given."""
        train = self.train_config
        return train.lr if train.lr_batch is None else train.lr * self.global_batch / train.lr_batch

    @abstractmethod
    def architectures(self, step: int) -> Sequence[Architecture | None]:
        """What optimiser step `step` trains; None stands for a network that takes no architecture."""

    @abstractmethod
    def reported(self) -> Mapping[str, Architecture | None]:
        """What validation measures, by fixed label; the label "" leaves metric names without one."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What rebuilds the network from a checkpoint, as primitives."""

    def callbacks(self) -> list[Callback]:
        """The Lightning callbacks that the recipe needs: weight averaging, where it is on."""
        return ema_callbacks(self.train_config)

    # --- training ---------------------------------------------------------------------------------------------------

    def forward(self, images: Tensor, arch: Architecture | None = None) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits: Tensor = self.net(images) if arch is None else self.net(images, arch)
        return logits

    def on_fit_start(self) -> None:
        self.guard.forget()
        self._batches = []
        if self.train_config.memory_lean and len(self.architectures(self.global_step)) == 1:
            rank_zero_warn("train.memory_lean is ignored: this phase trains one network in a step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # The batch index, not the global step: that one repeats across accumulated batches.
        torch.manual_seed(derive(self.seed, "train", self.current_epoch, batch_idx, self.global_rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, targets = batch
        if self.mixing is not None:
            seed = derive(self.seed, "mixing", self.current_epoch, batch_idx, self.global_rank)
            images, targets = self.mixing(images, targets, seed)
        archs = self.architectures(self.global_step)
        loss = self.mean_loss(images, targets, archs)
        self.note(loss, archs, batch_idx)
        self._log_step(loss, archs)
        return loss * self.scale(archs)

    def note(self, loss: Tensor, archs: Sequence[Architecture | None], batch_idx: int) -> None:
        """Tell the guard about a batch; every `training_step` has to."""
        self.guard.note_loss(loss)
        self._batches.append(batch_idx)
        self._archs = archs

    def mean_loss(self, images: Tensor, targets: Tensor, archs: Sequence[Architecture | None]) -> Tensor:
        """Mean over `archs` of the loss on one batch, a scalar with its graph: what a step goes backward from."""
        losses = [self.criterion(self(images, arch), targets) for arch in archs]
        return torch.stack(losses).mean()

    def scale(self, archs: Sequence[Architecture | None]) -> float:
        """What the mean loss of a step is multiplied by for the backward pass; 1 leaves it as it is, to the bit."""
        return 1.0

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in float32: soft targets (B, classes) as they are, class indices (B,) smoothed."""
        smoothing = self.train_config.label_smoothing if targets.ndim == 1 else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)

    def _log_step(self, loss: Tensor, archs: Sequence[Architecture | None]) -> None:
        # A progress bar reads its values at every step, which would make the host wait for a GPU.
        self.log("train/loss", loss.detach(), on_step=True, on_epoch=False, prog_bar=not loss.is_cuda)
        # Host-side numbers are logged as CPU tensors: Lightning would copy plain floats to the device, and wait.
        self.log("train/lr", torch.tensor(self._current_lr(), dtype=torch.float64), on_step=True, on_epoch=False)
        size = self.mean_params(archs)
        if size is not None:
            self.log("train/params", torch.tensor(size, dtype=torch.float64), on_step=True, on_epoch=False)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Decide with all ranks whether the step is sound; a bad one changes neither weights nor moments.

        Raises:
            Stopped: with status 3, on all ranks, after `train.max_bad_steps` bad ones in a row.
        """
        gradients = gradients_of(self.trainer, optimizer)
        if not gradients.complete():
            return
        decision = self.guard.decide(gradients.norm())
        gradients.settle(decision, self.unused)
        self._gradients = None if decision.bad else gradients
        self.log("train/grad_norm", torch.tensor(decision.grad_norm, dtype=torch.float64), on_step=True, on_epoch=False)
        bad_steps = torch.tensor(self.guard.total, dtype=torch.float64)
        self.log("train/bad_steps", bad_steps, on_step=True, on_epoch=False)
        if decision.bad:
            self._report_bad_step()
        self._batches = []

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip with the norm that is known already (Lightning would compute it anew, and refuses fused optimisers)."""
        gradients, self._gradients = self._gradients, None
        if gradients is not None and gradient_clip_val:
            gradients.clip(gradient_clip_val, by_value=gradient_clip_algorithm == "value")

    def _report_bad_step(self) -> None:
        decision, count, limit = self.guard.last, self.guard.in_a_row, self.train_config.max_bad_steps
        first, last = self._batches[0], self._batches[-1]
        where = (
            f"step {self.global_step} (epoch {self.current_epoch}, "
            + (f"batch {last}" if first == last else f"batches {first} to {last}")
            + ("): the gradient" if decision.bad_loss is None else f" of rank {decision.bad_loss}): the loss")
            + " is not finite"
        )
        if count < limit:
            if count == 1:
                rank_zero_warn(f"{where}; the step is left out, as are up to {limit} in a row (train.max_bad_steps)")
            return
        names = ", ".join(self.name_architecture(arch) for arch in self._archs)
        raise Stopped(
            f"{where}, after {count} such steps in a row (train.max_bad_steps={limit}); architecture: {names}; the "
            "weights are those of before the first of them; a lower train.lr, a longer warm-up or "
            "trainer.gradient_clip_val may help",
            DIVERGED,
        )

    def name_architecture(self, arch: Architecture | None) -> str:
        """What messages call an architecture that a step trained."""
        return "the network" if arch is None else f"{arch.id} {arch!r}"

    @property
    def untrained(self) -> str | None:
        """Why training has changed no weight: it took no step, or left out all of them; None where it has."""
        steps = self.trainer.global_step
        if steps == 0:
            return "not one step was trained: the training data gave no batch"
        if self.guard.total >= steps:
            return f"nothing was trained: the loss or the gradient was not finite in any of {steps} steps"
        return None

    def _current_lr(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def mean_params(self, archs: Sequence[Architecture | None]) -> float | None:
        """Mean number of parameters of the architectures of a step, None when there is nothing to tell."""
        return None

    def configure_optimizers(self) -> Any:
        optimiser = build_optimiser(self.net, self.train_config, self.peak_lr)
        steps_per_epoch, total_steps = self._length()
        curve = plan(self.train_config, self.peak_lr, total_steps, steps_per_epoch)
        interval = "step" if curve.per_step else "epoch"
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": attach(optimiser, curve), "interval": interval, "name": "lr"},
        }

    def _length(self) -> tuple[int, int]:
        """Updates per epoch and in all."""
        self.trainer.fit_loop.setup_data()  # does nothing where it has happened; without it lengths are unknown
        total = self.trainer.estimated_stepping_batches
        batches = self.trainer.num_training_batches
        if batches == float("inf"):
            raise UserError("the training data has no length: give trainer.limit_train_batches=<batches per epoch>")
        if batches == 0:
            raise UserError("the training data gives no batch: there is nothing to train (data.batch_size)")
        if total == float("inf") or total < 1:
            raise UserError("training has no end: give trainer.max_epochs or trainer.max_steps")
        steps = -(-int(batches) // self.trainer.accumulate_grad_batches)
        return steps, int(total)

    # --- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._meters = {label: Meter() for label in self.reported()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_measured("val")

    def on_test_epoch_start(self) -> None:
        self._meters = {label: Meter() for label in self.reported()}

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(batch)

    def on_test_epoch_end(self) -> None:
        self._log_measured("test")

    def _measure(self, batch: Batch) -> None:
        images, targets = batch
        for label, arch in self.reported().items():
            self._meters[label].update(self(images, arch), targets)

    def _log_measured(self, split: str) -> None:
        labels = list(self._meters)
        for label, accuracy in zip(labels, compute_all(list(self._meters.values())), strict=True):
            prefix = f"{split}/{label}" if label else split
            for name in ("top1", "top5", "loss"):
                value = torch.tensor(getattr(accuracy, name), dtype=torch.float64)
                # Every rank has the same sums already; "max" of equal values keeps them, and Lightning content.
                value = value.to(self.device, torch.float32)
                bar = name == "top1" and len(labels) <= _BAR_WIDTH
                self.log(f"{prefix}/{name}", value, reduce_fx="max", sync_dist=True, prog_bar=bar)
        self._meters = {}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Callbacks come first: by now an averaging one has added its average.
        averaged = EMA in checkpoint
        checkpoint[KEY] = {
            "version": VERSION,
            "kind": self.kind,
            "weights": "ema" if averaged else "live",
            "train": {**asdict(self.train_config), "betas": list(self.train_config.betas)},
            "global_batch": self.global_batch,
            "seed": self.seed,
            "unused": self.unused,
            "guard": self.guard.state_dict(),
            "class_names": self.class_names,
            "trained_on": self.trained_on,
            "max_epochs": self.trainer.max_epochs,
            "max_steps": self.trainer.max_steps,
            **self.describe(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = check_continued(checkpoint, self.kind, self.unused, self.global_batch)
        self.check_resume(saved)
        self.guard.load_state_dict(saved.get("guard", {}))
        if self._trainer is None:
            return
        for key in ("max_epochs", "max_steps"):
            now = getattr(self.trainer, key)
            if saved[key] != now:
                rank_zero_warn(
                    f"trainer.{key} was {saved[key]} and is {now} on resume: the learning rate goes on along the old "
                    "schedule, which ends where it was to end"
                )

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint whose network is another one (subclasses; raises UserError)."""


def check_continued(checkpoint: Mapping[str, Any], kind: str, unused: str, global_batch: int) -> dict[str, Any]:
    """The entry `KEY` of a checkpoint that training of this `kind` can go on from; UserError for another one."""
    saved = checkpoint.get(KEY)
    if saved is None:
        raise UserError("resume: this checkpoint was not written by lightning_tas training")
    if saved["kind"] != kind:
        raise UserError(f"resume: the checkpoint is of kind {saved['kind']!r}, this phase trains a {kind!r}")
    before = saved.get("unused", "skip")
    if before != unused:
        raise UserError(f"resume: train.unused is {unused!r}, but {before!r} in the checkpoint")
    if saved["global_batch"] != global_batch:
        raise UserError(
            f"resume: the global batch is {global_batch} images, but {saved['global_batch']} in the checkpoint: the "
            "rest would be another run; start as many processes as before"
        )
    return dict(saved)


def _build_mixing(train: TrainConfig, num_classes: int) -> Mixing | None:
    if train.mixup == 0 and train.cutmix == 0:
        return None
    draws = Mixup(
        mixup_alpha=train.mixup,
        cutmix_alpha=train.cutmix,
        prob=train.mixup_prob,
        switch_prob=train.mixup_switch_prob,
        mode=train.mixup_mode,
        label_smoothing=train.label_smoothing,
        num_classes=num_classes,
    )
    return Mixing(draws)
