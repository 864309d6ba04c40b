"""What is said while a table of latencies is measured, which takes up to a minute and prints nothing by itself."""

from __future__ import annotations

from lightning_tas.latency import Conditions, rounds
from lightning_tas.progress import Progress


class LatencyProgress:
    """`progress` of `LatencyTable.build`: a bar, or where none can be drawn a line before and one a minute.

    Args:
        repeats: timed passes of every network.
        under: how it is measured.
        shown: whether anything is said at all.
    """

    def __init__(self, repeats: int, under: Conditions, shown: bool) -> None:
        self._repeats, self._under, self._shown = repeats, under, shown
        self._progress: Progress | None = None

    def __call__(self, done: int, turns: int) -> None:
        """So many of the `turns` are done; 0 before the first."""
        if self._progress is not None:
            self._progress.advance(1, lambda after: f"latency: {100 * done // turns}% of the passes after {after}")
            return
        networks, threads = turns // rounds(self._repeats), self._under.threads
        self._progress = Progress(f"latency of {networks} networks", "turn", turns, self._shown)
        self._progress.say(
            f"measuring the latency of {networks} networks, {self._repeats} passes each, on {self._under.device} "
            f"with {threads} thread{'' if threads == 1 else 's'} ..."
        )

    def close(self) -> None:
        """Remove the bar, also where measuring has failed."""
        if self._progress is not None:
            self._progress.close()
