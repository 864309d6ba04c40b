"""How well a score orders networks by their accuracy: rank correlations, their uncertainty, the best network found.

    tau_a  = (C - D) / (n (n - 1) / 2)                    ETAS eq. 5: ties count as neither concordant nor discordant
    tau_b  = (C - D) / sqrt((pairs untied in x) (pairs untied in y))
    tau_xy.z = (tau_xy - tau_xz tau_yz) / sqrt((1 - tau_xz^2) (1 - tau_yz^2))         Kendall's partial tau, of tau_b
    mBR    = sum_g (r_g - 1) / sum_g (|g| - 1)            PreNAS, section 4.3: r_g is the true rank of the best by score

The partial tau is the correlation that is left between the residuals of two orders after both are regressed, pair by
pair, on the order by z (the parameter count): what a proxy knows beyond size. The mean best rank is taken over *all*
groups g of `GROUP` networks at once, in closed form: 0 means that the score always picks the truly best one of a group,
0.5 is chance, 1 always the worst.

A network without a valid score (not finite) is ordered last, tied with the others of its kind; Pearson leaves it out.
What is not defined, such as tau_b of a constant, is None, never NaN.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from lightning_tas.randomness import numpy_generator

GROUP = 10
"""Networks in the groups of the mean best rank."""
FEWEST = 8
"""Networks that a bootstrap interval takes: resamples of fewer are so alike that it would look certain."""
LEVEL = 95
"""Per cent that the bootstrap interval covers."""
MANY = 1000
"""Networks up to which resamples are squared together, which is then faster."""
BLOCK = 4_000_000
"""Entries of a sign matrix that are held at a time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Correlation:
    """A score against an accuracy, over `networks` networks: means over initialisations, None where undefined.

    `low` and `high` bound tau_b (BCa bootstrap over networks, of its mean over initialisations), `spread` is the
    standard deviation of tau_b between initialisations, `per_init` its values, and `averaged` is the tau_b of the
    networks' mean rank over all initialisations. `invalid` counts scores, over all initialisations.
    """

    networks: int
    tau_a: float | None
    tau_b: float | None
    low: float | None
    high: float | None
    spread: float | None
    per_init: tuple[float | None, ...]
    averaged: float | None
    spearman: float | None
    pearson: float | None
    best_rank: float | None
    partial: float | None
    invalid: int


def correlate(
    scores: ArrayLike, truth: ArrayLike, control: ArrayLike, *, seed: int = 0, resamples: int = 1000
) -> Correlation:
    """Every figure of one score against one accuracy.

    Args:
        scores: (initialisations, networks), higher is better; not finite where invalid.
        truth: (networks,) accuracies; NaN where unknown, and those networks are left out.
        control: (networks,) parameter counts, for the partial tau.
        seed: of the bootstrap; the same resamples are used for every score of as many networks.
        resamples: of the bootstrap; 0: no interval, nor is there one of fewer than `FEWEST` networks.
    """
    known = np.isfinite(np.asarray(truth, dtype=float))
    values = np.atleast_2d(np.asarray(scores, dtype=float))[:, known]
    y, z = np.asarray(truth, dtype=float)[known], np.asarray(control, dtype=float)[known]
    orders = np.stack([ranks(row) for row in values])
    taus = [kendall(row, y) for row in values]
    per_init = tuple(b for _, b in taus)
    partials = [partial_tau(b, kendall(row, z)[1], kendall(y, z)[1]) for (_, b), row in zip(taus, values, strict=True)]
    low, high = (
        bootstrap_interval(orders, y, seed=seed, resamples=resamples)
        if resamples and len(y) >= FEWEST
        else (None, None)
    )
    defined = [value for value in per_init if value is not None]
    return Correlation(
        networks=int(known.sum()),
        tau_a=_mean([a for a, _ in taus]),
        tau_b=_mean(per_init),
        low=low,
        high=high,
        spread=statistics.stdev(defined) if len(defined) > 1 else None,
        per_init=per_init,
        averaged=kendall(orders.mean(axis=0), y)[1],
        spearman=_mean([spearman(row, y) for row in values]),
        pearson=_mean([pearson(row, y) for row in values]),
        best_rank=_mean([mean_best_rank(row, y) for row in values]),
        partial=_mean(partials),
        invalid=int((~np.isfinite(values)).sum()),
    )


