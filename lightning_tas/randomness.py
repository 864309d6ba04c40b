"""Randomness as a function of counters.

Every random decision of the framework is drawn from a generator keyed by (seed, purpose, counters), never from
hidden state, so that all ranks agree without talking and a resumed run repeats the uninterrupted one: bit for bit on
the CPU, and on a GPU as far as `trainer.deterministic` makes its operations repeat themselves (docs/training.md).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Counter = int | str


def derive(seed: int, *counters: Counter) -> int:
    """Return a 63-bit seed that depends on `seed` and every counter, and on nothing else.

    Stable across processes, platforms and library versions (BLAKE2b of a text form). Strings name the purpose of
    a stream: ``derive(seed, "subnet", step)`` and ``derive(seed, "dropout", step)`` are independent.
    """
    for value in (seed, *counters):
        if isinstance(value, bool) or not isinstance(value, (int, str, np.integer)):
            raise TypeError(f"counters are int or str, got {value!r} of type {type(value).__name__}")
    # The type is part of the text: the counter 1 and the purpose "1" are different streams.
    text = "|".join(f"s{len(v)}:{v}" if isinstance(v, str) else f"i{int(v)}" for v in (seed, *counters))
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def numpy_generator(seed: int, *counters: Counter) -> np.random.Generator:
    """A NumPy generator for one stream, see `derive`."""
    return np.random.Generator(np.random.PCG64(derive(seed, *counters)))


def torch_generator(seed: int, *counters: Counter, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one stream on `device`, see `derive`."""
    import torch  # here: spaces, samplers and the command line's --help need streams of NumPy only

    return torch.Generator(device=device).manual_seed(derive(seed, *counters))
