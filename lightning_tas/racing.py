"""Racing: which networks cannot be among the best any more, from the images that they have seen so far.

The k best so far have seen all n images, so what the worst of them reaches, T, is known without error. A candidate c
sees a growing prefix of the same images in the same random order. Its accuracy on all n is estimated by regression
on how difficult the images are: with p_i the share of the k best that are right on image i, known for all of them,

    A = mean(c over m) + slope (mean(p over n) - mean(p over m)),

which removes the luck of the prefix as far as candidates share it with the best. The slope is how each of the best
follows the others, over all images: one that is fitted to a short prefix would be wrong where few images tell. A is
unbiased whatever the slope. What is tested is that the candidate is as good as T. It lacks S = m (T - A) hits so far,
which the rest of the images would have to bring, and it leaves u = c - T - slope (p - mean(p over n)) on each image.
With Q the sum of u^2 over the prefix and R that over the rest, S has the variance 1 / (1 / Q + 1 / R), as the prefix is
a random part of the images, and the candidate is given up when

    (S - 1/2) sqrt(1 / Q + 1 / R) > z,

1/2 because S comes in whole steps (Yates 1934). With many images this is (T - A) / sd(A). For few, Q and R are those of
the hypothesis, as in a score test, not those about the mean of the prefix:

* Q >= S^2 / m, so that m images never count for more than sqrt(m / (1 - m / n)), and prefixes for which this is below z
  are not shown alone. About its own mean, a candidate that misses two of two images has no variance at all. For u as
  often above 0 as below, S / sqrt(Q) exceeds x with at most exp(-x^2 / 2), however small m is (Efron 1969, "Student's
  t-test under symmetry conditions").
* Where hits are rare (T < 1/2), the ones not met yet are most of the variance. Where a hit is expected with probability
  e, u = c - e, u^2 is e (1 - e) + (1 - 2 e) u. So a prefix that lacks S hits lacks (1 - 2 T) S of Q, which is added.
* R is Q (n - m) / m, but at least S: with images on which u is 1 the rest makes S up. A candidate that differs from the
  best on a few images only may meet all its losses first; then Q = R = S.
* Q is never taken below what the best leave of one another, m times the variance of their own residuals.

The error: the networks called the best at the end are not those of full evaluation only if one of the true k best was
given up. Whatever the order of candidates, T never exceeds the accuracy of such a network. So at the most unfavourable,
when it exceeds T by nothing, a look loses it with probability Phi(-z). Over looks the statistic is a stationary
Ornstein-Uhlenbeck process in log(m / (n - m)) / 2, whose chance to exceed z at any of them is integrated exactly
(`ever`); z is where that chance is the stated error over k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_tas.errors import UserError

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
FIRST, GROWTH = 0.03, 1.3
"""The first look, as a share of the images, and how much longer each further prefix is."""
CHUNK = 16
"""Networks that are looked at together."""
Look = Callable[[Sequence[str], int, int], Mapping[str, Bools]]
"""Of (ids, begin, end): by id, whether the network is right on each of the images from `begin` to before `end`."""


def looks(images: int) -> tuple[int, ...]:
    """Lengths of the prefixes after which networks may be given up, and last all `images`."""
    found: list[int] = []
    share = FIRST
    while share < 1 / math.sqrt(GROWTH):  # a look just before the end would save nothing
        length = round(share * images)
        if (found[-1] if found else 0) < length < images:
            found.append(length)
        share *= GROWTH
    return (*found, images)


@lru_cache(maxsize=64)
def critical(looks: tuple[int, ...], images: int, chance: float) -> float:
    """What a standard normal statistic exceeds at any of the `looks` with probability `chance`; see the module."""
    times = [0.5 * math.log(m / (images - m)) for m in looks]
    if ever(0.0, times) <= chance:  # nobody is given up who seems as good
        return 0.0
    return float(brentq(lambda z: ever(z, times) - chance, 0.0, 8.0, xtol=1e-9))


def ever(z: float, times: Sequence[float]) -> float:
    """P(X(t) > z at any of the ascending `times`), X the stationary Ornstein-Uhlenbeck process exp(-|t - s|)."""
    if not times:
        return float(norm.sf(z))
    x, weight = np.polynomial.legendre.leggauss(80)
    low = min(z, 0.0) - 7.0
    x, weight = low + (x + 1) * (z - low) / 2, weight * (z - low) / 2  # over (low, z), where the process still is
    density = np.exp(-(x**2) / 2)
    for before, now in pairwise(times):
        rho = math.exp(before - now)
        rest = 1 - rho**2
        density = np.exp(-((x[:, None] - rho * x) ** 2) / (2 * rest)) @ (weight * density) / math.sqrt(math.tau * rest)
    return 1 - float(weight @ density) / math.sqrt(math.tau)


@dataclass(frozen=True)
class Raced:
    """What racing found of a network: top-1 [%] on all `images`; or an estimate from fewer, where it was `dropped`."""

    top1: float
    images: int
    dropped: bool


class Race:
    """The `top` best networks so far with their hits on `images` images, and the test against them.

    error: the probability that the networks called the best at the end are not those that full evaluation gives.
    """

    def __init__(self, images: int, top: int = 10, error: float = 0.05) -> None:
        if top < 1:
            raise UserError(f"top: {top!r} is not valid; valid: 1 or above")
        if not 0 < error < 1:
            raise UserError(f"error: {error!r} is not valid; valid: above 0, below 1")
        self.images, self.top, self.error = images, top, error
        # Shorter prefixes decide nothing (module, Q >= S^2 / m): z of all looks is above that of a single one.
        least = max(float(norm.isf(error / top)), 0.0) ** 2
        self.looks = tuple(m for m in looks(images) if m == images or m / (1 - m / images) > least)
        self._z = critical(self.looks[:-1], images, error / top)
        self._best: list[tuple[int, str, Bools]] = []  # (-hits, id, hits), the best first; ties by id
        self._ease: Floats = np.zeros(images)  # p of the module
        self._slope, self._least = 0.0, 0.0  # how the best follow one another, and the variance that this leaves

    @property
    def full(self) -> bool:
        """Whether there are `top` networks to compare with; before that, every network sees all images."""
        return len(self._best) >= self.top

    @property
    def ids(self) -> list[str]:
        """The best so far, best first."""
        return [name for _, name, _ in self._best]

    @property
    def accuracies(self) -> dict[str, float]:
        """Top-1 [%] of the best so far by id, best first."""
        return {name: -100.0 * hits / self.images for hits, name, _ in self._best}

    def enter(self, name: str, hits: Bools) -> None:
        """A network that has seen all images (n,)."""
        assert hits.shape == (self.images,) and name not in self.ids
        self._best.append((-int(hits.sum()), name, hits))
        self._best.sort(key=lambda entry: entry[:2])
        del self._best[self.top :]
        table = np.stack([known for *_, known in self._best])  # (k, n)
        self._ease = table.mean(axis=0)
        self._slope, self._least = _follow(table)

    def hopeless(self, hits: Bools) -> Bools:
        """Which of the networks (C,) with these hits (C, m) on the first m images are to be given up."""
        m = hits.shape[1]
        if not self.full or m >= self.images:
            return np.zeros(len(hits), dtype=bool)
        worst = -self._best[-1][0]
        goal = worst / self.images  # T of the module
        estimate, variance = self._estimate(hits)
        lack = goal - estimate
        short = m * lack
        unmet = max(1 - 2 * goal, 0.0) * lack
        seen = m * np.maximum(variance + lack**2 + unmet, self._least)  # Q
        rest = np.maximum(seen * (self.images - m) / m, short)  # R
        # Without quotients: Q may be 0, but only where S is.
        unlikely = (short > 0.5) & ((short - 0.5) ** 2 * (seen + rest) > self._z**2 * seen * rest)
        impossible = hits.sum(axis=1) + (self.images - m) < worst
        return unlikely | impossible

    def estimate(self, hits: Bools) -> float:
        """Top-1 [%] on all images of a network given up with these hits (m,), below that of the worst of the best."""
        below = np.nextafter(-100.0 * self._best[-1][0] / self.images, -math.inf)  # also where chances were all it lost
        return float(min(100 * self._estimate(hits[None])[0][0].clip(0, 1), below))

    def _estimate(self, hits: Bools) -> tuple[Floats, Floats]:
        """Of networks with hits (C, m): estimated accuracy on all images, and variance of hits - slope p; (C,) each."""
        m = hits.shape[1]
        ease = self._ease[:m]
        mean, centred = hits.mean(axis=1), ease - ease.mean()
        found = mean + self._slope * (self._ease.mean() - ease.mean())
        # Of hits - slope ease, without that matrix.
        variance = mean * (1 - mean) - self._slope * (2 * (hits @ centred) - self._slope * (centred @ centred)) / m
        return found, variance.clip(0)  # not below 0 by rounding

    def state_dict(self) -> dict[str, Any]:
        """As primitives and tensors."""
        return {
            "images": self.images,
            "top": self.top,
            "error": self.error,
            "ids": self.ids,
            "hits": [torch.from_numpy(np.packbits(hits)) for _, _, hits in self._best],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Race:
        """Read `state_dict`'s form."""
        race = cls(int(state["images"]), int(state["top"]), float(state["error"]))
        for name, packed in zip(state["ids"], state["hits"], strict=True):
            race.enter(str(name), np.unpackbits(packed.numpy(), count=race.images).astype(bool))
        return race


