"""Accuracy of many sub-networks of one supernet on one set of images: what a search asks for hundreds of times.

The images are decoded once and stay on the device where they fit (`image_set`). In every batch each common beginning
of several sub-networks is computed once (`forward_tree`). The ranks of a process group share the sub-networks, each
over the whole set, and all get all results; without racing these are the numbers of `evaluator.evaluate`, bit for bit
on the CPU. With racing (`racing`), sub-networks that cannot be among the best any more are given up early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.evaluator import Accuracy, Meter, autocast, compute_here, hits, measuring
from lightning_tas.forward_tree import ForwardTree, Path, path_of
from lightning_tas.image_set import ImageSet, Rows, free_bytes
from lightning_tas.launch.environment import layout
from lightning_tas.proxies.shards import Share, share_of
from lightning_tas.racing import Bools, Race, Raced, run
from lightning_tas.randomness import numpy_generator

Paths = Mapping[Architecture, Path]
T = TypeVar("T")


@dataclass
class Work:
    """What all ranks have computed so far.

    images: images (padding included) times the sub-networks that they went through. blocks: blocks (and poolings) times
    images. blocks_alone: the same, had no beginnings been shared; their ratio is the gain.
    """

    images: int = 0
    blocks: int = 0
    blocks_alone: int = 0

    def add(self, other: Work) -> None:
        self.images += other.images
        self.blocks += other.blocks
        self.blocks_alone += other.blocks_alone


class Population:
    """Measures sub-networks of the supernet `net` on the images of `loader`.

    Every method is a collective of the process group where there is one: all ranks call it with the same arguments.
    Results do not depend on the number of ranks. Measuring leaves no trace, see `evaluator`.

    Args:
        net: a supernet; it is copied nowhere and left as it was. Racing compares with earlier calls: its weights must
            not change in between, or call `forget`.
        loader: batches of images (B, C, H, W) and targets (B,), the whole set on every rank, in the same order.
        device: where to measure; None: where the network lies. amp_dtype: of autocast; None: none.
        max_images: only so many of them, drawn with `seed`.
        keep_bytes: what the decoded images may take; None: a share of the free memory of the device. What does not fit
            is read again for each call.

    Raises:
        UserError: no images; architectures that the supernet cannot hold.
    """

    def __init__(
        self,
        net: nn.Module,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        amp_dtype: torch.dtype | None = None,
        max_images: int | None = None,
        keep_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        if max_images is not None and max_images < 1:
            raise UserError(f"max_images: {max_images!r} is not valid; valid: 1 or above")
        self.net, self._loader, self._amp = net, loader, amp_dtype
        self._place = None if device is None else torch.device(device)
        self.device = self._place or next(net.parameters()).device
        self._max_images, self._room, self._seed = max_images, keep_bytes, seed
        self._set: ImageSet | None = None
        self._race: Race | None = None
        self._race_seed = 0
        self.work = Work()

    @property
    def images(self) -> ImageSet:
        """The images, decoded when first asked for."""
        if self._set is None:
            share = share_of(None)
            per_node, _ = layout() or (share.world, 1)
            room = free_bytes(self.device, per_node) if self._room is None else self._room
            self._set = ImageSet(self._loader, self.device, room, self._max_images, self._seed, share)
        return self._set

    # --- all images -------------------------------------------------------------------------------------------------

    def accuracies(self, archs: Sequence[Architecture]) -> list[Accuracy]:
        """Accuracy of every sub-network on all images, in the order given."""
        if not archs:
            raise UserError("nothing to evaluate: no architectures were given")
        images, share = self.images, share_of(None)
        paths = self._paths(archs)
        tree, distinct = ForwardTree(self.net, paths), list(paths)

        def own() -> tuple[dict[Architecture, Accuracy], Work]:
            mine, work = tree.part(share), Work()
            meters = {number: Meter() for number in mine}
            for x, targets in images.batches() if mine else ():
                self._count(work, tree, mine, len(x))
                for number, logits in tree.run(x, mine):
                    meters[number].update(logits, targets)
            figures = compute_here(list(meters.values())) if mine else []
            return {distinct[number]: figure for number, figure in zip(meters, figures, strict=True)}, work

        found = self._together(own, share)
        return [found[arch] for arch in archs]

    def _paths(self, archs: Iterable[Architecture]) -> Paths:
        """The steps of every distinct sub-network."""
        return {arch: path_of(self.net, arch) for arch in dict.fromkeys(archs)}

    @staticmethod
    def _count(work: Work, tree: ForwardTree, numbers: Sequence[int], images: int) -> None:
        work.add(Work(len(numbers) * images, tree.blocks(numbers) * images, tree.blocks_alone(numbers) * images))

    def _together(self, own: Callable[[], tuple[dict[Architecture, T], Work]], share: Share) -> dict[Architecture, T]:
        """What all ranks found together; what fails on one of them is raised on all."""
        mine: tuple[dict[Architecture, T], Work] = ({}, Work())
        error: Exception | None = None
        try:
            with torch.no_grad(), measuring(self.net, self._place), autocast(self.device, self._amp):
                mine = own()
        except Exception as raised:
            error = raised
        share.agree(error)
        found: dict[Architecture, T] = {}
        for part, work in share.gather(mine):
            found |= part
            self.work.add(work)
        return found

    # --- racing -----------------------------------------------------------------------------------------------------

    def race(self, archs: Sequence[Architecture], top: int = 10, error: float = 0.05, seed: int = 0) -> list[Raced]:
        """Race sub-networks against the `top` best of all that were raced before; see `racing`.

        Only those that are not `dropped` have seen all images; final numbers are those of `accuracies`. Another `top`,
        `error` or `seed` than before begins afresh. Without random access to the images (`image_set`), for those that
        do not fit into memory, every sub-network sees all of them.

        error: the probability that racing changes which are the `top` best. seed: of the order of the images.
        """
        if not self.images.orderly:
            return [Raced(found.top1, found.samples, False) for found in self.accuracies(archs)]
        order = self._order(seed)
        race = self._racing(len(order), top, error, seed)
        paths = self._paths(archs)
        by_id = {arch.id: arch for arch in paths}
        assert len(by_id) == len(paths), "two networks with one id"

        def look(names: Sequence[str], begin: int, end: int) -> dict[str, Bools]:
            chosen = {by_id[name]: paths[by_id[name]] for name in names}
            return {arch.id: known for arch, known in self._hits(chosen, order[begin:end]).items()}

        found = run(race, list(by_id), look)
        return [found[arch.id] for arch in archs]

    def _order(self, seed: int) -> Rows:
        """The images in random order."""
        rows = self.images.rows()
        if not len(rows):
            raise UserError("nothing to evaluate: the loader gave no images (is the data set or its split empty?)")
        return rows[numpy_generator(seed, "population.race").permutation(len(rows))]

    def _racing(self, images: int, top: int, error: float, seed: int) -> Race:
        race = self._race
        if race is None or (race.top, race.error, self._race_seed) != (top, error, seed):
            self._race, self._race_seed = Race(images, top, error), seed
        elif race.images != images:
            raise UserError(f"resume: racing saw {race.images} images before, now there are {images}")
        assert self._race is not None
        return self._race

    def hits(self, archs: Sequence[Architecture], rows: Rows | None = None) -> Bools:
        """Whether each sub-network is right on each image, (networks, images); `rows`: of these images, see `ImageSet`.

        Raises:
            UserError: not all images fit into memory, and the loader cannot read them in any order.
        """
        if not self.images.orderly:
            raise UserError("hits: the images do not fit into memory, and the loader cannot read them in any order")
        found = self._hits(self._paths(archs), self.images.rows() if rows is None else rows)
        return np.stack([found[arch] for arch in archs])

    def _hits(self, paths: Paths, rows: Rows) -> dict[Architecture, Bools]:
        tree, share, archs = ForwardTree(self.net, paths), share_of(None), list(paths)

        def own() -> tuple[dict[Architecture, npt.NDArray[np.uint8]], Work]:
            mine, work = tree.part(share), Work()
            right: dict[int, list[Tensor]] = {number: [] for number in mine}
            for x, targets in self.images.take(rows) if mine else ():
                self._count(work, tree, mine, len(x))
                for number, logits in tree.run(x, mine):
                    right[number].append(hits(logits, targets)[:, 0])
            if not mine:
                return {}, work
            table = torch.stack([torch.cat(parts) for parts in right.values()]).cpu().numpy()  # the only transfer
            packed = np.packbits(table, axis=1)
            return {archs[number]: row for number, row in zip(right, packed, strict=True)}, work

        found = self._together(own, share)
        return {arch: np.unpackbits(found[arch], count=len(rows)).astype(bool) for arch in archs}

    def forget(self) -> None:
        """Compare with none of the networks raced before: the weights have changed."""
        self._race = None

    def state_dict(self) -> dict[str, Any]:
        """What racing compares with and what was computed, as primitives and tensors."""
        race = None if self._race is None else self._race.state_dict()
        return {"race": race, "seed": self._race_seed, "work": asdict(self.work)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on racing against the best of `state`."""
        self._race = None if state.get("race") is None else Race.from_state(state["race"])
        self._race_seed, self.work = int(state.get("seed", 0)), Work(**state.get("work", {}))
