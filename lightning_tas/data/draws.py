"""Random numbers of single images, keyed by (seed, epoch, index, repeat).

Two forms of the same stream: `uniforms`, a vectorised counter-based generator for whole batches, and `seeded`, which
points Python's, NumPy's and torch's global generators (timm's transforms draw from all three) at one image. `preserved`
puts those back, so that augmenting in the main process leaves its randomness untouched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_tas.randomness import derive

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes BigCrush."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_seeds(seed: int, keys: np.ndarray) -> np.ndarray:
    """One 64-bit word (uint64, shape (B,)) for each key (epoch, index, repeat) of `keys` (B, 3)."""
    words = np.asarray(keys).astype(np.uint64)
    state = np.full(len(words), derive(seed, "augmentation"), dtype=np.uint64)
    for column in range(words.shape[1]):
        state = _mix(state + _GOLDEN * (words[:, column] + np.uint64(1)))
    return state


def uniforms(seeds: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) for each of `seeds` (B,): float64, shape (B, count)."""
    steps = _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    bits = _mix(seeds[:, None] + steps[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seeded(seed: int) -> None:
    """Seed the global CPU generators of Python, NumPy and torch; call inside `preserved` only."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed would also queue a call for every accelerator, for every image.
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the global CPU generators of Python, NumPy and torch on leaving."""
    python, numpy, default = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(default)
