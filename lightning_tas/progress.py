"""How far long work is: a bar on a terminal; elsewhere, where a bar would be one endless line, a line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

EVERY = 60.0
"""Seconds between lines where no bar can be drawn."""


class Progress:
    """Shows on standard error how far `total` (None: unknown) units of work are, of which `initial` are done already.

    shown: whether anything is shown at all, which one process of several does.
    """

    def __init__(self, desc: str, unit: str, total: int | None, shown: bool = True, initial: int = 0) -> None:
        self._shown = shown
        self._bar: Any = None
        self._began = self._said = time.monotonic()
        if shown and sys.stderr.isatty():
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=total, initial=initial, desc=desc, unit=unit, leave=False)

    def say(self, line: str) -> None:
        """A line where no bar is drawn."""
        if self._shown and self._bar is None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def advance(
        self, number: int, line: Callable[[str], str], facts: Callable[[], Mapping[str, str]] | None = None
    ) -> None:
        """`number` more units are done. line: given the time since the beginning, as "3 min"; facts: beside the bar."""
        if self._bar is not None:
            self._bar.update(number)
            if facts is not None:
                self._bar.set_postfix(facts())
            return
        now = time.monotonic()
        if self._shown and now - self._said >= EVERY:
            self._said = now
            self.say(line(f"{(now - self._began) / 60:.0f} min"))

    def close(self) -> None:
        """Remove the bar, also where the work has failed."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def beside_bars() -> Iterator[None]:
    """What is written inside starts on a line of its own; bars are drawn anew below it."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is None:
        yield
        return
    with tqdm.tqdm.external_write_mode():
        yield


def end_bars() -> None:
    """Close all bars, also Lightning's: what is written next is the last word."""
    tqdm = sys.modules.get("tqdm.std")
    for bar in list(tqdm.tqdm._instances) if tqdm is not None else ():
        bar.close()
