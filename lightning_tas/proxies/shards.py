"""Networks dealt out over processes: over the ranks of a process group, or by an explicit share.

Ranks of a group talk (who has what, what is left, did anybody fail); processes with an explicit share do not even know
of each other, so several may run on one GPU or on machines without a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_tas.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Process `rank` of `world`; `talks` if they are the ranks of torch's default process group."""

    rank: int
    world: int
    talks: bool

    def turn(self, number: int) -> bool:
        """Whether the network with this number is its own."""
        return number % self.world == self.rank

    def first(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, where alone it runs; where nobody talks, everybody runs it."""
        if not self.talks:
            return function()
        found: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                found = function()
            except Exception as raised:
                error = raised
        self.agree(error)
        import torch.distributed as dist

        box = [found]
        dist.broadcast_object_list(box, src=0)
        result: T = box[0]
        return result

    def agree(self, error: Exception | None) -> None:
        """Wait for all; raises here what failed here, and on every rank that something failed elsewhere."""
        told = self.gather(None if error is None else (isinstance(error, UserError), str(error) or repr(error)))
        if error is not None:
            raise error
        for rank, failure in enumerate(told):
            if failure is not None:
                mistake, message = failure
                raise UserError(message) if mistake else RuntimeError(f"process {rank}: {message}")

    def gather(self, value: T) -> list[T]:
        """What every rank gives, in order; alone where nobody talks."""
        if not self.talks:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


def share_of(shard: tuple[int, int] | None) -> Share:
    """The explicit share (rank, world), else the rank in the process group, else everything."""
    if shard is not None:
        rank, world = shard
        if not 0 <= rank < world:
            raise UserError(f"shard: {shard!r} is not valid; expected (rank, world) with 0 <= rank < world")
        return Share(rank, world, talks=False)
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return Share(dist.get_rank(), dist.get_world_size(), talks=True)
    return Share(0, 1, talks=False)
