"""The one place from which commands speak on standard output."""

from __future__ import annotations

import sys

from lightning_tas.launch import group, log


def say(text: str, bar: bool = False) -> None:
    """Write `text` and a line end to standard output at once, so that it keeps its place among progress bars.

    bar: a progress bar is under way, whose line is left to it. Of several processes the first one speaks.
    """
    if group.rank() > 0:
        return
    log.note(text)
    sys.stdout.write(("\n" if bar else "") + text + "\n")
    sys.stdout.flush()
