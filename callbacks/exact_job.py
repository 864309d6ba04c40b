"""The exact search as a job: no strategy asks, for the whole space is solved at once (`search.exact`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tas.callbacks import search_record as record
from lightning_tas.callbacks.search_record import Found
from lightning_tas.costs import cost_options
from lightning_tas.limits import Region
from lightning_tas.proxies.inherited import build_tables
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.setting import components
from lightning_tas.proxies.shards import share_of
from lightning_tas.search.exact import COSTS, additive_proxy, search_tables
from lightning_tas.search.history import Entry

FRONT_MOST = 2000
"""So many networks of a front are written; all of them lie on it."""


@dataclass
class ExactJob:
    """The best networks of a supernet's space within limits by an additive proxy, and, without limits that hinder it,
    the Pareto front of score, params and MACs.

    region: space and limits. score: the proxy. batch: images and labels of the gradient pass, None for Gaussian ones.
    front: whether to find the front, too. Everything else is as of `SearchJob`. Rank 0 solves, all get the result.
    """

    region: Region
    net: Any
    score: str
    proxy_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch: tuple[Tensor | None, Tensor | None] = (None, None)
    batch_size: int = 16
    init: str | None = None
    device: torch.device | str | None = None
    front: bool = True
    top: int = 1
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Found:
        """Solve, and write the results. Collective."""
        found = share_of(None).first(self._solve)
        if self.folder is not None:
            into = self.folder
            share_of(None).first(lambda: record.write(into, None, found, self.settings, self.score))
        return found

    def _solve(self) -> Found:
        one = additive_proxy(self.score)
        parts, given = components([one], {one.name: dict(self.proxy_options)} if self.proxy_options else {})
        images, labels = self.batch
        tables = build_tables(
            parts, self.net, given, self.seed, images, labels, self.batch_size, self.init, self.device
        )
        total, options = tables.total(one.name), cost_options(self.net)
        best = search_tables(self.region.space, total, options, self.region, self.top)
        front: Sequence[Any] = ()
        if self.front and set(self.region.limits.bounds) <= set(COSTS):
            front = search_tables(self.region.space, total, options, self.region, front=True).networks
        proof = "the optimum" if best.optimal else f"no network scores above {best.bound:.6g}:"
        return Found(
            [self._entry(i, one) for i, one in enumerate(best)],
            [],
            best.labels,
            f"{proof} of all {best.size:,} networks of the space, within the limits",
            [self._entry(i, one) for i, one in enumerate(front)][:FRONT_MOST],
        )

    def _entry(self, index: int, one: Any) -> Entry:
        scores = {self.score: Score(one.score)}
        return Entry(one.arch, one.score, scores, one.params, one.macs, 0, index)
