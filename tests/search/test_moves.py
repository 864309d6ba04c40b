"""Moves against the definition: every member's exact probability by enumeration, for each strategy, within limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from lightning_tas.additive import Conditional, Term, Total
from lightning_tas.limits import Region
from lightning_tas.search.block_moves import exchanges, handed, released
from lightning_tas.search.moves import Drawn, Tally
from lightning_tas.spaces import Dimension, SearchSpace

RATES = {"evolution": (0.4, 0.4, 0.2), "s3_evolution": (0.2, 0.2, 0.4), "etas": (0.4, 0.4, 0.4)}


def two_stages() -> SearchSpace:
    """Two stages of 1 or 2 blocks with a width each: 400 networks, depth and width of a stage from one parent."""
    stage = [Dimension("embed_dim", "stage", (1, 2)), Dimension("depth", "stage", (1, 2))]
    block = [Dimension("num_heads", "block", (1, 2)), Dimension("mlp_ratio", "block", (1, 2))]
    return SearchSpace("two", "any", [*stage, *block], stages=2)


class Case:
    """A space under limits with all its members; `region` is exact or, with `coarse`, has rounded sums."""

    def __init__(self, lab: Any, space: str, low: float, high: float) -> None:
        self.space = lab.spaces("small") if space == "small" else two_stages()
        self.all = self.space.encode(self.space.enumerate())
        self.lab = lab
        sums = lab.region(self.space).quantities(self.all)["params"]
        self.limits = {"params": [int(np.percentile(sums, low)), int(np.percentile(sums, high))]}
        self.region = lab.region(self.space, self.limits)
        self.inside = self.region.allowed(self.all)

    def begun(self, name: str, **settings: Any) -> Any:
        """A search that has its parents."""
        strategy = self.lab.build(name, self.region, "dss_pp", **settings)
        strategy.tell(self.lab.scorer(strategy.ask(), strategy.needs))
        strategy.ask()
        return strategy

    def given(self, weight: Callable[[np.ndarray], float], *avoid: np.ndarray) -> np.ndarray:
        """The probabilities of all members by `weight`, given the limits and that they are none of `avoid`."""
        found = np.array([weight(row) for row in self.all]) * self.inside
        for row in avoid:
            found[(self.all == row).all(axis=1)] = 0.0
        return found / found.sum()

    def of(self, laws: Sequence[np.ndarray], avoid: Sequence[np.ndarray]) -> np.ndarray:
        """The same of laws, by the sum-product's own numbers."""
        number = {row.tobytes(): i for i, row in enumerate(self.all)}
        found = np.zeros(len(self.all))
        for law in laws:
            part = Conditional(self.region.paths, law, avoid)
            codes, weights = part.all()
            assert weights.sum() == pytest.approx(part.weight, rel=1e-12) and part.count() >= len(codes)
            for row, weight in zip(codes, weights.tolist(), strict=True):
                found[number[row.tobytes()]] += weight
        return found / found.sum()


def rate(case: Case, column: int, name: str, all_of_blocks: float | None = None) -> float:
    depth, width, block = RATES[name]
    one = case.space.columns[column]
    return depth if one.name == "depth" else width if one.block is None else block


def mutation(case: Case, parent: np.ndarray, name: str) -> Callable[[np.ndarray], float]:
    """The probability of a mutant, choice by choice, or block by block (S3)."""
    columns = case.space.columns
    groups: dict[Any, list[int]] = {}
    for c, column in enumerate(columns):
        whole = name == "s3_evolution" and column.block is not None
        groups.setdefault((column.stage, column.block) if whole else c, []).append(c)

    def weight(row: np.ndarray) -> float:
        total = 1.0
        for group in groups.values():
            if row[group[0]] >= 0:
                p, uniform = rate(case, group[0], name), 1 / math.prod(len(columns[c].choices) for c in group)
                new = parent[group[0]] < 0
                same = bool((row[group] == parent[group]).all())
                total *= uniform if new else p * uniform + (1 - p) * same
        return total

    return weight


