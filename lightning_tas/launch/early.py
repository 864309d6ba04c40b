"""SIGUSR1 while a command still starts: it waits until the run has handlers, instead of ending the process.

Batch systems send it by the clock, and imports take long on shared file systems. Imports nothing heavy. A handler, not
a blocked signal: threads that somebody else has started would take it, and end the process.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_before: list[Any] = []  # the handler of before, while a command starts
_waiting: list[int] = []  # signals that have come meanwhile


def hold_save_signal() -> None:
    """Let a SIGUSR1 wait from here on; a sweep starts its jobs with the signal blocked, until they can."""
    if _main_thread() and not _before:
        _before.append(signal.signal(signal.SIGUSR1, _note) or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def take_save_signal() -> None:
    """Send one that waits to the handler that the run has by now."""
    if _main_thread() and _waiting and signal.getsignal(signal.SIGUSR1) is not _note:
        _waiting.clear()
        signal.raise_signal(signal.SIGUSR1)


def drop_save_signal() -> None:
    """The command ends, and there is nothing to save: forget one that waits."""
    if _main_thread() and _before:
        signal.signal(signal.SIGUSR1, _before.pop())
    _waiting.clear()


def _note(number: int, frame: FrameType | None) -> None:
    _waiting.append(number)


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