def run(race: Race, names: Sequence[str], look: Look) -> dict[str, Raced]:
    """Race networks with these distinct ids; what was found of each.

    Those among the best already are not looked at again. All see the first images together, then `CHUNK` at a time race
    to the end, whatever the number of processes; the best so far change after each chunk.
    """
    found = {name: Raced(top1, race.images, False) for name, top1 in race.accuracies.items() if name in names}
    new = [name for name in names if name not in found]
    first = race.looks[0]
    seen = look(new, 0, first) if new else {}
    for start in range(0, len(new), CHUNK):
        found |= _heat(race, {name: seen[name] for name in new[start : start + CHUNK]}, look, first)
    return found


def _heat(race: Race, seen: dict[str, Bools], look: Look, now: int) -> dict[str, Raced]:
    """Race networks that have seen the first `now` images, until they are given up or have seen all."""
    found: dict[str, Raced] = {}
    for length in race.looks if race.full else (race.images,):
        if length > now:
            more = look(list(seen), now, length)
            seen = {name: np.concatenate([known, more[name]]) for name, known in seen.items()}
            now = length
        hopeless = race.hopeless(np.stack(list(seen.values())))
        for name, gone in zip(list(seen), hopeless.tolist(), strict=True):
            if gone:
                found[name] = Raced(race.estimate(seen.pop(name)), length, True)
        if not seen:
            break
    for name, known in seen.items():
        race.enter(name, known)
        found[name] = Raced(100.0 * int(known.sum()) / race.images, race.images, False)
    return found


def _follow(table: Bools) -> tuple[float, float]:
    """How one network's hits (rows of (k, n)) follow the share of the others: mean slope, and mean variance left."""
    if len(table) == 1:
        return 0.0, float(table.var())
    others = (table.sum(axis=0) - table) / (len(table) - 1)
    others -= others.mean(axis=1, keepdims=True)
    shared, spread = (table * others).mean(axis=1), (others**2).mean(axis=1)
    slopes = np.divide(shared, spread, out=np.zeros(len(table)), where=spread > 0)
    slope = float(slopes.mean())
    return slope, float((table - slope * others).var(axis=1).mean())
