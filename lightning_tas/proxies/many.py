"""Scoring many networks: each on its own, with every pass shared by all proxies (`mode="exact"`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.initialise import check_method
from lightning_tas.proxies.probe import quiet
from lightning_tas.proxies.registry import Proxy, chosen, proxy
from lightning_tas.proxies.scorer import make_probe, score_network
from lightning_tas.proxies.table import Gatherer, Row, Scores

MODES = ("exact", "inherited")


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
    options: Mapping[str, Mapping[str, Any]] | None = None,
    build: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    path: Path | str | None = None,
    resume: bool = True,
    progress: bool = False,
) -> Scores:
    """Score many networks by the proxies `names` ("all", one, or several).

    Args:
        net: a supernet, whose sub-networks are scored; None for fresh networks, of several families if need be.
        archs: architectures (also a generator), or codes (N, columns) of ``net.space``.
        seed, images, labels, batch_size, init, build, device: as of `score_one`; one batch serves all networks.
        options: by proxy, e.g. ``{"dss": {"mode": "released"}}``.

    Raises:
        UserError: unknown proxy, mode, option or method; an architecture that the supernet cannot hold.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    wanted = chosen(names)
    parts, given = components(wanted, options or {})
    if init is not None:
        check_method(init, inherited=net is not None)
    kept: list[Architecture] = []
    gathered = Gatherer(parts)
    for index, arch in zip(count(), _decoded(net, archs), strict=False):
        with quiet():
            probe = make_probe(net, arch, seed, images, labels, batch_size, init, device, build)
            scores = score_network(parts, probe, given)
        price = cost(arch, probe.net)
        gathered.append(Row(index, arch, price.params, price.macs, scores))
        kept.append(arch)
    if not kept:
        raise UserError("archs: there are none to score")
    return gathered.scores(wanted, lambda: list(kept))


def components(
    wanted: Sequence[Proxy], options: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Proxy], dict[str, dict[str, Any]]]:
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
    decode: Callable[[np.ndarray], list[Architecture]] = net.space.decode
    for row in archs:
        yield decode(row)[0]
