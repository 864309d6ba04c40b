"""Data set of whole, augmented batches: what the loader asks for by keys, in the main process or in a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tas.data.augment import Pipeline, as_picture, as_tensor
from lightning_tas.data.draws import preserved, sample_seeds
from lightning_tas.data.registry import ArrayImages, name_of
from lightning_tas.data.sampling import PADDING
from lightning_tas.errors import UserError

MEMORY_LIMIT = 512 * 2**20  # bytes of resized images that are kept in memory


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """`dataset[keys]`, keys (B, 3) of (epoch, index, repeat) -> (float32 (B, C, H, W), int64 (B,)).

    `source` is the whole data set, `indices` the part of it that will be asked for. An index of `PADDING` gives a black
    image with the target -1. Images in memory are resized once, and augmented as a batch where the pipeline can.
    """

    def __init__(self, source: Any, indices: np.ndarray, pipeline: Pipeline, seed: int) -> None:
        self.source, self.pipeline, self.seed = source, pipeline, seed
        self.indices = np.asarray(indices, dtype=np.int64)
        self.pixels: Tensor | None = None  # uint8 (N, C, H, W), after `pipeline.fixed`
        self.rows: np.ndarray | None = None  # row in `pixels` of an index of `source`; None: the same
        if isinstance(source, ArrayImages) and pipeline.batchable:
            self._prepare(source)

    def _prepare(self, source: ArrayImages) -> None:
        height, width = self.pipeline.size
        if source.images.shape[1:] == (self.pipeline.in_chans, height, width) and self.pipeline.centre is None:
            self.pixels = source.images
            return
        if len(self.indices) * self.pipeline.in_chans * height * width > MEMORY_LIMIT:
            return
        fixed = [as_tensor(self.pipeline.fixed(as_picture(source[i][0], self.pipeline.in_chans))) for i in self.indices]
        self.pixels = torch.stack(fixed)
        self.rows = np.full(len(source), PADDING, dtype=np.int64)
        self.rows[self.indices] = np.arange(len(self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
        """One sample as a batch of one; the loader uses `__getitems__`."""
        return self.__getitems__(np.asarray(key, dtype=np.int64).reshape(1, 3))

    def __getitems__(self, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        seeds = sample_seeds(self.seed, keys)
        index = keys[:, 1]
        if self.pixels is not None:
            real = torch.from_numpy(index != PADDING)
            rows = index if self.rows is None else self.rows[index]
            images = self.pixels[torch.from_numpy(np.where(index == PADDING, 0, rows))]
            images = self.pipeline.batch(images, seeds)
            targets = torch.from_numpy(np.where(index == PADDING, PADDING, self.source.targets[index]))
            if not bool(real.all()):
                images[~real] = self._black()
            return images, targets
        with preserved():
            samples = [self._sample(int(i), int(s)) for i, s in zip(index, seeds, strict=True)]
        return torch.stack([image for image, _ in samples]), torch.tensor([target for _, target in samples])

    def _sample(self, index: int, seed: int) -> tuple[Tensor, int]:
        if index == PADDING:
            return self._black().expand(-1, *self.pipeline.size), PADDING
        picture, target = self.read(index)
        return self.pipeline.item(picture, seed), target

    def read(self, index: int) -> tuple[Any, int]:
        """Picture (PIL of mode L or RGB, or a uint8 tensor) and class; UserError that names the file of a bad image."""
        try:
            image, target = self.source[index]
            return as_picture(image, self.pipeline.in_chans, self.pipeline.exif), int(target)
        except UserError:  # the settings do not fit
            raise
        except Exception as error:  # of all kinds: SyntaxError, struct.error, DecompressionBombError, ...
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"data.root: image {self._name(index)} cannot be read: {reason}") from error

    def _name(self, index: int) -> str:
        """The file of an image where the data set knows it, else its number."""
        return name_of(self.source, index) or f"number {index}"

    def _black(self) -> Tensor:
        return self.pipeline.normalise(torch.zeros(self.pipeline.in_chans, 1, 1, dtype=torch.uint8))
