"""Data workers that live until their trainer lets them go.

Batch systems send their signals to every process of a job. A worker that obeyed would take the trainer down with an
error before it has saved.
"""

from __future__ import annotations

import os
import signal
import threading


def shield(worker: int = 0) -> None:
    """For a worker's start (torch's `worker_init_fn`): leave SIGUSR1 to the trainer, and SIGTERM unless it sends it.

    A worker whose trainer is gone ends by itself: torch looks every few seconds.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # inherited from the trainer, which would take a signal of ours for its own
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_obey, args=(os.getppid(),), daemon=True, name="sigterm-from-trainer").start()


def _obey(trainer: int) -> None:
    """Wait for a SIGTERM from `trainer` and end."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer:
        pass
    os._exit(0)
