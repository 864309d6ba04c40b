"""Mixup and CutMix as functions of a seed: timm's draws, applied to the whole batch at once.

Shape legend: B batch, C channels, H x W image, K classes.

timm's `Mixup` draws from NumPy's global state, loops over samples in its "elem" and "pair" modes, changes the caller's
images in place and asserts an even batch. Here the same numbers are drawn from a seed, all samples are mixed in a few
tensor operations without the host waiting for the device, and the middle sample of an odd batch meets itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from torch import Tensor


@contextlib.contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """NumPy's global state, which timm draws from, set from `seed` and put back afterwards."""
    state = np.random.get_state()
    np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
    try:
        yield
    finally:
        np.random.set_state(state)


class Mixing:
    """Mix each image with its mirror in the batch: i with B - 1 - i (mixup, arXiv:1710.09412; CutMix, 1905.04899).

    On even batches results equal those of `draws`, a timm `Mixup`, under the same NumPy seed.
    """

    def __init__(self, draws: Mixup) -> None:
        self.draws = draws

    def __call__(self, images: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and targets (B,) -> new images (B, C, H, W) and soft targets (B, K)."""
        mix = self._whole_batch if self.draws.mode == "batch" else self._each_sample
        with _numpy_seeded(seed):
            images, share = mix(images)
        return images, mixup_target(targets, self.draws.num_classes, share, self.draws.label_smoothing)

    def _whole_batch(self, images: Tensor) -> tuple[Tensor, float | Tensor]:
        share, cut = self.draws._params_per_batch()
        if share == 1.0:
            return images, 1.0
        flipped = images.flip(0)
        if not cut:
            return images * share + flipped * (1.0 - share), share
        (top, bottom, left, right), share = cutmix_bbox_and_lam(images.shape, share, correct_lam=self.draws.correct_lam)
        images = images.clone()
        images[:, :, top:bottom, left:right] = flipped[:, :, top:bottom, left:right]
        return images, float(share)

    def _each_sample(self, images: Tensor) -> tuple[Tensor, float | Tensor]:
        batch, _, height, width = images.shape
        drawn = batch // 2 if self.draws.mode == "pair" else batch
        share, cut = self.draws._params_per_elem(drawn)
        blend = np.where(cut, np.float32(1), share)  # weight of the image itself where it is blended
        boxes = np.zeros((drawn, 4), dtype=np.float32)
        for i in np.flatnonzero(cut & (share != 1)):
            boxes[i], share[i] = cutmix_bbox_and_lam(images.shape[1:], share[i], correct_lam=self.draws.correct_lam)
        table = np.column_stack([share, blend, boxes]).astype(np.float32)  # (drawn, 6)
        if self.draws.mode == "pair":  # both partners share one draw; the middle of an odd batch is left alone
            alone = np.array([[1, 1, 0, 0, 0, 0]], dtype=np.float32)[: batch % 2]
            table = np.concatenate([table, alone, table[::-1]])
        # One small copy for all the numbers; `non_blocking` keeps the host from waiting for it.
        columns = torch.from_numpy(table).to(images.device, non_blocking=True).unbind(1)  # 6 x (B,)
        weight, own, top, bottom, left, right = (c.view(batch, 1, 1, 1) for c in columns)
        flipped = images.flip(0)
        own = own.to(images.dtype)
        mixed = images * own + flipped * (1 - own)
        rows = torch.arange(height, device=images.device).view(1, 1, height, 1)
        cols = torch.arange(width, device=images.device).view(1, 1, 1, width)
        inside = (rows >= top) & (rows < bottom) & (cols >= left) & (cols < right)  # (B, 1, H, W)
        return torch.where(inside, flipped, mixed), weight.view(batch, 1)
