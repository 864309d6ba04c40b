"""The comparison set of a search: all networks sampled so far, ranked anew with each one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.proxies.registry import FloatArray, chosen, proxy
from lightning_tas.proxies.score import INVALID, Score


class Archive:
    """Networks scored so far under a rank-combined proxy, e.g. ``Archive("dss_pp")``.

    `add` takes the scores of the proxy's components (`components`) and `values` are the same numbers as the whole set
    gives when it is ranked at once: one update costs O(n log n) for n networks. Invalid networks stay out of the ranks.
    """

    def __init__(self, name: str) -> None:
        self.proxy = proxy(name)
        if self.proxy.combine is None:
            ranked = [one.name for one in chosen("all") if one.combine is not None]
            raise UserError(f"archive: {name!r} does not rank networks; those that do: {', '.join(ranked)}")
        self._raw: dict[str, list[float]] = {}
        self._valid: list[bool] = []
        self._values: FloatArray | None = None

    @property
    def components(self) -> tuple[str, ...]:
        """The proxies whose scores `add` needs."""
        return self.proxy.combines

    def __len__(self) -> int:
        return len(self._valid)

    def add(self, scores: Mapping[str, Score]) -> int:
        """Add a network by the scores of its components; returns its index in `values`."""
        missing = [part for part in self.components if part not in scores]
        if missing:
            raise UserError(f"archive: {self.proxy.name} ranks scores of {', '.join(missing)}, which are not given")
        valid = all(scores[part].valid for part in self.components)
        self._valid.append(valid)
        if valid:
            for part in self.components:
                for key, number in {"value": scores[part].value, **scores[part].extras}.items():
                    self._raw.setdefault(f"{part}.{key}", []).append(number)
        self._values = None
        return len(self._valid) - 1

    @property
    def values(self) -> FloatArray:
        """The proxy's value of every network, in the order of adding; `INVALID` for invalid ones."""
        if self._values is None:
            self._values = np.full(len(self._valid), INVALID)
            if any(self._valid):
                assert self.proxy.combine is not None
                raw = {key: np.asarray(numbers, dtype=np.float64) for key, numbers in self._raw.items()}
                self._values[np.asarray(self._valid)] = self.proxy.combine(raw)
        return self._values.copy()
