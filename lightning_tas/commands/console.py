"""The one place from which commands speak on standard output."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write `text` and a line end to standard output at once, so that it keeps its place among progress bars."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
