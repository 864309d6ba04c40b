"""In which order samples are visited: pure functions of (seed, epoch, rank, world size).

A *key* is (epoch, index, repeat): it tells a worker all it needs to augment the sample, so that the result depends
neither on the worker nor on the number of workers. `index` counts in the whole data set, not in a split of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lightning_tas.randomness import numpy_generator

PADDING = -1  # index of an evaluation key that fills up a rank; such a sample gets the target -1
_ROUND = 256


class TrainOrder:
    """Shuffled keys of one rank, in batches.

    Every epoch permutes `indices` by (seed, epoch); the rank takes every `world_size`-th position, so that the i-th
    global batch holds the same samples at any world size with an equal global batch. Without `drop_last`, ranks are
    made even by starting the permutation again.

    Repeated augmentation (`repeats` = k > 1; Hoffer et al. 2020, as in DeiT): each index stands k times in a row in the
    permuted list before ranks take turns, so its copies land in different ranks or, on few ranks, in the same batch.
    The list is cut so that an epoch is as long as without repeats: floor(n / 256) * 256 / world_size samples per rank
    (n / world_size under 256 images, where the references would see none), about n / k distinct images. The copy
    number is the key's `repeat`, so copies are augmented differently.
    """

    def __init__(
        self,
        indices: np.ndarray,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
        drop_last: bool = True,
    ) -> None:
        assert 0 <= rank < world_size and len(indices) > 0
        self.indices = np.asarray(indices, dtype=np.int64)
        self.batch_size, self.seed, self.repeats, self.drop_last = batch_size, seed, repeats, drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before every epoch."""
        self.epoch = int(epoch)

    @property
    def samples(self) -> int:
        """Samples of this rank in an epoch, before `drop_last`; the same on every rank."""
        size = len(self.indices)
        if self.repeats == 1:
            return size // self.world_size if self.drop_last else math.ceil(size / self.world_size)
        rounded = size // _ROUND * _ROUND if size >= _ROUND else size
        return max(1, rounded // self.world_size)

    def __len__(self) -> int:
        """Batches of this rank in an epoch; the same on every rank."""
        return self.samples // self.batch_size if self.drop_last else math.ceil(self.samples / self.batch_size)

    def keys(self, epoch: int) -> np.ndarray:
        """Keys (samples, 3) of this rank in `epoch`, in order."""
        permuted = numpy_generator(self.seed, "order", epoch).permutation(self.indices)
        positions = np.arange(self.samples, dtype=np.int64) * self.world_size + self.rank
        # Past the end of the list the permutation starts again with copy numbers not yet used.
        rounds, inside = np.divmod(positions, len(permuted) * self.repeats)
        index = permuted[inside // self.repeats]
        repeat = inside % self.repeats + self.repeats * rounds
        return np.stack([np.full_like(index, epoch), index, repeat], axis=1)

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """Batches of keys (B, 3) of this rank in `epoch`, from number `start` on."""
        keys = self.keys(epoch)
        for number in range(start, len(self)):
            yield keys[number * self.batch_size : (number + 1) * self.batch_size]


class EvalOrder:
    """Every sample of `indices` exactly once over all ranks, in order; ranks are filled up with `PADDING`.

    All ranks give the same number of batches of the same sizes, so collectives match. At least one batch per rank.
    """

    def __init__(self, indices: np.ndarray, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        assert 0 <= rank < world_size and len(indices) > 0
        self.indices = np.asarray(indices, dtype=np.int64)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size

    @property
    def samples(self) -> int:
        """Samples of this rank, padding included."""
        return math.ceil(len(self.indices) / self.world_size)

    def __len__(self) -> int:
        return math.ceil(self.samples / self.batch_size)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[np.ndarray]:
        """Batches of keys (B, 3); `epoch` is fixed at 0 because evaluation draws nothing."""
        own = np.full(self.samples, PADDING, dtype=np.int64)
        mine = self.indices[self.rank :: self.world_size]
        own[: len(mine)] = mine
        for number in range(start, len(self)):
            index = own[number * self.batch_size : (number + 1) * self.batch_size]
            yield np.stack([np.zeros_like(index), index, np.zeros_like(index)], axis=1)
