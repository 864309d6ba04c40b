"""Searches on small spaces with made-up scores: what every test of a strategy needs, as the fixture `lab`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest

from lightning_tas.additive import Paths, Term, Total
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.limits import Limits
from lightning_tas.limits.region import Scaled
from lightning_tas.proxies.score import Score
from lightning_tas.randomness import derive
from lightning_tas.search.strategy import Strategy, build_strategy
from lightning_tas.spaces import SearchSpace, isotropic, resolve_space

from ..spaces.conftest import s3


def small() -> SearchSpace:
    """A plain ViT space of 2 x (4 + 16 + 64) = 168 networks."""
    return isotropic("small", embed_dim=[16, 32], depth=[1, 2, 3], num_heads=[1, 2], mlp_ratio=[1, 2])


SPACES = {
    "autoformer": lambda: resolve_space("autoformer_tiny"),
    "pit": lambda: resolve_space("pit_ti"),
    "s3": s3,
    "small": small,
    "one": lambda: isotropic("one", embed_dim=[16], depth=[2], num_heads=[1], mlp_ratio=[1]),
}

# Few networks per generation, several generations.
SMALL: dict[str, dict[str, Any]] = {
    "random": {"networks": 30, "batch": 7},
    "evolution": {"population": 8, "generations": 3, "top": 4, "mutations": 4, "crossovers": 3},
    "s3_evolution": {"population": 8, "generations": 3, "top": 4, "mutations": 4, "crossovers": 3},
    "blockwise": {"population": 8, "generations": 3, "top": 6, "mutations": 4, "crossovers": 3, "tries": 8},
    "etas": {"first_pool": 10, "first": 2, "pool": 8, "keep": 2, "iterations": 3},
    "nsga2": {"population": 8, "generations": 3},
    "exhaustive": {"batch": 60},
}


class SumRegion:
    """A region for spaces of any family: "params" is the sum of a network's codes, "macs" is twice that and one."""

    def __init__(self, space: SearchSpace, limits: Mapping[str, Any] | None = None) -> None:
        self.space, self.limits = space, Limits.read(limits)

    def quantities(self, codes: np.ndarray) -> dict[str, np.ndarray]:
        params = np.where(codes < 0, 0, codes + 1).sum(axis=1)
        return {"params": params, "macs": 2 * params + 1}

    def allowed(self, codes: np.ndarray) -> np.ndarray:
        return self.limits.within(self.quantities(codes)) if len(codes) else np.zeros(0, dtype=bool)

    exact = True

    @cached_property
    def sums(self) -> dict[str, Scaled]:
        tables = [np.arange(len(c.choices)) + 1.0 for c in self.space.columns]
        tables = [np.pad(t, (0, c.block is not None)) for t, c in zip(tables, self.space.columns, strict=True)]
        return {"params": Scaled(Total(tuple(Term((i,), table) for i, table in enumerate(tables))))}

    @cached_property
    def paths(self) -> Paths:
        bounds = self.limits.bounds
        return Paths.within(self.space, {name: self.sums[name].total for name in bounds}, bounds)

    @cached_property
    def _members(self) -> np.ndarray:
        codes = self.space.encode(self.space.enumerate())
        return codes[self.allowed(codes)]

    def size(self) -> int | None:
        return len(self._members) if self.space.size() < 5000 else None

    def check(self) -> None:
        if self.size() == 0:
            raise UserError(f"limits: nothing is within {self.limits.to_dict()}")

    def sample(self, seed: int, n: int, seen: Collection[bytes] = ()) -> np.ndarray:
        if self.space.size() < 5000:
            codes = self._members
            codes = codes[np.random.default_rng(derive(seed, "order")).permutation(len(codes))]
        else:
            codes = np.unique(self.space.sample_codes(derive(seed, "region"), 20 * n), axis=0)
            codes = codes[self.allowed(codes)]
        rows = [row for row in codes if row.tobytes() not in seen][:n]
        return np.array(rows, dtype=np.int16).reshape(len(rows), codes.shape[1])


@cache
def _region(space: SearchSpace, limits: str) -> SumRegion:
    return SumRegion(space, json.loads(limits))


class Lab:
    """Spaces, regions, scores and runs."""

    settings = SMALL

    @staticmethod
    @cache
    def spaces(name: str) -> SearchSpace:
        return SPACES[name]()

    @staticmethod
    def region(space: SearchSpace, limits: Mapping[str, Any] | None = None) -> SumRegion:
        return _region(space, json.dumps(limits))

    @staticmethod
    def score(arch: Architecture, name: str, flaws: bool = True) -> Score:
        """A made-up score: larger networks are better, with noise; some are invalid, some accuracies were dropped."""
        rng = np.random.default_rng(derive(int(arch.id, 16), name))
        diversity, saliency = rng.uniform(0.5, 1.5, size=(2, arch.depth)) * [
            [sum(float(v) for _, v in block.items()) + i + 1 for i, block in enumerate(arch.blocks)]
        ]
        luck, total = rng.random(), float(diversity.sum() + saliency.sum())
        if flaws and luck < 0.06:
            return Score.invalid("made up")
        extras = {"diversity": float(diversity.sum()), "saliency": float(saliency.sum())}
        if name == "accuracy":
            extras = {"images": 100.0, **({"dropped": 1.0} if flaws and luck > 0.9 else {})}
            total += 1000.0 * (flaws and luck > 0.9)  # a rough figure that would win
        blocks = {"diversity": tuple(diversity.tolist()), "saliency": tuple(saliency.tolist())}
        return Score(total, tuple((diversity + saliency).tolist()), extras=extras, blocks=blocks)

    @classmethod
    def scorer(cls, archs: Sequence[Architecture], needs: Sequence[str]) -> list[dict[str, Score]]:
        return [{name: cls.score(arch, name) for name in needs} for arch in archs]

    @classmethod
    def build(cls, name: str, region: Any, objective: str = "accuracy", seed: int = 0, **settings: Any) -> Strategy:
        return build_strategy(name, region, objective, seed, **{**SMALL[name], **settings})

    @classmethod
    def step(cls, strategy: Strategy, asked: int | None = None, told: int | None = None) -> list[Architecture]:
        """Ask for some and tell them in pieces of `told`; what was asked."""
        archs = strategy.ask(asked)
        results = cls.scorer(archs, strategy.needs)
        size = told or max(len(results), 1)
        for start in range(0, len(results), size):
            strategy.tell(results[start : start + size])
        return archs

    @classmethod
    def trace(cls, strategy: Strategy, asked: int | None = None, told: int | None = None) -> list[Architecture]:
        """Run to the end; all networks in the order in which they were asked."""
        found: list[Architecture] = []
        while not strategy.done:
            found += cls.step(strategy, asked, told)
        return found

    @staticmethod
    def saved(strategy: Strategy) -> Any:
        """The state after a way through JSON that knows no infinities."""
        return json.loads(json.dumps(strategy.state_dict(), allow_nan=False))


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    """See `Lab`."""
    return Lab
