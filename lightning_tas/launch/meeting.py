"""Where the processes of a launcher meet: a key-value store that rank 0 serves, or torchrun's agent.

torch waits for a server by itself, too, but takes any program that listens on the port for one, and reports with pages
of C++ frames that nobody came.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_tas.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

HELLO_SECONDS = 30.0
"""How long what listens on the port may take to prove to be rank 0 of this run."""
ADVICE = "start the same command on every node, by torchrun or srun"


def meeting_place(rank: int, count: int, host: str, port: int, seconds: float) -> Store:
    """The store of process `rank` of `count`, once rank 0 serves it.

    Raises:
        UserError: the port is taken by another program; nobody serves it within so many seconds.
    """
    from torch.distributed import PrefixStore

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agents(rank, count, host, port, seconds)
    run = "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    store = _serve(host, port, seconds) if rank == 0 else _visit(rank, count, host, port, seconds, f"{run}/here")
    if rank == 0:
        store.set(f"{run}/here", "")
    return PrefixStore(run, store)


def _agents(rank: int, count: int, host: str, port: int, seconds: float) -> Store:
    """torchrun's own, which is there before its workers are."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined]  # not in its __all__

    try:
        store: Store = next(rendezvous("env://", rank, count, timeout=timedelta(seconds=seconds)))[0]
    except RuntimeError as error:
        raise _nobody(rank, count, host, port, seconds, plain(error)) from None
    return store


def _serve(host: str, port: int, seconds: float) -> TCPStore:
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise _taken(host, port) from None
        raise UserError(f"launch: process 0 cannot listen at {host}:{port} ({plain(error)})") from None


def _visit(rank: int, count: int, host: str, port: int, seconds: float, key: str) -> TCPStore:
    """Connect to rank 0, which has set `key`; to nobody else, who might never answer."""
    from torch.distributed import TCPStore

    end, reason = time.monotonic() + seconds, ""
    while True:
        try:
            socket.create_connection((host, port), 2).close()
            break
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > end:
            raise _nobody(rank, count, host, port, seconds, reason)
        time.sleep(0.25)
    answers: queue.Queue[TCPStore | None] = queue.Queue()

    def ask() -> None:
        try:
            store = TCPStore(host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)
            store.wait([key], timedelta(seconds=HELLO_SECONDS))
            answers.put(store)
        except RuntimeError:
            answers.put(None)

    # In a thread: torch waits without an end for the answer of a program that is no store.
    threading.Thread(target=ask, name="meeting", daemon=True).start()
    try:
        store = answers.get(timeout=2 * HELLO_SECONDS)
    except queue.Empty:
        store = None
    if store is None:
        taken = _taken(host, port)
        taken.lightning_tas_silent = rank > 1  # type: ignore[attr-defined]  # rank 0 says it too, where it has come
        raise taken
    return store


def _taken(host: str, port: int) -> UserError:
    return UserError(
        f"launch: port {port} of {host} is in use by another program; set MASTER_PORT to a free one for all processes"
    )


def _nobody(rank: int, count: int, host: str, port: int, seconds: float, reason: str) -> UserError:
    return UserError(
        f"launch: process {rank} of {count} could not meet the others at {host}:{port} within {seconds:.0f} s "
        f"({reason}); {ADVICE}"
    )


def plain(error: BaseException) -> str:
    """What an error of torch's says, in a line, without its place in C++ and its advice."""
    text = str(error).partition("Exception raised from")[0].partition("This is typically")[0]
    return " ".join(re.sub(r"\[/\S+:\d+\]", "", text).split()).rstrip(".") or type(error).__name__