def ranks(values: ArrayLike) -> Floats:
    """(n,) average ranks, 1 is the lowest; scores that are not finite share the lowest ones."""
    array = np.asarray(values, dtype=float)
    ordered: Floats = stats.rankdata(np.where(np.isfinite(array), array, -np.inf))
    return ordered


def kendall(x: ArrayLike, y: ArrayLike) -> tuple[float | None, float | None]:
    """(tau_a, tau_b) of two (n,) columns; tau_b is None where one of them is constant, both are below two networks."""
    x, y = ranks(x), ranks(y)
    pairs = len(x) * (len(x) - 1) / 2
    untied_x, untied_y = pairs - _ties(x), pairs - _ties(y)
    if not pairs:
        return None, None
    if not untied_x or not untied_y:
        return 0.0, None
    tau_b = float(stats.kendalltau(x, y).statistic)
    return tau_b * math.sqrt(untied_x * untied_y) / pairs, tau_b


def _ties(order: Floats) -> float:
    """Pairs that are equal."""
    counts = np.unique(order, return_counts=True)[1]
    return float((counts * (counts - 1) / 2).sum())


def spearman(x: ArrayLike, y: ArrayLike) -> float | None:
    """Spearman's rho (average ranks at ties, ETAS eq. 6), None where a column is constant."""
    return _linear(ranks(x), ranks(y))


def pearson(x: ArrayLike, y: ArrayLike) -> float | None:
    """Pearson's r over the networks with a valid score, None where a column is constant."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    valid = np.isfinite(x)
    return _linear(x[valid], y[valid])


def _linear(x: Floats, y: Floats) -> float | None:
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return None
    # Scores may be as large as 1e300: their squares would not be finite.
    found = float(stats.pearsonr(x / np.abs(x).max(), y).statistic)
    return found if math.isfinite(found) else None


def partial_tau(xy: float | None, xz: float | None, yz: float | None) -> float | None:
    """Kendall's tau_xy.z; None where x or y orders exactly as z does, which leaves nothing to correlate."""
    if xy is None or xz is None or yz is None:
        return None
    rest = (1 - xz * xz) * (1 - yz * yz)
    return (xy - xz * yz) / math.sqrt(rest) if rest > 1e-12 else None


def mean_best_rank(x: ArrayLike, y: ArrayLike, group: int = GROUP) -> float | None:
    """mBR over all groups of `group` networks (of all of them where there are fewer); None below two networks.

    Network i is its group's best by score where the others are drawn from the b_i networks scored below it, which has
    the probability C(b_i, m - 1) / C(n, m); the share of those that are truly better than i is then its expected
    (r_g - 1) / (m - 1). Equal scores are in random order, equal accuracies count one half.
    """
    x, y = ranks(x), np.asarray(y, dtype=float)
    n = len(x)
    m = min(group, n)
    if m < 2:
        return None
    total = 0.0
    lower: list[float] = []  # accuracies of all networks with a lower score, in order
    order = np.argsort(x, kind="stable")
    for tied in np.split(y[order], np.flatnonzero(np.diff(x[order])) + 1):
        size, fewer = len(tied), len(lower)
        below = _better(lower, tied)
        equal = _better(sorted(tied), tied) - size / 2  # without each network itself
        for place in range(size):  # the network has `place` of its equals below it
            drawn_from = fewer + place
            if drawn_from < m - 1:
                continue
            better = (below + (equal * place / (size - 1) if size > 1 else 0.0)) / size
            total += math.comb(drawn_from, m - 1) / math.comb(n, m) * better / drawn_from
        for accuracy in tied:
            bisect.insort(lower, float(accuracy))
    return total


def _better(ordered: Sequence[float], own: Floats) -> float:
    """Pairs of (other, own), the others in order, in which the other is greater, equal ones half."""
    spots = [(bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value)) / 2 for value in own]
    return len(ordered) * len(spots) - math.fsum(spots)


