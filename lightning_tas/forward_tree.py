"""Forward passes of many sub-networks on one batch, with every common beginning computed once.

The steps of the sub-networks (`ElasticNetwork.steps`) form a tree, which is walked depth first: of a chain without
branches one activation is held, at every branching one more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_tas.architecture import Architecture
from lightning_tas.costs import FORMULAS, cost
from lightning_tas.proxies.shards import Share
from lightning_tas.supernets.elastic_network import Step

Path = list[Step]


def path_of(net: Any, arch: Architecture) -> Path:
    """The steps of a sub-network before `finish` and head; none where the network does not say its steps."""
    return net.steps(arch) if hasattr(net, "steps") else []


class ForwardTree:
    """Sub-networks of `net`, given with their steps (`path_of`); they are told apart by their number in this order."""

    def __init__(self, net: Any, paths: Mapping[Architecture, Path]) -> None:
        self._net, self._archs, self._paths = net, list(paths), list(paths.values())
        self.order = self._sorted()

    def _sorted(self) -> list[int]:
        """All numbers in the order of the walk: branches in the order in which they come first."""
        rank: dict[Hashable, int] = {}
        for path in self._paths:
            for step in path:
                rank.setdefault(step.key, len(rank))
        return sorted(range(len(self._paths)), key=lambda i: ([rank[step.key] for step in self._paths[i]], i))

    def new_steps(self, numbers: Sequence[int]) -> list[int]:
        """How many steps each of `numbers`, in the order of the walk, does not share with the one before it."""
        found: list[int] = []
        before: Path = []
        for number in numbers:
            path = self._paths[number]
            common = 0
            while common < min(len(path), len(before)) and path[common].key == before[common].key:
                common += 1
            found.append(len(path) - common)
            before = path
        return found

    def blocks(self, numbers: Sequence[int]) -> int:
        """Steps after the stem per batch of `numbers`, in the order of the walk."""
        return sum(min(new, self._after_stem(i)) for i, new in zip(numbers, self.new_steps(numbers), strict=True))

    def blocks_alone(self, numbers: Sequence[int]) -> int:
        """The same without shared beginnings."""
        return sum(self._after_stem(number) for number in numbers)

    def _after_stem(self, number: int) -> int:
        return max(len(self._paths[number]) - 1, 0)

    def part(self, share: Share) -> list[int]:
        """The numbers that this rank computes: neighbours in the order of the walk, about as much work on each rank.

        Work is counted in multiply-accumulates where they are known, or widths would decide who waits for whom.
        """
        if share.world == 1:
            return self.order
        work = [0, *(self._work(i, new) for i, new in zip(self.order, self.new_steps(self.order), strict=True))]
        total, done, mine = sum(work), 0, []
        for number, before, own in zip(self.order, work, work[1:], strict=False):
            done += before
            if (2 * done + own) * share.world // (2 * total) == share.rank:  # whose part the middle of its work is in
                mine.append(number)
        return mine

    def _work(self, number: int, new: int) -> int:
        arch, length = self._archs[number], len(self._paths[number])
        known = length and arch.family in FORMULAS
        return 1 + (cost(arch, self._net).macs * new // length if known else new)

    def run(self, images: Tensor, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(number, logits (B, classes)) of each of `numbers` on `images` (B, C, H, W)."""
        yield from self._walk(images, numbers, 0)

    def _walk(self, x: Any, numbers: Sequence[int], level: int) -> Iterator[tuple[int, Tensor]]:
        branches: dict[Hashable, list[int]] = {}
        for number in numbers:
            path = self._paths[number]
            if not path:
                yield number, self._net(x, self._archs[number])
            elif len(path) == level:
                yield number, self._net.forward_head(self._net.finish(x))
            else:
                branches.setdefault(path[level].key, []).append(number)
        for left, branch in zip(reversed(range(len(branches))), branches.values(), strict=True):
            # Computes the step at once; and no name is bound to its result, so that the walk alone can let it go.
            walk = self._walk(self._paths[branch[0]][level].run(x), branch, level + 1)
            if not left:
                x = None
            yield from walk
