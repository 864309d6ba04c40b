"""What is said while a table of latencies is measured, which takes up to a minute and prints nothing by itself."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning_tas.callbacks.search_job import EVERY
from lightning_tas.latency import Conditions, rounds


class LatencyProgress:
    """`progress` of `LatencyTable.build`: a bar, or where none can be drawn a line before and one a minute.

    Args:
        repeats: timed passes of every network.
        under: how it is measured.
        shown: whether anything is said at all.
    """

    def __init__(self, repeats: int, under: Conditions, shown: bool) -> None:
        self._repeats, self._under, self._shown = repeats, under, shown
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, turns: int) -> None:
        """So many of the `turns` are done; 0 before the first."""
        if not self._shown:
            return
        if done == 0:
            self._begin(turns)
        elif self._bar is not None:
            self._bar.update(1)
        elif time.monotonic() - self._said >= EVERY:
            self._said = time.monotonic()
            minutes = (self._said - self._began) / 60
            _write(f"latency: {100 * done // turns}% of the passes after {minutes:.0f} min")

    def _begin(self, turns: int) -> None:
        networks, threads = turns // rounds(self._repeats), self._under.threads
        if sys.stderr.isatty():
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=turns, desc=f"latency of {networks} networks", unit="turn", leave=False)
            return
        _write(
            f"measuring the latency of {networks} networks, {self._repeats} passes each, on {self._under.device} "
            f"with {threads} thread{'' if threads == 1 else 's'} ..."
        )

    def close(self) -> None:
        """Remove the bar, also where measuring has failed."""
        if self._bar is not None:
            self._bar.close()


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
