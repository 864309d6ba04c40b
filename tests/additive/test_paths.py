"""Draws by any product of weights against enumeration: exact probabilities, members left out, sums that are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from lightning_tas.additive import Conditional, Paths, Term, Total
from lightning_tas.additive.paths import MAX_WAYS
from lightning_tas.spaces import SearchSpace, resolve_space

from ..spaces.conftest import s3

SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))]


def genes_of(paths: Paths, rng: np.random.Generator) -> np.ndarray:
    """Random weights of all choices, some of them zero."""
    return rng.random(paths.uniform.shape) * (rng.random(paths.uniform.shape) < 0.8)


def weights_of(codes: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """Products over the choices of every network."""
    chosen = genes[np.arange(codes.shape[1]), codes]
    return np.asarray(np.where(codes < 0, 1.0, chosen).prod(axis=1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("coarse", [False, True])
def test_members_have_their_weights(seed: int, coarse: bool, random_problem: Any, brute: Any, tables: Any) -> None:
    problem = random_problem(seed)
    truth, rng = brute(problem), np.random.default_rng(seed)
    space, costs, bounds = problem.space, dict(problem.costs), dict(problem.bounds)
    if coarse:  # one of them in fractions, whose bounds are those of a network
        costs["ms"] = tables(space, seed + 4)
        values = costs["ms"](truth.codes)
        bounds["ms"] = (-np.inf, float(np.median(values[truth.within])) if truth.within.any() else 0.0)
        truth.within &= values <= bounds["ms"][1]
    paths = Paths.within(space, costs, bounds, finest=64)
    assert paths.exact != coarse
    genes = genes_of(paths, rng)
    weights = weights_of(truth.codes, genes)
    weights[~truth.within] = 0.0
    inside = truth.codes[truth.within]
    avoid = list(rng.permutation(inside)[: int(rng.integers(4))])
    for row in avoid:
        weights[(truth.codes == row).all(axis=1)] = 0.0
    given = Conditional(paths, paths.law(genes), avoid)
    found, theirs = given.all() if given.weight else (truth.codes[:0], np.zeros(0))
    number = {row.tobytes(): i for i, row in enumerate(truth.codes)}
    here = np.zeros(len(truth.codes))
    here[[number[row.tobytes()] for row in found]] = theirs
    assert len({row.tobytes() for row in found}) == len(found) and given.weight == pytest.approx(theirs.sum())
    assert here[truth.within] == pytest.approx(weights[truth.within], rel=1e-12)
    if not coarse:
        assert not here[~truth.within].any() and given.count() - len(found) <= len(avoid)
        assert (given.weight > 0) == (weights > 0).any()


def test_draws_have_the_probabilities(random_problem: Any, brute: Any) -> None:
    problem = next(p for p in (random_problem(seed) for seed in range(50)) if 60 < brute(p).within.sum() < 400)
    paths = Paths.within(problem.space, problem.costs, problem.bounds)
    genes = 0.2 + np.random.default_rng(0).random(paths.uniform.shape)
    codes, weights = Conditional(paths, paths.law(genes)).all()
    likely = codes[np.argsort(-weights)[:3]]
    given = Conditional(paths, paths.law(genes), list(likely))
    codes, weights = given.all()
    assert len(codes) == brute(problem).within.sum() - 3
    number = {row.tobytes(): i for i, row in enumerate(codes)}
    counts = np.bincount([number[r.tobytes()] for r in given.sample(np.random.default_rng(1), 20_000)])
    expected = 20_000 * weights / weights.sum()
    often = expected > 5
    seen = [*counts[often], counts[~often].sum()]
    assert chisquare(seen, [*expected[often], expected[~often].sum()]).pvalue > 1e-3
    assert chisquare(seen[:-1], np.full(len(seen) - 1, np.sum(seen[:-1]) / (len(seen) - 1))).pvalue < 1e-9, "no power"


def latency(space: SearchSpace) -> Total:
    """Nanoseconds of every block by its width and choices, no two alike, as a measured table has them."""
    rng, terms = np.random.default_rng(0), []
    for s, start in enumerate(space.layout.block_start):
        width = [c for c, one in enumerate(space.columns) if one.name == "embed_dim" and one.stage in (None, s)]
        for slot in range(space.layout.max_depth[s]):
            block = range(start + slot * len(space.layout.block), start + (slot + 1) * len(space.layout.block))
            shape = [len(space.columns[c].choices) for c in (*width, *block)]
            table = np.rint(1e6 * (2 + 0.5 * np.indices(shape).sum(axis=0) + 0.3 * rng.random(shape)))
            terms.append(Term((*width, *block), np.pad(table, [(0, 0)] * len(width) + [(0, 1)] * len(block))))
    return Total(tuple(terms))


@pytest.mark.parametrize("space", [resolve_space("autoformer_base_paper"), s3()], ids=lambda space: space.name)
@pytest.mark.parametrize("band", [(None, 20), (45, 55), (80, None)])
def test_rounded_sums_are_accepted_in_most_draws(space: SearchSpace, band: tuple[Any, Any]) -> None:
    """Mutants of networks at the limit, for sums that are all different, in spaces of 1e15 to 1e22 networks."""
    table = latency(space)
    codes = space.sample_codes(0, 1000)
    values = table(codes)
    low, high = (
        np.percentile(values, p) if p is not None else open_ for p, open_ in zip(band, (-np.inf, np.inf), strict=True)
    )
    paths = Paths.within(space, {"latency": table}, {"latency": (low, high)})
    assert not paths.exact and len(paths.flat) <= MAX_WAYS
    inside = codes[(values >= low) & (values <= high)]
    order = np.argsort(table(inside))[:: 1 if band[1] is None else -1]
    accepted = []
    for row in inside[order[:4]]:
        genes = np.zeros_like(paths.uniform)
        genes[np.flatnonzero(row >= 0), row[row >= 0]] = 0.7
        law = paths.law(genes + 0.3 * paths.uniform)
        drawn = table(Conditional(paths, law, [row]).sample(np.random.default_rng(0), 200))
        accepted.append(np.mean((drawn >= low) & (drawn <= high)))
    assert np.mean(accepted) >= 0.5, accepted


def test_regions_of_one_network_and_of_none() -> None:
    space = resolve_space("autoformer_tiny")
    table = latency(space)
    row = space.sample_codes(3, 1)
    value = float(table(row)[0])
    paths = Paths.within(space, {"latency": table}, {"latency": (value - 1, value + 1)})
    given = Conditional(paths, paths.law(paths.uniform))
    assert given.weight > 0  # its neighbours by rounding are there, too
    nothing = Paths.within(space, {"latency": table}, {"latency": (0, 1)})
    assert Conditional(nothing, nothing.law(nothing.uniform)).weight == 0
    one = Total((Term((0,), np.array([0.0, 1.0, 2.0])), Term((1,), np.array([0.0, 3.0, 6.0]))))
    alone = Paths.within(space, {"sum": one}, {"sum": (0, 0)})
    genes = alone.uniform.copy()
    genes[2:, 1:] = 0.0
    assert Conditional(alone, alone.law(genes)).count() == 1
    assert Conditional(alone, alone.law(genes), list(Conditional(alone, alone.law(genes)).all()[0])).weight == 0
