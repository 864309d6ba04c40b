"""The loader that Lightning can stop and resume at any batch, bit for bit.

Lightning saves `state_dict` with a checkpoint and restores it before the first batch. What is counted are the batches
*handed out*, not those that workers have prefetched, and the order is a pure function of the epoch, so the rest of an
epoch is found by skipping keys, without reading a sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_tas.data.sampling import EvalOrder
from lightning_tas.data.workers import shield
from lightning_tas.errors import UserError


class Order(Protocol):
    """What the loader needs of `sampling.TrainOrder` and `sampling.EvalOrder`."""

    batch_size: int
    world_size: int

    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]: ...


class _Batches:
    """Batch sampler of torch's loader: the batches of one epoch from one position on."""

    def __init__(self, order: Order) -> None:
        self.order, self.epoch, self.start = order, 0, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.order.batches(self.epoch, self.start)

    def __len__(self) -> int:
        return len(self.order) - self.start


def _as_is(batch: Any) -> Any:
    """Collate function: the data set gives whole batches."""
    return batch


class CountedLoader:
    """Iterates over the batches of an `Order`; stateful in the sense of Lightning.

    Not a `DataLoader`, so that Lightning replaces neither its sampler nor its seeding whatever the Trainer's flags.
    `dataset.__getitems__(keys)` must return a whole batch. `position` gives the trainer's (epoch, finished batches in
    it), or None when no trainer drives this loader, and outranks the restored state: a run stopped by an exception had
    been handed a batch that it never finished, and Lightning announces a wrong epoch when it resumes a run with
    `max_steps` from the end of an epoch. Both are read when the first batch is asked for, not when `iter()` is called:
    Lightning calls `iter()` too early.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        num_workers: int = 0,
        pin_memory: bool = False,
        position: Callable[[CountedLoader], tuple[int, int] | None] | None = None,
    ) -> None:
        self.dataset, self.sampler, self.num_workers = dataset, order, num_workers
        self._batches = _Batches(order)
        self._position = position
        self._restored: dict[str, int] | None = None
        self._handed_out = 0
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._batches,  # type: ignore[arg-type]
            collate_fn=_as_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=shield,
            generator=torch.Generator(),  # or torch would take a seed for its workers from the global generator
        )

    @property
    def batch_sampler(self) -> Order:
        """DeepSpeed reads the batch size from here."""
        return self.sampler

    @property
    def _iterator(self) -> Any:
        """Torch's running iterator; Lightning stops the workers through this name when a fit ends."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value

    @property
    def epoch(self) -> int:
        return int(getattr(self.sampler, "epoch", 0))

    def set_epoch(self, epoch: int) -> None:
        """For loops other than Lightning's: call before each epoch."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of a whole epoch, also when resumed in its middle."""
        return len(self.sampler)

    @property
    def images(self) -> int:
        """How many images `in_order` chooses from."""
        return len(self._whole.indices)

    def in_order(self, rows: np.ndarray) -> CountedLoader:
        """A loader of the images with these numbers (int, each at most once) in the order of this one, in their order.

        Only of evaluation on one process: elsewhere a rank has but its share.
        """
        order = self._whole
        again = EvalOrder(order.indices[rows], order.batch_size)
        return CountedLoader(self.dataset, again, self.num_workers, self._loader.pin_memory)

    @property
    def _whole(self) -> EvalOrder:
        assert isinstance(self.sampler, EvalOrder) and self.sampler.world_size == 1
        return self.sampler

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = self._start()
        self._batches.epoch, self._batches.start = self.epoch, start
        self._handed_out = start
        if start >= len(self):
            return
        batches = iter(self._loader)
        while (batch := self._next(batches)) is not None:
            self._handed_out += 1
            yield batch

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            batch = next(batches, None)
        except UserError as error:
            # From a worker process it arrives as the text of its traceback, which ends with the message.
            message = str(error).strip().splitlines()[-1]
            raise UserError(message.removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")) from None
        if batch is not None and len(batch) > 2:
            self.dataset.tell(batch[2])  # type: ignore[attr-defined]
            batch = batch[:2]
        return batch

    def _start(self) -> int:
        restored, self._restored = self._restored, None
        position = self._position(self) if self._position is not None else None
        if position is not None:
            self.set_epoch(position[0])
            return position[1]
        return restored["batches"] if restored is not None and restored["epoch"] == self.epoch else 0

    def state_dict(self) -> dict[str, int]:
        """Epoch, batches handed out in it, and what the order depends on; plain integers."""
        return {"epoch": self.epoch, "batches": self._handed_out, **self._shape()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the epoch of `state` where it was left; other epochs start at their beginning."""
        changed = [f"{key} {state[key]} -> {now}" for key, now in self._shape().items() if state.get(key, now) != now]
        if changed and 0 < state["batches"] < len(self):
            warnings.warn(
                f"resumed in the middle of an epoch with other data settings ({', '.join(changed)}): the rest of this "
                "epoch sees other images than the uninterrupted run",
                stacklevel=2,
            )
        self._restored = {"epoch": int(state["epoch"]), "batches": int(state["batches"])}
        self.set_epoch(self._restored["epoch"])

    def _shape(self) -> dict[str, int]:
        return {
            "batch_size": self.sampler.batch_size,
            "world_size": self.sampler.world_size,
            "epoch_batches": len(self.sampler),
        }