def crossing(case: Case, a: np.ndarray, b: np.ndarray, block: bool) -> Callable[[np.ndarray], float]:
    """The probability of a child: every choice from either; or whole blocks, a stage's own choices from one donor."""
    columns = case.space.columns
    stages = range(case.space.stages)
    own = [[c for c, one in enumerate(columns) if one.block is None and one.stage == s] for s in stages]

    def share(row: np.ndarray, group: list[int]) -> float:
        there = [parent for parent in (a, b) if parent[group[0]] >= 0]
        return sum(bool((row[group] == parent[group]).all()) for parent in there) / max(len(there), 1)

    def weight(row: np.ndarray) -> float:
        singles = [[c] for c, one in enumerate(columns) if row[c] >= 0]
        if block:
            singles = [g for g in singles if columns[g[0]].block is None and not any(g[0] in group for group in own)]
            blocks = {(one.stage, one.block) for c, one in enumerate(columns) if one.block is not None and row[c] >= 0}
            singles += [[c for c, one in enumerate(columns) if (one.stage, one.block) == place] for place in blocks]
            donors = [share(row, group) for group in own]  # of each stage, half a chance for either parent
        else:
            donors = []
        return math.prod([*donors, *(share(row, group) for group in singles)])

    return weight


class Spy:
    """A draft that only remembers what is to be drawn."""

    def __init__(self) -> None:
        self.tally, self.asked = Tally(), []  # type: ignore[var-annotated]

    def draw(self, laws: Any, rng: Any, avoid: Any = ()) -> Drawn:
        self.asked.append((laws, avoid))
        return Drawn(None)


def agrees(case: Case, truth: np.ndarray, move: Callable[[Any, int], Any], strategy: Any, n: int = 400) -> None:
    """Chi-square of what a strategy draws against exact probabilities; members that are seen are not known here."""
    draft = strategy.draft()
    draft.seen = set()
    number = {row.tobytes(): i for i, row in enumerate(case.all)}
    counts = np.bincount([number[move(draft, slot).tobytes()] for slot in range(n)], minlength=len(case.all))
    assert not counts[truth == 0].any()
    order = np.argsort(-truth, kind="stable")
    # The likeliest members one by one, then ever more together, so that each group is met ten times or more.
    group = np.minimum(np.cumsum(n * truth[order]) - 1e-9, n - 1e-6) // 10
    seen, expected = (
        np.array([part[group == g].sum() for g in np.unique(group)]) for part in (counts[order], n * truth[order])
    )
    assert len(seen) > 5 and chisquare(seen, expected).pvalue > 1e-3


# Of unlike depths, with blocks that differ; in the second space also stages of unlike width and depth at once.
PARENTS = {
    "small": ([0, 2, 0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0, 1, -1, -1]),
    "two": ([0, 1, 0, 1, 1, 0, 0, 0, 1, 1, -1, -1], [1, 0, 1, 1, -1, -1, 1, 1, 0, 1, 1, 0]),
}
MUTANTS = [("evolution", "small"), ("s3_evolution", "two"), ("etas", "two")]


@pytest.mark.parametrize(("name", "space"), MUTANTS)
def test_mutants_have_their_exact_probability(lab: Any, name: str, space: str) -> None:
    case = Case(lab, space, 30, 60)
    strategy = case.begun(name)
    parent = case.all[case.inside][3]
    strategy._parents = [parent]
    truth = case.given(mutation(case, parent, name), parent)
    spy = Spy()
    strategy._mutant(spy, 0, 0)
    assert np.abs(case.of(*spy.asked[0]) - truth).max() < 1e-14
    agrees(case, truth, lambda draft, slot: strategy._mutant(draft, slot, 0), strategy)


