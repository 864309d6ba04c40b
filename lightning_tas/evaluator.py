"""Accuracy of sub-networks: the one way everything measures them.

`Meter` keeps the sums (correct in the first one and five, loss, samples) of one network; `evaluate` runs a loader
through many sub-networks of one supernet, and each batch travels to the device once for all of them. Samples are
counted, never batches averaged, so the numbers do not depend on the batch size, nor on the number of processes:
in a distributed run every rank gives its own share of the data and the sums are added up over ranks.

Measuring leaves no trace: train/eval modes, gradients and the random state of torch, NumPy and Python are as before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError

PADDING = -1
"""Target of a sample that only pads a batch: it is not counted."""

TOP_K = 5

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Type of forward passes by the Trainer's precision; others compute in the type of the weights."""


@dataclass(frozen=True)
class Accuracy:
    """What was measured: top-1 and top-5 in percent, mean cross-entropy in nats, and the number of samples.

    With fewer than five classes `top5` asks for any of all of them, so it is 100 unless logits are not finite.
    """

    top1: float
    top5: float
    loss: float
    samples: int


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the j-th best guess is right, (B, k) with k at most `TOP_K`, from `logits` (B, classes).

    False in rows of padding, and of logits that are not finite.
    """
    logits = logits.float()
    found = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1).indices == targets.unsqueeze(-1)
    return found & ((targets != PADDING) & logits.isfinite().all(dim=-1)).unsqueeze(-1)


class Meter:
    """Running sums of one network's hits and losses. `update` never makes the host wait for the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # (4,): hits in 1, hits in 5, summed loss, samples

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch: `logits` (B, classes), `targets` (B,) class indices, `PADDING` where a row is padding.

        A row with logits that are not finite counts as wrong, and its loss makes the mean loss not finite.
        """
        logits = logits.float()
        valid = targets != PADDING
        right = hits(logits, targets)
        losses = F.cross_entropy(logits, targets, ignore_index=PADDING, reduction="none")  # 0 at padding
        # Padding rows may hold anything, also NaN, which a multiplication by 0 would keep.
        losses = losses.where(valid, losses.new_zeros(()))
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        sums = torch.stack(
            [right[:, 0].sum(dtype=wide), right.sum(dtype=wide), losses.sum(dtype=wide), valid.sum(dtype=wide)]
        )
        # Out of place: a sum made under `inference_mode` could not be added to in place outside of it.
        self._sums = sums if self._sums is None else self._sums + sums

    def compute(self) -> Accuracy:
        """The figures so far, over all ranks when `torch.distributed` runs: then every rank must call it.

        Raises:
            UserError: not one sample was counted, on any rank.
        """
        return compute_all([self])[0]

    def reset(self) -> None:
        """Forget everything counted."""
        self._sums = None


def compute_all(meters: Sequence[Meter]) -> list[Accuracy]:
    """`Meter.compute` of many meters, in one collective and one transfer from the device."""
    known = [m._sums for m in meters if m._sums is not None]
    device = known[0].device if known else _collective_device()
    empty = torch.zeros(4, dtype=known[0].dtype if known else torch.float64, device=device)
    sums = _stacked(meters, empty).clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)
    return [_accuracy(row) for row in sums.tolist()]


def compute_here(meters: Sequence[Meter]) -> list[Accuracy]:
    """`Meter.compute` of meters that have seen everything on this rank: no collective, one transfer."""
    return [_accuracy(row) for row in _stacked(meters, torch.zeros(4, dtype=torch.float64)).tolist()]


def _stacked(meters: Sequence[Meter], empty: Tensor) -> Tensor:
    return torch.stack([empty if m._sums is None else m._sums for m in meters])  # (meters, 4)


def _collective_device() -> torch.device:
    """Where sums must lie for a rank that saw no data, so that it can still join the others' collective."""
    on_gpu = dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _accuracy(row: list[float]) -> Accuracy:
    first, five, loss, samples = row
    if not samples:
        raise UserError("nothing to evaluate: the loader gave no samples (is the data set or its split empty?)")
    return Accuracy(100.0 * first / samples, 100.0 * five / samples, loss / samples, round(samples))


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the global random state of torch (all devices), NumPy and Python back as it was on leaving."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def measuring(net: nn.Module, device: torch.device | None) -> Iterator[None]:
    """`net` in eval mode and on `device`; afterwards every module is in its own former mode and place again."""
    modes = [(module, module.training) for module in net.modules()]
    home = next(net.parameters()).device
    if device is not None and device != home:
        net.to(device)
    net.eval()
    try:
        with preserved_rng():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        if device is not None and device != home:
            net.to(home)


def evaluate(
    net: nn.Module,
    archs: Sequence[Architecture | None],
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    amp_dtype: torch.dtype | None = None,
    progress: bool = False,
    max_batches: int | None = None,
) -> list[Accuracy]:
    """Measure sub-networks of `net` on the (images, targets) batches of `loader`; results in the order of `archs`.

    Args:
        net: a supernet, called ``net(images, arch)``, or a stand-alone network, called ``net(images)``.
        archs: the sub-networks; `None` stands for a stand-alone network.
        loader: batches of images (B, C, H, W) and targets (B,), read once. Each rank's loader gives its own share.
        device: where to measure; the default is where the network lies. The network returns afterwards.
        amp_dtype: run forward passes under autocast to this type; the loss is float32 all the same.
        progress: show a bar over batches.
        max_batches: stop after so many batches.

    Raises:
        UserError: no architectures, or no samples.
    """
    if not archs:
        raise UserError("nothing to evaluate: no architectures were given")
    place = torch.device(device) if device is not None else None
    target_device = place or next(net.parameters()).device
    meters = [Meter() for _ in archs]
    # no_grad rather than inference_mode: whatever a network caches in here, training can still use it.
    with torch.no_grad(), measuring(net, place), autocast(target_device, amp_dtype):
        for images, targets in _bar(islice(loader, max_batches), loader, max_batches, progress):
            images = images.to(target_device, non_blocking=True)
            targets = targets.to(target_device, non_blocking=True)
            for meter, arch in zip(meters, archs, strict=True):
                meter.update(net(images) if arch is None else net(images, arch), targets)
    return compute_all(meters)


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _bar(batches: Iterable[Any], loader: Iterable[Any], max_batches: int | None, progress: bool) -> Iterable[Any]:
    if not progress:
        return batches
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    try:
        total: int | None = len(loader)  # type: ignore[arg-type]
    except TypeError:
        total = None
    if max_batches is not None:
        total = max_batches if total is None else min(total, max_batches)
    return tqdm(batches, total=total, desc="evaluate", unit="batch", leave=False, disable=None)
