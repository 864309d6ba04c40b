"""Scoring many networks: each by its own passes, or all from tables of one shared gradient (`inherited`).

One batch serves all networks, and with a supernet every network starts from slices of the same weights, so that
differences between networks are not differences between draws. Finished networks go to a file or to memory (`keep`),
dealt out over processes (`shards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.progress import Progress
from lightning_tas.proxies.inherited import InheritedTables
from lightning_tas.proxies.keep import InMemory, Keeper, OnDisk
from lightning_tas.proxies.nuclear import NormCache
from lightning_tas.proxies.probe import quiet
from lightning_tas.proxies.registry import Proxy
from lightning_tas.proxies.scorer import Options, check_arch, score_network
from lightning_tas.proxies.setting import Setting, prepare
from lightning_tas.proxies.shards import Share, share_of
from lightning_tas.proxies.table import Row, Scores


def score_many(
    names: str | Sequence[str],
    net: nn.Module | None,
    archs: Iterable[Architecture] | np.ndarray,
    *,
    mode: str = "exact",
    seed: int = 0,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    batch_size: int = 16,
    init: str | None = None,
    options: Options | None = None,
    build: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    path: Path | str | None = None,
    resume: bool = True,
    shard: tuple[int, int] | None = None,
    progress: bool = False,
) -> Scores:
    """Score many networks by the proxies `names` ("all", one, or several).

    Args:
        net: a supernet, whose sub-networks are scored; None for fresh networks, of several families if need be.
        archs: architectures (also a generator, read once), or codes (N, columns) of ``net.space``.
        mode: "exact", or "inherited": all networks share the gradient of the widest one, see `inherited`; for params,
            macs, snip, plain, grad_norm, synflow, dss, snip_norm and what is combined from them.
        seed, images, labels, batch_size, init, build, device: as of `score_one`; one batch serves all networks.
        options: by proxy, e.g. ``{"dss": {"mode": "released"}}``; those of a rank-combined one go to its components.
        path: CSV file to which every finished network is appended; memory then does not grow with their number.
        resume: continue `path`, which must hold scores of the same networks under the same settings; else begin anew.
        shard: (rank, world), this process's share. By default the ranks of an initialised process group share the
            work, and each must call this; ``(0, 1)`` scores alone in there. Shares write a part of `path` each; the
            next call without `shard` joins them and returns all.
        progress: show a bar.

    Raises:
        UserError: unknown proxy, mode, option or method; a proxy that is asked for by itself with other options than
            one combined of it wants, or that needs more images; an architecture that the supernet cannot hold; a `path`
            with other networks or settings, or which cannot be written.
    """
    wanted, parts, given, setting = prepare(
        names, net, mode, seed, images, labels, batch_size, init, options, build, device
    )
    if isinstance(archs, Sized) and not len(archs):
        raise _nothing()
    if shard is not None:
        _check_shard(shard)
    total = len(archs) if isinstance(archs, Sized) else None
    archs = _checked(archs)
    scorer: Exact | Inherited
    if mode == "inherited":
        tables = setting.tables(parts, given)
        if path is None and shard is None:
            found = tables.scores(archs, wanted)  # cheaper than talking about it
            if not len(found):
                raise _nothing()
            return found
        scorer = Inherited(tables, parts)
    else:
        scorer = Exact(setting, parts, given)
    share = share_of(shard)
    keeper: Keeper = InMemory(parts, share)
    if path is not None:
        keeper = OnDisk(Path(path), parts, share, setting.facts(mode, parts, given), resume)
    try:
        number = walk(scorer, keeper, share, _bar(_decoded(setting.net, archs), total, progress))
        if not number:
            raise _nothing()
        return keeper.end(wanted, number)
    finally:
        keeper.close()  # a file is locked until then, also against other processes


@dataclass
class Exact:
    """Scores networks by their own passes: one after the other, or, where all proxies are light, side by side.

    A pass of one image keeps no two cores busy, but two networks do: on CPUs each thread then takes a network.
    """

    setting: Setting
    parts: Sequence[Proxy]
    options: Options
    norms: NormCache = field(default_factory=NormCache)
    memo: dict[object, Any] = field(default_factory=dict)
    threads: int = 1

    def __post_init__(self) -> None:
        if self.setting.on_cpu and all(part.light for part in self.parts):
            self.threads = torch.get_num_threads()

    @property
    def together(self) -> int:
        """How many networks to hand over at a time."""
        return 1 if self.threads == 1 else 4 * self.threads

    def rows(self, batch: Sequence[tuple[int, Architecture]]) -> Iterator[Row]:
        """Rows of the networks at these places."""
        # Never quiet while the caller has the word: what it is in is its own.
        if self.threads > 1:
            yield from self._side_by_side(batch)
            return
        for one in batch:
            with quiet():
                row = self._row(one)
            yield row

    def _side_by_side(self, batch: Sequence[tuple[int, Architecture]]) -> list[Row]:
        try:
            # The number of threads is each thread's own; also of the last network, which would else differ.
            pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
            with quiet(), pool:
                return list(pool.map(self._row, batch))
        finally:
            torch.set_num_threads(self.threads)

    def _row(self, one: tuple[int, Architecture]) -> Row:
        place, arch = one
        probe = self.setting.probe(arch)
        probe.norms, probe.memo = self.norms, self.memo
        scores = score_network(self.parts, probe, self.options)
        probe.release()
        return Row(place, arch, *cost(arch, probe.net), scores)


@dataclass
class Inherited:
    """Looks networks up in tables, many at once."""

    found: InheritedTables
    parts: Sequence[Proxy]
    together: ClassVar[int] = 1024

    def rows(self, batch: Sequence[tuple[int, Architecture]]) -> Iterator[Row]:
        """Rows of the networks at these places."""
        scores = self.found.scores([arch for _, arch in batch], self.parts)
        for i, (place, arch) in enumerate(batch):
            own = {part.name: scores.score(part.name, i) for part in self.parts}
            yield Row(place, arch, int(scores.params[i]), int(scores.macs[i]), own)


def walk(scorer: Exact | Inherited, keeper: Keeper, share: Share, archs: Iterable[Architecture]) -> int:
    """Score what is not known yet of this process's share; the number of all networks."""
    known = keeper.begin()
    number = left = 0
    waiting: list[tuple[int, Architecture]] = []
    error: Exception | None = None

    def flush() -> None:
        for row in scorer.rows(waiting):
            keeper.append(row)
        waiting.clear()

    try:
        for arch in archs:
            if number in known:
                if known[number] != arch.id:
                    raise UserError(f"path: network {number} in the file is {known[number]}, not {arch.id} as given")
            else:
                # A group shares what is left; a process that does not know of the others can only go by places.
                if share.turn(left if share.talks else number):
                    waiting.append((number, arch))
                left += 1
            number += 1
            if len(waiting) >= scorer.together:
                flush()
        if waiting:
            flush()
    except Exception as raised:
        error = raised
    share.agree(error)
    return number