@pytest.mark.parametrize(("name", "space"), [("evolution", "small"), ("evolution", "two"), ("s3_evolution", "two")])
def test_children_have_their_exact_probability(lab: Any, name: str, space: str) -> None:
    case = Case(lab, space, 20, 80)
    strategy = case.begun(name, **({"equal_depth": False} if name == "evolution" else {}))
    a, b = (case.space.encode(case.space.decode(np.array(row)))[0] for row in PARENTS[space])
    assert case.region.allowed(np.stack([a, b])).all()
    strategy._parents, strategy._depths = [a, b], [(0,), (1,)]
    truth = case.given(crossing(case, a, b, block=name == "s3_evolution"), a, b)
    spy = Spy()
    strategy._child(spy, 0, 0)
    assert np.abs(case.of(*spy.asked[0]) - truth).max() < 1e-14
    agrees(case, truth, lambda draft, slot: strategy._child(draft, slot, 0), strategy)


def test_children_of_nsga_ii_have_their_exact_probability(lab: Any) -> None:
    case = Case(lab, "small", 30, 70)
    strategy = case.begun("nsga2", gene_prob=0.15)
    ranked = [(0, 0, 0.0), (1, 1, 0.0)]
    strategy._ranked = ranked
    a, b = (strategy.history.rows[i] for i in (0, 1))
    columns = case.space.columns

    def child(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        def weight(row: np.ndarray) -> float:
            total = 1.0
            for c, column in enumerate(columns):
                if row[c] >= 0:
                    uniform, there = 1 / len(column.choices), [p for p in (first, second) if p[c] >= 0]
                    kept = sum(p[c] == row[c] for p in there) / len(there) if there else uniform
                    total *= 0.15 * uniform + 0.85 * kept
            return total

        return case.given(weight, first, second)

    # Of two drawn with replacement the better one wins: 3/4 of the parents are a.
    chance = {"a": 0.75, "b": 0.25}
    rows = {"a": a, "b": b}
    truth = sum(
        chance[x] * (0.1 * child(rows[x], rows[x]) + 0.9 * sum(chance[y] * child(rows[x], rows[y]) for y in "ab"))
        for x in "ab"
    )
    agrees(case, np.asarray(truth), lambda draft, slot: strategy._child(draft, slot, 0), strategy, 600)


def test_changes_of_the_lowest_blocks_have_their_exact_probability(lab: Any) -> None:
    case = Case(lab, "small", 5, 70)
    strategy = case.begun("blockwise")
    sites, columns = strategy.sites, case.space.columns
    parent = np.array([0, 1, 1, 1, 0, 1, -1, -1], dtype=np.int16)  # two blocks
    assert case.region.allowed(parent[None])[0]
    strategy.history.rows[0] = parent
    strategy._slots, strategy._order, strategy._count = [0], [[1, 0]], [1]
    open_ = {}
    for slot in range(60):
        rng = strategy.rng("mutant", slot, 0)
        rng.integers(1)
        flags = tuple((rng.random(2) < 0.4).tolist())
        spy = Spy()
        strategy._mutant(spy, slot, 0)
        open_.setdefault(flags, spy.asked[0])
    assert len(open_) == 4 and [columns[c].name for c in sites.others] == ["embed_dim", "depth"]
    for flags, asked in open_.items():

        def weight(row: np.ndarray, flags: tuple[bool, ...] = flags) -> float:
            total = 1.0
            for c, free in zip(sites.others, flags, strict=True):
                total *= 1 / len(columns[c].choices) if free else float(row[c] == parent[c])
            for j, site in enumerate(sites.sites):
                block, old = row[site.columns], parent[site.columns]
                if block[0] >= 0:
                    same = bool((block == old).all())
                    total *= 1 / 4 if old[0] < 0 else 1 / 3 * (not same) if j == 1 else same
            return total

        truth = case.given(weight, parent)
        assert np.abs(case.of(*asked) - truth).max() < 1e-14


def test_exchanges_take_the_blocks_that_they_say(lab: Any) -> None:
    case = Case(lab, "small", 0, 100)
    strategy = case.begun("blockwise")
    three = case.all[case.all[:, 1] == 2]
    own, whole = three[0], three[-1].copy()
    whole[:2] = own[:2]
    for taken, freed in itertools.product([(0,), (0, 2)], [(), (2,), (0, 1)]):
        laws = exchanges(strategy.moves, strategy.sites, own, whole, taken, freed)
        truth = np.zeros(len(case.all))
        for subset in itertools.product((0, 1), repeat=len(freed)):
            row = own.copy()
            chosen = {j: 1 for j in taken} | dict(zip(freed, subset, strict=True))
            for j, swapped in chosen.items():
                at = strategy.sites.sites[j].columns
                row[at] = (whole if swapped else own)[at]
            truth += (case.all == row).all(axis=1) / 2 ** len(freed)
        assert np.abs(case.of(laws, ()) - truth).max() < 1e-14


def test_releases_make_most_room_first(lab: Any) -> None:
    space = lab.spaces("small")
    region = lab.region(space, {"params": [None, 12]})
    strategy = lab.build("blockwise", region, "dss_pp")
    sites = strategy.sites
    # Sums of codes: 1 + 3 and blocks of 2, 4 and 3, at a limit that the change of the smallest block exceeds.
    parent = np.array([0, 2, 0, 0, 1, 1, 0, 1], dtype=np.int16)
    region.limits = region.limits.read({"params": [None, 13]})
    assert released(region, sites, parent, [0], [1, 2])[0] == [1, 2]
    assert released(region, sites, parent, [0], [2, 1])[0] == [1, 2]
    assert released(region, sites, parent, [0, 1], [2])[0] == [2]
    # At a lower limit growth is what makes room.
    region.limits = region.limits.read({"params": [13, None]})
    assert released(region, sites, parent, [1], [2, 0])[0] == [0, 2]
    # Of an exchange first the block that need not be taken, or another one that pays for it.
    region.limits = region.limits.read({"params": [None, 13]})
    whole = np.array([0, 2, 1, 1, 0, 1, 0, 0], dtype=np.int16)
    assert handed(region, sites, parent, whole, [0], [1, 2])[0] == [0, 1, 2]
    assert handed(region, sites, parent, whole, [0, 2], [1])[0] == [0, 1, 2]


STRATEGIES = ["random", "evolution", "s3_evolution", "blockwise", "etas", "nsga2"]
LIMITED = [
    *((name, "sums") for name in STRATEGIES),
    ("evolution", "rounded"),
    *(pytest.param(name, "rounded", marks=pytest.mark.slow) for name in STRATEGIES if name != "evolution"),
    *(pytest.param(name, "function", marks=pytest.mark.slow) for name in STRATEGIES),
]


@pytest.mark.parametrize(("name", "limit"), LIMITED)
def test_proposals_are_new_and_within_the_limits(lab: Any, name: str, limit: str) -> None:
    """At the upper limit, where larger networks score higher: nothing is refused but for a function's sake."""
    space = lab.spaces("autoformer")
    widths = {c: one for c, one in enumerate(space.columns) if one.block is not None}
    rng = np.random.default_rng(0)
    table = Total(
        tuple(Term((c,), np.append(rng.integers(10**6, 2 * 10**6, len(o.choices)), 0)) for c, o in widths.items())
    )
    quantity = {"sums": None, "rounded": table, "function": lambda codes: (table(codes) / 1e6).round(1)}[limit]
    limits: dict[str, Any] = {"params": ["5M", "7M"]}
    if quantity is not None:
        limits["latency"] = [None, float(np.percentile(quantity(space.sample_codes(0, 500)), 60))]
    region = Region(space, limits, quantities={} if quantity is None else {"latency": quantity})
    strategy = lab.build(name, region, "dss_pp")
    archs = lab.trace(strategy)
    assert region.allowed(space.encode(archs)).all()
    assert min(row["acceptance"] for row in strategy.stats) >= 0.9
    drawn, outside = (sum(row[key] for row in strategy.stats) for key in ("drawn", "outside"))
    assert outside == 0 if limit == "sums" else limit == "function" or outside <= drawn / 2
