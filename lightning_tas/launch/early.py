"""SIGUSR1 while a command still starts: it waits until the run has handlers, instead of ending the process.

Batch systems send it by the clock, and imports take long on shared file systems. Imports nothing heavy.
"""

from __future__ import annotations

import signal
import threading


def hold_save_signal() -> None:
    """Let a SIGUSR1 wait from here on."""
    if _main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def take_save_signal() -> None:
    """Handle it now, if it has come, and at once from here on."""
    if _main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def drop_save_signal() -> None:
    """The command ends, and there is nothing to save: forget one that waits."""
    if _main_thread() and signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        signal.sigtimedwait([signal.SIGUSR1], 0)
        take_save_signal()


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
