"""Data set of whole, augmented batches: what the loader asks for by keys, in the main process or in a worker."""

from __future__ import annotations

import contextlib
import sys
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
from lightning_tas.launch import group
from lightning_tas.progress import beside_bars
from lightning_tas.randomness import numpy_generator

_TRIES = 8
MEMORY_LIMIT = 512 * 2**20  # bytes of resized images that are kept in memory


class BadImage(UserError):
    """An image that cannot be read, and the decoder's `reason`."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """`dataset[keys]`, keys (B, 3) of (epoch, index, repeat) -> (float32 (B, C, H, W), int64 (B,)).

    `source` is the whole data set, `indices` the part of it that will be asked for. An index of `PADDING` gives a black
    image with the target -1. Images in memory are resized once, and augmented as a batch where the pipeline can.

    An image that cannot be read raises `BadImage`. With `skip` another one takes its place, a function of (seed,
    index); without `replace`, where each image counts once, it is left out as padding is. A batch with such images has
    a third entry, [(name, reason), ...], for `CountedLoader`, which tells those that are not in `told` yet.
    """

    def __init__(
        self,
        source: Any,
        indices: np.ndarray,
        pipeline: Pipeline,
        seed: int,
        skip: bool = False,
        replace: bool = True,
        told: set[str] | None = None,
    ) -> None:
        self.source, self.pipeline, self.seed = source, pipeline, seed
        self.skip, self.replace, self.told = skip, replace, told if told is not None else set()
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
        return self.__getitems__(np.asarray(key, dtype=np.int64).reshape(1, 3))[:2]  # type: ignore[return-value]

    def __getitems__(self, keys: np.ndarray) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, list[tuple[str, str]]]:
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
        bad: list[tuple[str, str]] = []
        with preserved():
            samples = [self._sample(int(i), int(s), bad) for i, s in zip(index, seeds, strict=True)]
        images, targets = torch.stack([image for image, _ in samples]), torch.tensor([target for _, target in samples])
        return (images, targets, bad) if bad else (images, targets)

    def _sample(self, index: int, seed: int, bad: list[tuple[str, str]]) -> tuple[Tensor, int]:
        if index == PADDING:
            return self._padding()
        try:
            picture, target = self.read(index)
        except BadImage as error:
            if not self.skip:
                raise BadImage(f"{error}; data.on_bad_image=skip goes on without it", error.reason) from error
            bad.append((self.name(index), error.reason))
            if not self.replace:
                return self._padding()
            picture, target = self._instead(index)
        return self.pipeline.item(picture, seed), target

    def _instead(self, index: int) -> tuple[Any, int]:
        """Another of `indices` in the place of a bad one: the same in every epoch, process and run."""
        drawn = numpy_generator(self.seed, "replacement", index).choice(self.indices, _TRIES)
        for other in drawn.tolist():
            with contextlib.suppress(BadImage):
                return self.read(other)
        raise BadImage(
            f"data.root: image {self.name(index)} cannot be read, nor can {_TRIES} others that were drawn in its place"
        )

    def tell(self, bad: list[tuple[str, str]]) -> None:
        """Say once which images are left out; of several processes, the first that meets one."""
        for name, reason in bad:
            if name not in self.told:
                self.told.add(name)
                if group.claims(f"bad image {name}"):
                    fate = "another one takes its place" if self.replace else "it is not counted"
                    with beside_bars():
                        sys.stderr.write(
                            f"data.on_bad_image=skip: image {name} cannot be read: {reason}; {fate} "
                            f"({len(self.told)} so far)\n"
                        )

    def read(self, index: int) -> tuple[Any, int]:
        """Picture (PIL of mode L or RGB, or a uint8 tensor) and class; `BadImage` names the file of a bad one."""
        try:
            image, target = self.source[index]
            return as_picture(image, self.pipeline.in_chans, self.pipeline.exif), int(target)
        except UserError:  # the settings do not fit
            raise
        except Exception as error:  # of all kinds: SyntaxError, struct.error, DecompressionBombError, ...
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadImage(f"data.root: image {self.name(index)} cannot be read: {reason}", reason) from error

    def problem(self, index: int) -> str | None:
        """Why an image cannot be read; None where it can."""
        try:
            self.read(index)
        except BadImage as error:
            return error.reason
        return None

    def name(self, index: int) -> str:
        """The file of an image where the data set knows it, else its number."""
        return name_of(self.source, index) or f"number {index}"

    def _padding(self) -> tuple[Tensor, int]:
        return self._black().expand(-1, *self.pipeline.size), PADDING

    def _black(self) -> Tensor:
        return self.pipeline.normalise(torch.zeros(self.pipeline.in_chans, 1, 1, dtype=torch.uint8))
