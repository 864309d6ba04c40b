"""A job of a sweep ends with the sweep, however that ends: it watches a pipe whose other end the sweep holds.

A sweep that is killed can tell nobody, and its jobs, in sessions of their own, would train on. Imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "LIGHTNING_TAS_SWEEP"
"""The job's end of the pipe, by number."""
PATIENCE_SECONDS = 60.0
"""How long a job that was told to stop may take to write its checkpoint."""


def follow_sweep() -> None:
    """Where a sweep has started this process, stop it and all of its group (SIGTERM, which saves) when that is gone."""
    handle = os.environ.pop(VARIABLE, None)
    if handle is not None:
        threading.Thread(target=_watch, args=(int(handle),), name="follow sweep", daemon=True).start()


def _watch(handle: int) -> None:
    os.read(handle, 1)  # returns when nobody holds the other end
    os.write(2, b"lightning_tas: the sweep of this job is gone, so it stops\n")
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE_SECONDS)
    os.killpg(0, signal.SIGKILL)
