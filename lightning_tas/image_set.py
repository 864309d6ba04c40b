"""The images that networks are compared on: decoded once and kept on the device where they fit, else read again.

A loader may offer, besides batches, ``images`` (their number) and ``in_order(rows)`` (a loader of its images `rows`,
in that order), as `TASDataModule.search_loader` does: then what does not fit can be read in any order, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_tas.errors import UserError
from lightning_tas.evaluator import PADDING
from lightning_tas.proxies.shards import Share
from lightning_tas.randomness import numpy_generator

Rows = npt.NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
_SHARE = {"cuda": 0.5, "cpu": 0.25}
"""How much of the free memory images may take."""
_LINE = 64  # bytes; operands of another alignment may be summed in another order


class ImageSet:
    """Batches (images (B, C, H, W), targets (B,)) of `loader`, on `device`.

    Args:
        loader: gives all images, on every rank of `share`; it must be possible to iterate over it again.
        room: bytes that images may take on the device; where they take more on any rank, every rank reads them again.
        limit: use only so many images, drawn with `seed`; None: all.

    Raises:
        UserError: no images.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device, room: int, limit: int | None, seed: int, share: Share
    ) -> None:
        self._loader = loader if limit is None else _limited(loader, limit, seed)
        self._device, self._room = device, room
        self._images: Tensor | None = None
        self._targets = torch.zeros(0)
        self._sizes: list[int] = []
        failed: Exception | None = None
        try:
            self._decode()
        except Exception as error:
            failed = error
        share.agree(failed)
        if not all(share.gather(self.kept)):
            self._images = None

    @property
    def kept(self) -> bool:
        """Whether the images are in memory."""
        return self._images is not None

    @property
    def orderly(self) -> bool:
        """Whether the images can be had in any order."""
        return self.kept or hasattr(self._loader, "in_order")

    def _decode(self) -> None:
        """Read all images into one tensor, and stop where it becomes too large."""
        images, targets = None, []
        for x, y in self._loader:
            start, end = sum(self._sizes), sum(self._sizes) + len(x)
            each = x[0].numel() * x.element_size() if len(x) else 0
            if images is None:
                expected = len(x) * (len(self._loader) if isinstance(self._loader, Sized) else 1)
                if expected * each > self._room:
                    return
                images = _rows(x, expected, self._device)
            if end * each > self._room:
                return
            if end > len(images):
                images = _rows(x, max(end, 2 * start), self._device, images[:start])
            images[start:end].copy_(x, non_blocking=True)
            targets.append(y.to(self._device, non_blocking=True))
            self._sizes.append(len(x))
        if images is None:
            raise UserError("nothing to evaluate: the loader gave no images (is the data set or its split empty?)")
        self._images, self._targets = images[: sum(self._sizes)], torch.cat(targets)

    def batches(self) -> Iterator[Batch]:
        """All images in the batches of the loader."""
        if self._images is None:
            yield from self._moved(self._loader)
            return
        places = np.cumsum([0, *self._sizes]).tolist()
        for start, end in pairwise(places):
            images = self._images[start:end]
            yield images if images.data_ptr() % _LINE == 0 else images.clone(), self._targets[start:end]

    def rows(self) -> Rows:
        """Where the images are that are no padding, in the order of the loader; needs `orderly`."""
        if self._images is None:
            return np.arange(self._loader.images, dtype=np.int64)  # type: ignore[attr-defined]
        return np.flatnonzero((self._targets != PADDING).cpu().numpy())

    def take(self, rows: Rows) -> Iterator[Batch]:
        """The images `rows`, in that order, in batches as large as the loader's first; needs `orderly`."""
        if self._images is None:
            yield from self._moved(self._loader.in_order(rows))  # type: ignore[attr-defined]
            return
        at = torch.from_numpy(rows).to(self._device)
        for part in at.split(self._sizes[0]):
            yield self._images[part], self._targets[part]

    def _moved(self, loader: Iterable[Any]) -> Iterator[Batch]:
        for images, targets in loader:
            yield images.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)


def free_bytes(device: torch.device, processes: int = 1) -> int:
    """How many bytes of images one of so many processes on this machine may keep on a device (each has its own GPU)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_SHARE["cuda"] * free)
    return int(_SHARE["cpu"] * _free_memory() / processes)


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        names = getattr(os, "sysconf_names", {})
        known = "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if known else 2**32


def _rows(like: Tensor, number: int, device: torch.device, begin: Tensor | None = None) -> Tensor:
    """Room for `number` images like these, laid out as they are, with `begin` as the first ones."""
    last = like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    made = torch.empty((number, *like.shape[1:]), dtype=like.dtype, device=device, memory_format=layout)
    if begin is not None:
        made[: len(begin)] = begin
    return made


def _limited(loader: Any, limit: int, seed: int) -> Iterable[Any]:
    """A loader of `limit` of the images, in the same order; decodes the others only where there is no choice."""
    if not hasattr(loader, "in_order"):
        return _Some(loader, limit, seed)
    return loader if limit >= loader.images else loader.in_order(_drawn(loader.images, limit, seed))  # type: ignore[no-any-return]


def _drawn(images: int, limit: int, seed: int) -> Rows:
    return np.sort(numpy_generator(seed, "image-subset").permutation(images)[:limit])


class _Some:
    """Some images of any loader, without padding."""

    def __init__(self, loader: Iterable[Any], limit: int, seed: int) -> None:
        self._loader, self._limit, self._seed = loader, limit, seed
        self._chosen: Rows | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._chosen is None:
            images = sum(int((targets != PADDING).sum()) for _, targets in self._loader)
            self._chosen = _drawn(images, self._limit, self._seed)
        seen = 0
        for images, targets in self._loader:
            valid = torch.nonzero(targets != PADDING).flatten().numpy()
            here = valid[np.isin(np.arange(seen, seen + len(valid)), self._chosen)]
            seen += len(valid)
            if len(here):
                yield images[here], targets[here]