def _bar(archs: Iterable[Architecture], total: int | None, progress: bool) -> Iterable[Architecture]:
    return _told(archs, total) if progress else archs


def _told(archs: Iterable[Architecture], total: int | None) -> Iterator[Architecture]:
    """The networks, with progress shown as each is done."""
    progress, of = Progress("score", "net", total), f" of {total}" if total is not None else ""
    try:
        for number, arch in enumerate(archs, 1):
            yield arch
            progress.advance(1, partial("score: {}{} networks after {}".format, number, of))
    finally:
        progress.close()


def _nothing() -> UserError:
    return UserError("archs: there are none to score")


def _check_shard(shard: Any) -> None:
    pair = isinstance(shard, Sequence) and len(shard) == 2
    if not pair or not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in shard):
        raise UserError(f"shard: {shard!r} is not valid; expected (rank, world), two whole numbers")


def _checked(archs: Any) -> Iterable[Architecture] | np.ndarray:
    """`archs`, of which each that is no architecture is refused when its turn comes."""
    if isinstance(archs, np.ndarray):
        return archs
    if not isinstance(archs, Iterable) or isinstance(archs, (Architecture, str, Mapping)):
        raise UserError(f"archs: {archs!r} is not valid; valid: a list of architectures, or codes (N, columns)")

    def each() -> Iterator[Architecture]:
        for place, arch in enumerate(archs):
            check_arch(f"archs: network {place}", arch)
            yield arch

    return each()


def _decoded(net: Any, archs: Iterable[Architecture] | np.ndarray) -> Iterator[Architecture]:
    if not isinstance(archs, np.ndarray):
        yield from archs
        return
    space = getattr(net, "space", None)
    if space is None:
        raise UserError("archs: codes need a supernet, whose space they belong to; give architectures")
    for row in archs:
        yield space.decode(row)[0]
