"""Accuracy of many sub-networks of one supernet on one set of images: what a search asks for hundreds of times.

The images are decoded once and stay on the device where they fit. In every batch each common beginning of several
sub-networks is computed once: their forward passes are sorted into a tree of steps (`ElasticNetwork.steps`), which is
walked depth first, so that no more than one activation per level is held. The ranks of a process group share the
sub-networks, each over the whole set, and all get all results; without racing these are the numbers of
`evaluator.evaluate`. With racing (`racing`), sub-networks that cannot be among the best any more are given up early.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.evaluator import PADDING, Accuracy, Meter, autocast, compute_here, measuring
from lightning_tas.proxies.shards import Share, share_of
from lightning_tas.racing import Race, Raced
from lightning_tas.randomness import numpy_generator

CHUNK = 16
"""Sub-networks that race together, whatever the number of processes; the best so far change after each chunk."""
_SHARE = {"cuda": 0.5, "cpu": 0.25}
"""How much of the free memory the images may take."""


@dataclass
class Work:
    """What was computed: images times sub-networks, and blocks (per batch) with and without shared beginnings."""

    images: int = 0
    blocks: int = 0
    blocks_alone: int = 0


class Population:
    """Measures sub-networks of the supernet `net` on the images of `loader`.

    Args:
        net: a supernet; it is copied nowhere and left as it was.
        loader: batches of images (B, C, H, W) and targets (B,), the whole set on every rank; read once if it fits.
        device: where to measure; None: where the network lies. amp_dtype: of autocast; None: none.
        max_images: only so many of them, drawn with `seed`.
        keep_bytes: what the decoded images may take; None: a share of the free memory of the device.

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
        self.net, self._loader, self._amp = net, loader, amp_dtype
        self._place = None if device is None else torch.device(device)
        self.device = self._place or next(net.parameters()).device
        self._max_images, self._seed = max_images, seed
        self._room = free_bytes(self.device) if keep_bytes is None else keep_bytes
        self._kept: _Images | None = None
        self._too_large = False
        self._race: Race | None = None
        self._order: np.ndarray | None = None
        self.work = Work()

    # --- images -----------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> bool:
        """Whether the images are decoded and kept (after the first measurement)."""
        return self._images() is not None

    def _images(self) -> _Images | None:
        if self._kept is None and not self._too_large:
            self._kept = self._decode()
            self._too_large = self._kept is None
        return self._kept

    def _decode(self) -> _Images | None:
        """All images on the device, or None where they would take more than the room there is."""
        images: list[Tensor] = []
        targets: list[Tensor] = []
        taken = 0
        for x, y in self._loader:
            taken += x.numel() * x.element_size()
            if taken > self._room:
                if self._max_images is not None:
                    raise UserError(
                        f"eval_images: {self._max_images} are drawn from all images, of which {self._room:,} bytes of "
                        "free memory do not hold the whole; leave it out"
                    )
                return None
            images.append(x.to(self.device, non_blocking=True))
            targets.append(y.to(self.device, non_blocking=True))
        if not images:
            raise UserError("nothing to evaluate: the loader gave no images (is the data set or its split empty?)")
        sizes = tuple(len(x) for x in images)
        found = _Images(torch.cat(images), torch.cat(targets), sizes)
        if self._max_images is not None:
            valid = torch.nonzero(found.targets != PADDING).flatten()
            order = numpy_generator(self._seed, "population.subset").permutation(len(valid))[: self._max_images]
            rows = valid[torch.from_numpy(np.sort(order)).to(valid.device)]
            count = len(rows)
            steps = tuple(min(sizes[0], count - start) for start in range(0, count, sizes[0]))
            found = _Images(found.images[rows], found.targets[rows], steps)
        return found

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        kept = self._images()
        if kept is not None:
            yield from kept.batches()
            return
        for images, targets in self._loader:
            yield images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    # --- all images -------------------------------------------------------------------------------------------------

    def accuracies(self, archs: Sequence[Architecture]) -> list[Accuracy]:
        """Accuracy of every sub-network on all images, in the order given. Collective."""
        distinct = list(dict.fromkeys(archs))
        if not distinct:
            raise UserError("nothing to evaluate: no architectures were given")
        share, tree = share_of(None), _Tree(self.net, distinct)
        mine = _part(tree.order, share)
        own = tree.only(mine)
        meters = {place: Meter() for place in mine}
        with torch.no_grad(), measuring(self.net, self._place), autocast(self.device, self._amp):
            for images, targets in self._batches() if mine else ():
                for place, logits in self._logits(own, images):
                    meters[place].update(logits, targets)
        figures = dict(zip(mine, compute_here(list(meters.values())), strict=True)) if mine else {}
        found = {place: accuracy for part in share.gather(figures) for place, accuracy in part.items()}
        by_arch = {arch: found[place] for place, arch in enumerate(distinct)}
        return [by_arch[arch] for arch in archs]

    def _logits(self, tree: _Tree, images: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(place, logits) of every sub-network of a tree on one batch."""
        self.work.images += len(images) * tree.size
        self.work.blocks += tree.steps
        self.work.blocks_alone += tree.steps_alone
        yield from tree.run(images)

    # --- racing -----------------------------------------------------------------------------------------------------

    def race(self, archs: Sequence[Architecture], top: int = 10, error: float = 0.05, seed: int = 0) -> list[Raced]:
        """Race sub-networks against the `top` best of all that were raced before. Collective; see `racing`.

        error: the probability that racing changes which are the `top` best. seed: of the order of the images. Images
        that do not fit into memory cannot be read in a random order: then every sub-network sees all of them.
        """
        kept = self._images()
        if kept is None:
            return [Raced(found.top1, found.samples, False) for found in self.accuracies(archs)]
        race, order = self._racing(kept, top, error, seed)
        found: dict[Architecture, Raced] = {}
        distinct = list(dict.fromkeys(archs))
        with torch.no_grad(), measuring(self.net, self._place), autocast(self.device, self._amp):
            for start in range(0, len(distinct), CHUNK):
                found |= self._race_chunk(race, order, kept, distinct[start : start + CHUNK])
        return [found[arch] for arch in archs]

    def _racing(self, kept: _Images, top: int, error: float, seed: int) -> tuple[Race, np.ndarray]:
        if self._order is None:
            valid = np.flatnonzero((kept.targets != PADDING).cpu().numpy())
            self._order = valid[numpy_generator(seed, "population.race").permutation(len(valid))]
        if self._race is None or (self._race.top, self._race.error) != (top, error):
            self._race = Race(len(self._order), top, error)
        if self._race.images != len(self._order):
            raise UserError(f"resume: racing saw {self._race.images} images before, now there are {len(self._order)}")
        return self._race, self._order

    def _race_chunk(
        self, race: Race, order: np.ndarray, kept: _Images, archs: Sequence[Architecture]
    ) -> dict[Architecture, Raced]:
        share = share_of(None)
        alive = list(archs)
        found: dict[Architecture, Raced] = {}
        hits = {arch: np.zeros(0, dtype=bool) for arch in alive}
        seen = 0
        for length in race.looks if race.full else (race.images,):
            new = self._hits(alive, kept, order[seen:length], share)
            hits = {arch: np.concatenate([hits[arch], more]) for arch, more in zip(alive, new, strict=True)}
            seen = length
            hopeless = race.hopeless(np.stack([hits[arch] for arch in alive]))
            for arch, gone in zip(list(alive), hopeless.tolist(), strict=True):
                if gone:
                    found[arch] = Raced(race.estimate(hits[arch]), length, True)
                    alive.remove(arch)
            if not alive:
                break
        for arch in alive:
            race.enter(arch.id, hits[arch])
            found[arch] = Raced(float(100 * hits[arch].mean()), race.images, False)
        return found

    def _hits(
        self, archs: Sequence[Architecture], kept: _Images, rows: np.ndarray, share: Share
    ) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
        """Whether each sub-network is right on each of the images `rows`, (len(rows),) each."""
        tree = _Tree(self.net, archs)
        mine = _part(tree.order, share)
        own = tree.only(mine)
        right: dict[int, list[Tensor]] = {place: [] for place in mine}
        at = torch.from_numpy(rows).to(self.device)
        for start in range(0, len(rows) if mine else 0, kept.sizes[0]):
            batch = at[start : start + kept.sizes[0]]
            targets = kept.targets[batch]
            for place, logits in self._logits(own, kept.images[batch]):
                logits = logits.float()
                right[place].append((logits.argmax(dim=-1) == targets) & logits.isfinite().all(dim=-1))
        packed: dict[int, Any] = {}
        if mine:  # one transfer from the device
            table = torch.stack([torch.cat(parts) for parts in right.values()]).cpu().numpy()
            packed = {place: np.packbits(row) for place, row in zip(right, table, strict=True)}
        found = {place: bits for part in share.gather(packed) for place, bits in part.items()}
        return [np.unpackbits(found[place], count=len(rows)).astype(bool) for place in range(len(archs))]

    def state_dict(self) -> dict[str, Any]:
        """What racing compares with, as primitives and tensors."""
        return {} if self._race is None else self._race.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on racing against the best of `state`."""
        self._race = Race.from_state(state) if state else None


@dataclass(frozen=True)
class _Images:
    """Decoded images (n, C, H, W), targets (n,), and the sizes of the loader's batches."""

    images: Tensor
    targets: Tensor
    sizes: tuple[int, ...]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for size in self.sizes:
            yield self.images[start : start + size], self.targets[start : start + size]
            start += size


class _Tree:
    """Forward passes of several sub-networks with their common beginnings shared."""

    def __init__(self, net: Any, archs: Sequence[Architecture], places: Sequence[int] | None = None) -> None:
        self._net, self._archs = net, archs
        self._places = list(range(len(archs))) if places is None else list(places)
        shared = hasattr(net, "steps")
        self._steps = {place: net.steps(archs[place]) if shared else [] for place in self._places}
        self._shared = shared
        paths: dict[tuple[Hashable, ...], None] = {}
        for steps in self._steps.values():
            keys = tuple(step.key for step in steps)
            paths |= dict.fromkeys(keys[:end] for end in range(1, len(keys) + 1))
        self.size, self.steps = len(self._places), len(paths)
        self.steps_alone = sum(len(steps) for steps in self._steps.values())

    @property
    def order(self) -> list[int]:
        """Places in the order of the walk, so that neighbours share most."""
        keys = {place: tuple(repr(step.key) for step in steps) for place, steps in self._steps.items()}
        return sorted(self._places, key=lambda place: (keys[place], place))

    def only(self, places: Sequence[int]) -> _Tree:
        """The tree of some of the sub-networks."""
        return _Tree(self._net, self._archs, places)

    def run(self, images: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(place, logits (B, classes)) of every sub-network."""
        if not self._shared:
            for place in self._places:
                yield place, self._net(images, self._archs[place])
            return
        yield from self._walk(images, self._places, 0)

    def _walk(self, x: Tensor, places: Sequence[int], level: int) -> Iterator[tuple[int, Tensor]]:
        groups: dict[Hashable, list[int]] = {}
        for place in places:
            steps = self._steps[place]
            if len(steps) == level:
                yield place, self._net.forward_head(self._net.finish(x))
            else:
                groups.setdefault(steps[level].key, []).append(place)
        for group in groups.values():
            yield from self._walk(self._steps[group[0]][level].run(x), group, level + 1)


def _part(order: Sequence[int], share: Share) -> list[int]:
    """This rank's contiguous part."""
    bounds = [len(order) * rank // share.world for rank in range(share.world + 1)]
    return list(order[bounds[share.rank] : bounds[share.rank + 1]])


def free_bytes(device: torch.device) -> int:
    """How many bytes of images may be kept on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_SHARE["cuda"] * free)
    try:
        return int(_SHARE["cpu"] * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # a system that does not say
        return 1 << 30
