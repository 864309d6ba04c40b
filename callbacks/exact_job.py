"""The exact search as a job: no strategy asks, for the whole space is solved at once (`search.exact`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_tas.additive import Total
from lightning_tas.callbacks import search_record as record
from lightning_tas.callbacks.latency_limit import SPARE, LatencyLimit, keep_limit
from lightning_tas.callbacks.search_record import Found
from lightning_tas.costs import CostOptions, cost_options
from lightning_tas.limits import Region
from lightning_tas.proxies.inherited import build_tables
from lightning_tas.proxies.options import components
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.shards import share_of
from lightning_tas.search.exact import COSTS, additive_proxy, search_tables
from lightning_tas.search.exact import Found as Network
from lightning_tas.search.history import Entry

FRONT_MOST = 2000
"""So many networks of a front are written, evenly along it."""


@dataclass
class ExactJob:
    """The best networks of a supernet's space within limits by an additive proxy, and, without limits that hinder it,
    the Pareto front of score, params and MACs.

    region: space and limits. score: the proxy. batch: images and labels of the gradient pass, None for Gaussian ones.
    front: whether to find the front, too; the record says how many networks it has (`front_size`), whether it is
    complete, by how much of score it lacks at most what is not on it (`front_lacks`; null: not known), and why there is
    none (`front_left_out`). Everything else is as of `SearchJob`. Rank 0 solves, all get the result.
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
    latency: LatencyLimit | None = None

    def run(self) -> Found:
        """Solve, and write the results. Collective."""
        found = keep_limit(share_of(None).first(self._solve), self.top, self.latency)
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
        most = self.top if self.latency is None else self.top + SPARE
        best = search_tables(self.region.space, total, options, self.region, most)
        networks, facts = self._front(total, options)
        proof = f"the optimum of all {best.size:,} networks of the space, within the limits"
        if not best.optimal:
            proof = f"not proven to be {proof}: none scores above {best.bound:.6g}"
        return Found(
            [self._entry(i, one) for i, one in enumerate(best)],
            [],
            0,  # no network is run: all are sums over the tables of one gradient pass
            proof,
            [self._entry(i, one) for i, one in enumerate(networks)],
            {"labels": best.labels, **facts},
        )

    def _front(self, total: Total, options: CostOptions) -> tuple[Sequence[Network], dict[str, Any]]:
        """The front, thinned where it is long, and what the record says of it; null where there is none."""
        facts: dict[str, Any] = dict.fromkeys(("front_size", "front_complete", "front_lacks", "front_left_out"))
        others = sorted(set(self.region.limits.bounds) - set(COSTS))
        if not self.front:
            return (), {**facts, "front_left_out": "search.options has front: false"}
        if others:
            what = f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'}"
            reason = f"it is of score, params and MACs, and {what} limited too"
            rank_zero_warn(f"search: the Pareto front is left out: {reason}")
            return (), {**facts, "front_left_out": reason}
        whole = search_tables(self.region.space, total, options, self.region, front=True)
        facts["front_size"], facts["front_complete"] = len(whole), whole.optimal
        facts["front_lacks"] = whole.bound if math.isfinite(whole.bound) else None
        if len(whole) > FRONT_MOST:
            rank_zero_warn(f"search: {FRONT_MOST:,} of the {len(whole):,} networks of the Pareto front are kept")
        return spread(whole.networks, FRONT_MOST), facts

    def _entry(self, index: int, one: Network) -> Entry:
        scores = {self.score: Score(one.score)}
        amounts = self.region.quantities(self.region.space.encode([one.arch]))
        quantities = {name: float(amount[0]) for name, amount in amounts.items()}
        return Entry(one.arch, one.score, scores, one.params, one.macs, 0, index, quantities)


def spread(front: Sequence[Network], most: int) -> Sequence[Network]:
    """At most so many (3 or more) networks of a front, evenly along it: both ends and the best among them."""
    if len(front) <= most:
        return front
    best = max(range(len(front)), key=lambda i: front[i].score)
    last, steps = len(front) - 1, most - 2
    return [front[i] for i in sorted({best, *(round(i * last / steps) for i in range(steps + 1))})]
