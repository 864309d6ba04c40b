"""Random small spaces with random tables, and brute force over all of their networks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lightning_tas.additive import Problem, Term, Total
from lightning_tas.spaces import Dimension, Predicate, SearchSpace


def random_space(seed: int) -> SearchSpace:
    """At most some thousand networks: one to three stages, choices that differ by stage, columns of every scope, rules.

    Some have no block choices, one depth, or a single member.
    """
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 4))
    most = {1: 4, 2: 2, 3: 2}[stages]

    def per_stage(pool: list[int], least: int, greatest: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sorted(rng.choice(pool, size=int(rng.integers(least, greatest + 1)), replace=False).tolist()))
            for _ in range(stages)
        )

    width = int(rng.integers(1, 3))
    dimensions = [
        Dimension("base", "network", tuple(sorted(rng.choice([1, 2, 3, 4], size=width, replace=False).tolist()))),
        Dimension("depth", "stage", per_stage(list(range(1, most + 1)), 1, 2)),
        Dimension("width", "stage", per_stage([2, 4, 8, 16], 1, 2)),
    ]
    if seed % 5:
        dimensions.append(Dimension("heads", "block", per_stage([1, 2, 3, 4], 1, 2)))
    if seed % 2:
        dimensions.append(Dimension("ratio", "block", per_stage([1, 2, 3], 1, 2)))
    rules = [
        Predicate("divides_next", ("width",)),
        Predicate("total_between", ("depth", stages, stages * most - 1)),
        Predicate("divisible", ("width", "base")),
        *([Predicate("divisible", ("width", "heads"))] if seed % 5 else []),
        *([Predicate("at_least", ("width", 1, "ratio")), Predicate("at_least", ("depth", 1, "ratio"))] * (seed % 2)),
    ]
    order = rng.permutation(len(rules))
    for number in range(int(rng.integers(0, 3)), -1, -1):
        try:  # fewer rules where they leave a choice unused
            return SearchSpace("random", "any", dimensions, [rules[i] for i in order[:number]], stages)
        except ValueError:
            continue
    raise AssertionError


def random_total(space: SearchSpace, seed: int, whole: bool = False, greatest: int = 40) -> Total:
    """Tables over the network, over each stage with its depth, over neighbours, and over every block."""
    rng = np.random.default_rng(seed)
    layout = space.layout
    network = list(range(len(layout.network)))
    own = [list(range(end - len(layout.stage), end)) for end in layout.block_start]
    scopes = [network, []] + [[*network, *columns] for columns in own]
    scopes += [[*a, *b] for a, b in itertools.pairwise(own)]

    def table(columns: list[int], blocks: int) -> np.ndarray:
        shape = [len(space.columns[c].choices) for c in columns]
        values = rng.integers(0, greatest, size=shape).astype(float) if whole else rng.normal(size=shape)
        padding = [(0, 0)] * (len(columns) - blocks) + [(0, 1)] * blocks
        return np.pad(values, padding) if padding else values

    terms = [Term(tuple(columns), table(columns, 0)) for columns in scopes]
    for s in range(space.stages if layout.block else 0):
        # Sometimes a block's table looks at the depth, too.
        seen = [c for c in (*network, *own[s]) if c != layout.depth_column[s] or seed % 3 == 0]
        for slot in range(layout.max_depth[s]):
            start = layout.block_start[s] + slot * len(layout.block)
            columns = [*seen, *range(start, start + len(layout.block))]
            terms.append(Term(tuple(columns), table(columns, len(layout.block))))
    return Total(tuple(terms))


@dataclass
class Brute:
    """Every network of a problem's space, and what the definitions say about them."""

    problem: Problem

    def __post_init__(self) -> None:
        self.codes = self.problem.space.encode(self.problem.space.enumerate())
        self.score = self.problem.score(self.codes)
        self.costs = {name: total(self.codes) for name, total in self.problem.costs.items()}
        self.within = np.ones(len(self.codes), dtype=bool)
        for name, (low, high) in self.problem.bounds.items():
            self.within &= (self.costs[name] >= low) & (self.costs[name] <= high)

    def top(self, k: int) -> list[float]:
        return np.sort(self.score[self.within])[::-1][:k].tolist()

    def front(self) -> set[tuple[float, ...]]:
        """(costs, score) of what nothing dominates, by comparing all pairs."""
        rows = np.stack([*self.costs.values(), -self.score], axis=1)[self.within]
        rows = np.unique(rows.round(9), axis=0)
        below = (rows[:, None] <= rows[None]).all(axis=2)
        np.fill_diagonal(below, False)
        return {tuple(row) for row in rows[~below.any(axis=0)].tolist()}


def random_bounds(rng: np.random.Generator, costs: dict[str, Total], codes: np.ndarray) -> dict[str, Any]:
    """Bounds around the costs of random networks; open, one-sided, two-sided, equal."""
    bounds = {}
    for name, total in costs.items():
        a, b = sorted(rng.choice(total(codes), size=2).tolist())
        kind = int(rng.integers(5))
        bounds[name] = [(-np.inf, np.inf), (-np.inf, b), (a, np.inf), (a, b), (a, a)][kind]
    return bounds


@pytest.fixture(scope="session")
def random_problem() -> Any:
    """Maker of a random problem from a seed; `ties`: whole scores of few values."""

    def make(seed: int, bounded: bool = True, ties: bool = False) -> Problem:
        space = random_space(seed)
        score = random_total(space, seed + 1, whole=ties, greatest=3)
        costs = {"params": random_total(space, seed + 2, whole=True), "macs": random_total(space, seed + 3, whole=True)}
        codes = space.encode(space.enumerate())
        bounds = random_bounds(np.random.default_rng(seed), costs, codes) if bounded else {}
        return Problem(space, score, costs, bounds)

    return make


@pytest.fixture(scope="session")
def tables() -> Any:
    """`random_total`."""
    return random_total


@pytest.fixture(scope="session")
def brute() -> type[Brute]:
    """The slow truth."""
    return Brute
