"""How many data workers there are, and that they live until their trainer lets them go.

Batch systems send their signals to every process of a job. A worker that obeyed would take the trainer down with an
error before it has saved.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading

from lightning_tas.launch.environment import layout

FEW = 256
"""So few images are read before workers have started."""
_MOST = 8
_IN_FLIGHT = 6  # batches: two that a worker prefetches and one under way, in training and in validation
_SHARED = "/dev/shm"


def processors() -> int:
    """How many of the machine's processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(batch_bytes: int, processes: int | None = None) -> int:
    """Workers for one of `processes` (None: those that a launcher started) on this machine: a processor each, to 8.

    Fewer where their batches of so many bytes would not fit into shared memory (64 MiB in a plain container); none on
    a single processor.
    """
    found = layout()
    cores = processors() // (processes or (found[0] if found is not None else 1))
    if cores < 2:
        return 0
    try:
        free = shutil.disk_usage(_SHARED).free // (processes or 1)
    except OSError:  # not Linux
        return min(cores, _MOST)
    return min(cores, _MOST, free // (_IN_FLIGHT * batch_bytes))


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
