"""Scoring that comes back: what does not change from one list of networks to the next is prepared once.

A search scores a few dozen networks at a time, hundreds of times over: tables of inherited weights, norms of weights
and the batch are kept between the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.keep import InMemory
from lightning_tas.proxies.many import Exact, walk
from lightning_tas.proxies.setting import prepare
from lightning_tas.proxies.shards import share_of
from lightning_tas.proxies.table import Scores


class Session:
    """`score_many` for one set of proxies, again and again; arguments and errors as there.

    ``session.score(archs)`` equals ``score_many(names, net, archs, ...)``, while the weights of `net` stay.
    The ranks of a process group share the networks, and each must call it.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        net: nn.Module | None,
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
    ) -> None:
        self.wanted, self._parts, given, setting = prepare(
            names, net, mode, seed, images, labels, batch_size, init, options, build, device
        )
        self._tables = setting.tables(self._parts, given) if mode == "inherited" else None
        self._exact = Exact(setting, self._parts, given) if mode == "exact" else None

    def score(self, archs: Sequence[Architecture]) -> Scores:
        """Scores of `archs`, with sums by block where the proxy has some."""
        if not archs:
            raise UserError("archs: there are none to score")
        if self._tables is not None:
            return self._tables.scores(archs, self.wanted, by_block=True)
        assert self._exact is not None
        share = share_of(None)
        keeper = InMemory(self._parts, share)
        return keeper.end(self.wanted, walk(self._exact, keeper, share, archs))
