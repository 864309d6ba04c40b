"""Racing: which networks cannot be among the best any more, from the images that they have seen so far.

The best so far have seen all n images. A candidate sees a growing prefix of the same images in the same random order,
and after each look is compared with each of them, image by image: b images where only the other one is right, a where
only the candidate is. If both were equally good on all images, b - a would be 0 but for the sampling without
replacement of m of the n, whose standard deviation is about sqrt((a + b) (1 - m / n)); few differing images are judged
by the binomial distribution, which forgets that the images are finite and so errs on the safe side. The candidate is
given up when all of the k best so far are significantly better.

The error: the j-th of the true k best is better than at least r = k - j + 1 of any k other networks, and it stays
unless all of them seem significantly better. At worst they are exactly as good. Then the r statistics are normal with
correlations of 1/2, for all share the candidate's own luck (networks being exchangeable), so one look loses it with

    P_r(z) = E[ Phi((sqrt(1/2) U - z) / sqrt(1/2))^r ],   U normal,

and any of the k with at most the sum over r. Over looks a statistic is a stationary Ornstein-Uhlenbeck process in
log(m / (n - m)) / 2, whose chance to exceed z at any of them is integrated exactly (`ever`). The critical value z is
the one at which both together are the stated error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import brentq
from scipy.stats import binom, norm

from lightning_tas.errors import UserError

Bools = npt.NDArray[np.bool_]
FIRST, GROWTH = 0.03, 1.4
"""The first look, as a share of the images, and how much longer each further prefix is."""
FEW = 64
"""Differing images from which on their distribution is taken as normal."""


def looks(images: int) -> tuple[int, ...]:
    """Lengths of the prefixes after which networks may be given up, and last all `images`."""
    found: list[int] = []
    share = FIRST
    while share < 1 / math.sqrt(GROWTH):  # a look just before the end would save nothing
        length = round(share * images)
        if length > (found[-1] if found else 0):
            found.append(length)
        share *= GROWTH
    return (*found, images)


def critical(looks: Sequence[int], images: int, top: int, error: float) -> float:
    """The value of a standardised difference from which on a network is given up; see the module for the theory."""
    u, weight = np.polynomial.hermite_e.hermegauss(120)  # for expectations over a normal U
    weight = weight / weight.sum()
    root = math.sqrt(0.5)
    times = [0.5 * math.log(m / (images - m)) for m in looks]

    def lost(z: float) -> float:
        one = norm.cdf((root * u - z) / root)  # (120,)
        ranks = sum(float((weight * one**r).sum()) for r in range(1, top + 1))
        return ranks * ever(z, times) / float(norm.sf(z)) - error

    return float(brentq(lost, 0.0, 8.0)) if lost(0.0) > 0 else 0.0


def ever(z: float, times: Sequence[float]) -> float:
    """P(X(t) > z at any of the ascending `times`), X the stationary Ornstein-Uhlenbeck process exp(-|t - s|)."""
    if not times:
        return float(norm.sf(z))
    x, weight = np.polynomial.legendre.leggauss(200)
    low = -8.0
    x, weight = low + (x + 1) * (z - low) / 2, weight * (z - low) / 2  # over (low, z), where the process still is
    density = norm.pdf(x)
    for before, now in pairwise(times):
        rho = math.exp(before - now)
        step = norm.pdf(x[:, None], rho * x[None, :], math.sqrt(1 - rho**2))
        density = step @ (weight * density)
    return 1 - float(weight @ density)


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
        self.looks = looks(images)
        self._z = critical(self.looks[:-1], images, top, error)
        self._alpha = float(norm.sf(self._z))
        self._best: list[tuple[int, str, Bools]] = []  # (-hits, id, hits), the best first; ties by id

    @property
    def full(self) -> bool:
        """Whether there are `top` networks to compare with; before that, every network sees all images."""
        return len(self._best) >= self.top

    @property
    def ids(self) -> list[str]:
        """The best so far, best first."""
        return [name for _, name, _ in self._best]

    def enter(self, name: str, hits: Bools) -> None:
        """A network that has seen all images (n,)."""
        assert hits.shape == (self.images,)
        self._best.append((-int(hits.sum()), name, hits))
        self._best.sort(key=lambda entry: entry[:2])
        del self._best[self.top :]

    def hopeless(self, hits: Bools) -> Bools:
        """Which of the networks (C,) with these hits (C, m) on the first m images are to be given up."""
        m = hits.shape[1]
        if not self.full or m >= self.images:
            return np.zeros(len(hits), dtype=bool)
        out = np.ones(len(hits), dtype=bool)
        mine = hits.sum(axis=1)
        for _, _, theirs in reversed(self._best):  # the worst of the best first: it settles most
            if not out.any():
                break
            known = theirs[:m]
            both = (hits[out] & known).sum(axis=1)
            out[out] = self._better(int(known.sum()) - both, mine[out] - both, m)
        return out

    def _better(self, b: npt.NDArray[np.int64], a: npt.NDArray[np.int64], m: int) -> Bools:
        """Whether the other one is significantly better; b, a: images where only it, only the candidate is right."""
        differing = a + b
        scale = np.sqrt(np.maximum(differing, 1) * (1 - m / self.images))
        normal = (b - a - 1) / np.maximum(scale, 1e-12) > self._z
        exact = binom.sf(b - 1, differing, 0.5) <= self._alpha
        return np.asarray(np.where(differing < FEW, exact, normal & (b > a)))

    def estimate(self, hits: Bools) -> float:
        """Top-1 [%] on all images of a network given up after (m,): the worst of the best, less what it fell behind."""
        worst = self._best[-1][2]
        m = len(hits)
        return float(100 * (worst.mean() - (int(worst[:m].sum()) - int(hits.sum())) / m))

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