def bootstrap_interval(
    orders: Floats, truth: ArrayLike, *, seed: int = 0, resamples: int = 1000
) -> tuple[float | None, float | None]:
    """BCa interval (Efron 1987) of tau_b under resampling of networks, of its mean over the rows of `orders`.

    Resamples of few networks that follow one another almost in order do so too, or better, so their percentiles lie
    too high; BCa moves them by the bias (the share of resamples below the tau itself) and the acceleration (from the
    taus without one network each). Where all networks are in one order every resample is, and there is no interval.

    A resample is a vector c of how often each network was drawn, so tau_b of all of them is three quadratic forms,
    c'Sc / sqrt(c'|S_x|c c'|S_y|c), with S_x and S_y the signs of all differences and S their product. Of more than
    `MANY` networks, whose squares are too many, each resample is sorted by itself.
    Resamples in which a column is constant have no tau and are left out.

    Args:
        orders: (initialisations, networks), any monotone form of the scores.
        truth: (networks,).
    """
    y = ranks(truth)
    n = len(y)
    if n < 2:
        return None, None
    generator = numpy_generator(seed, "bootstrap")
    shares = np.full(n, 1 / n)
    if n > MANY:
        drawn = (np.repeat(np.arange(n), generator.multinomial(n, shares)) for _ in range(resamples))
        taus = np.array([[stats.kendalltau(row[one], y[one]).statistic for row in orders] for one in drawn]).T
    else:
        counts = generator.multinomial(n, shares, size=resamples).astype(float)  # (resamples, n)
        taus = np.stack([_resampled(row, y, counts) for row in orders])
    found = _defined_mean(taus)
    tau = _defined_mean(np.array([[np.nan if b is None else b] for b in (kendall(row, y)[1] for row in orders)]))
    if not len(found) or not len(tau) or np.ptp(found) < 1e-12:
        return None, None
    low, high = np.percentile(found, 100 * _bca_levels(found, tau[0], _defined_mean(_without_one(orders, y))))
    return float(low), float(high)


def _defined_mean(taus: Floats) -> Floats:
    """Mean over initialisations of (initialisations, k) taus, where any is defined: (at most k,)."""
    with np.errstate(invalid="ignore"):
        mean: Floats = np.nansum(taus, axis=0) / (~np.isnan(taus)).sum(axis=0)
    return mean[~np.isnan(mean)]


def _bca_levels(resampled: Floats, value: float, jackknife: Floats) -> Floats:
    """Which quantiles of the resamples bound the value, in [0, 1]."""
    below = np.mean(resampled < value - 1e-12) + np.mean(np.abs(resampled - value) <= 1e-12) / 2
    bias = stats.norm.ppf(np.clip(below, 0.5 / len(resampled), 1 - 0.5 / len(resampled)))
    apart = jackknife.mean() - jackknife if len(jackknife) else np.zeros(1)
    size = (apart**2).sum() ** 1.5
    acceleration = (apart**3).sum() / (6 * size) if size > 0 else 0.0
    z = bias + stats.norm.ppf([(100 - LEVEL) / 200, (100 + LEVEL) / 200])
    levels: Floats = stats.norm.cdf(bias + z / (1 - acceleration * z))
    return levels


def _without_one(orders: Floats, y: Floats) -> Floats:
    """(initialisations, n) tau_b of all networks but one each: NaN where undefined."""
    rows = []
    for x in orders:
        own = np.zeros((3, len(y)))  # each network's part of c'Sc, c'|S_x|c and c'|S_y|c for c of ones
        for columns, signs_x, signs_y in _signs(x, y):
            own[:, columns] = (signs_x * signs_y).sum(0), np.abs(signs_x).sum(0), np.abs(signs_y).sum(0)
        both, of_x, of_y = own.sum(axis=1, keepdims=True) - 2 * own
        with np.errstate(invalid="ignore", divide="ignore"):
            rows.append(both / np.sqrt(of_x * of_y))
    return np.stack(rows)


def _signs(x: Floats, y: Floats) -> Iterator[tuple[slice, Floats, Floats]]:
    """Signs of the differences of all networks from some: (n, block) at a time."""
    step = max(1, BLOCK // len(x))
    for start in range(0, len(x), step):
        columns = slice(start, start + step)
        yield columns, np.sign(x[:, None] - x[None, columns]), np.sign(y[:, None] - y[None, columns])


def _resampled(x: Floats, y: Floats, counts: Floats) -> Floats:
    """(resamples,) tau_b, NaN where undefined."""
    concordant, untied_x, untied_y = (np.zeros(len(counts)) for _ in range(3))
    for columns, signs_x, signs_y in _signs(x, y):
        for total, signs in (
            (concordant, signs_x * signs_y),
            (untied_x, np.abs(signs_x)),
            (untied_y, np.abs(signs_y)),
        ):
            total += np.einsum("rj,rj->r", counts @ signs, counts[:, columns])
    with np.errstate(invalid="ignore"):
        taus: Floats = concordant / np.sqrt(untied_x * untied_y)
    return taus


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of those that are defined."""
    defined = [value for value in values if value is not None]
    return statistics.fmean(defined) if defined else None
