"""Scoring many networks, exactly: each with its own passes, shared by all proxies, and one batch for all networks.

With a supernet every network starts from slices of the same weights, so that differences between networks are not
differences between draws. Finished networks are streamed to a file, dealt out over processes, and never kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.inherited import build_tables
from lightning_tas.proxies.initialise import DEFAULT, INHERITED, check_method
from lightning_tas.proxies.keep import InMemory, Keeper, OnDisk
from lightning_tas.proxies.nuclear import NormCache
from lightning_tas.proxies.probe import quiet
from lightning_tas.proxies.registry import Proxy, chosen, proxy
from lightning_tas.proxies.scorer import make_probe, score_network
from lightning_tas.proxies.shards import Share, share_of
from lightning_tas.proxies.table import Row, Scores

MODES = ("exact", "inherited")
Options = Mapping[str, Mapping[str, Any]]


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
        seed, images, labels, batch_size, init, build, device: as of `score_one`; one batch serves all networks.
        options: by proxy, e.g. ``{"dss": {"mode": "released"}}``.
        path: CSV file to which every finished network is appended; memory then does not grow with their number.
        resume: continue `path`, which must hold scores of the same networks under the same settings; else begin anew.
        shard: (rank, world), this process's share. By default the ranks of an initialised process group share the
            work, and each must call this; ``(0, 1)`` scores alone in there. Shares write a part of `path` each; the
            next call without `shard` joins them and returns all.
        progress: show a bar.

    Raises:
        UserError: unknown proxy, mode, option or method; an architecture that the supernet cannot hold; a `path` with
            other networks or settings, or which cannot be written.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    wanted = chosen(names)
    parts, given = components(wanted, options or {})
    if init is not None:
        check_method(init, inherited=net is not None)
    share = share_of(shard)
    if mode == "inherited":
        if build:
            raise UserError(f"build: {dict(build)} has no effect beside a network; give either")
        tables = build_tables(parts, net, given, seed, images, labels, batch_size, init, device)
        return tables.scores(archs, wanted)
    scorer = Exact(net, parts, given, seed, images, labels, batch_size, init, device, build)
    keeper: Keeper = InMemory(parts, share)
    if path is not None:
        keeper = OnDisk(Path(path), parts, share, scorer.settings(), resume)
    number = _walk(scorer, keeper, share, _decoded(net, archs), progress, archs)
    if not number:
        raise UserError("archs: there are none to score")
    return keeper.end(wanted, number)


@dataclass
class Exact:
    """Scores one network after the other under one setting; see `score_many`."""

    net: nn.Module | None
    parts: Sequence[Proxy]
    options: Options
    seed: int
    images: Tensor | None
    labels: Tensor | None
    batch_size: int
    init: str | None
    device: torch.device | str | None
    build: Mapping[str, Any] | None
    norms: NormCache = field(default_factory=NormCache)

    def row(self, place: int, arch: Architecture) -> Row:
        """Score `arch`."""
        with quiet():
            probe = make_probe(
                self.net, arch, self.seed, self.images, self.labels, self.batch_size, self.init, self.device, self.build
            )
            probe.norms = self.norms
            scores = score_network(self.parts, probe, self.options)
        price = cost(arch, probe.net)
        return Row(place, arch, price.params, price.macs, scores)

    def settings(self) -> dict[str, Any]:
        """All that scores depend on besides the architecture, as JSON."""
        return {
            "mode": "exact",
            "proxies": [part.name for part in self.parts],
            "options": {name: dict(given) for name, given in sorted(self.options.items())},
            "seed": self.seed,
            "images": self.batch_size if self.images is None else fingerprint({"images": self.images}),
            "labels": None if self.labels is None else fingerprint({"labels": self.labels}),
            "init": self.init or (DEFAULT if self.net is None else INHERITED),
            "build": dict(self.build or {}),
            "weights": None if self.net is None else fingerprint(self.net.state_dict()),
        }


def _walk(
    scorer: Exact, keeper: Keeper, share: Share, archs: Iterator[Architecture], progress: bool, given: object
) -> int:
    """Score what is not known yet of this process's share; the number of all networks."""
    known = keeper.begin()
    number = left = 0
    error: Exception | None = None
    try:
        for arch in _bar(archs, len(given) if isinstance(given, Sized) else None, progress):
            if number in known:
                if known[number] != arch.id:
                    raise UserError(f"path: network {number} in the file is {known[number]}, not {arch.id} as given")
            else:
                # A group shares what is left; a process that does not know of the others can only go by places.
                if share.turn(left if share.talks else number):
                    keeper.append(scorer.row(number, arch))
                left += 1
            number += 1
    except Exception as raised:
        error = raised
    share.agree(error)
    return number


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Ten hex characters of the names and bytes of tensors."""
    digest = hashlib.blake2b(digest_size=5)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _bar(archs: Iterator[Architecture], total: int | None, progress: bool) -> Iterable[Architecture]:
    if not progress:
        return archs
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    bar: Iterable[Architecture] = tqdm(archs, total=total, desc="score", unit="net", leave=False, disable=None)
    return bar


def components(wanted: Sequence[Proxy], options: Options) -> tuple[list[Proxy], dict[str, dict[str, Any]]]:
    """The proxies to run, each once, with their options: those of a rank-combined one go to its components."""
    parts: dict[str, Proxy] = {}
    given: dict[str, dict[str, Any]] = {}
    for one in wanted:
        for part in [proxy(name) for name in one.combines] or [one]:
            parts[part.name] = part
            for source in {one.name, part.name} & set(options):
                part.check_options(options[source])
                if given.setdefault(part.name, dict(options[source])) != dict(options[source]):
                    raise UserError(f"options: {one.name} and {part.name} want other options of {part.name}")
    for name in options:
        if name not in parts and name not in {one.name for one in wanted}:
            raise unknown("options", name, [*parts, *(one.name for one in wanted if one.combines)])
    return list(parts.values()), given


def _decoded(net: Any, archs: Iterable[Architecture] | np.ndarray) -> Iterator[Architecture]:
    if not isinstance(archs, np.ndarray):
        yield from archs
        return
    space = getattr(net, "space", None)
    if space is None:
        raise UserError("archs: codes need a supernet, whose space they belong to; give architectures")
    for row in archs:
        yield space.decode(row)[0]
