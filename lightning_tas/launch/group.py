"""The processes of a run that torchrun or Slurm started: who am I, what did rank 0 decide, has anybody failed.

They meet in a key-value store before anything else happens, so that a mistake on one of them, also in its command
line, ends all of them with one message and one status; later the process group of training is built on the same
store (Lightning and DeepSpeed take a group that exists). Agreement goes through the store, not through collectives: a
rank that fails while the others are in the middle of a step can still say so, and waiting heeds signals.

Everything here does nothing on one process, and before Lightning itself starts the others (`trainer.devices=2`
without a launcher); from its first fit on, its group is used.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from lightning_tas.errors import Stopped, UserError
from lightning_tas.launch import environment
from lightning_tas.launch.meeting import ADVICE, meeting_place, plain

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

JOIN_SECONDS = 600.0
"""How long the first process waits for the last one: nodes start minutes apart."""
AGREE_SECONDS = 7200.0
"""How long one process waits for another at work (a selection on rank 0); launchers notice those that are gone."""
FAREWELL_SECONDS = 10.0
"""How long one that ends waits for the others to hear why."""
GRACE_SECONDS = 5.0
"""How long a process may go on after another has failed: it may wait for it in a collective for ever."""
GRACE_ON_SIGNAL_SECONDS = 60.0
"""The same where a signal stops all of them: this one may be writing a checkpoint."""
INTERRUPTED, TERMINATED = 130, 143
"""128 + signal, as shells say it."""
_PREFIX = "lightning_tas"


@dataclass(frozen=True)
class Failure:
    """What ended the first process that failed, as the others hear of it."""

    rank: int
    message: str
    status: int
    kind: str  # user, stopped, or bug

    def error(self) -> UserError | Stopped:
        """The error that every other process ends with."""
        error = UserError(self.message) if self.kind == "user" else Stopped(self.message, self.status)
        agreed(error)
        if self.kind == "bug":
            error.lightning_tas_silent = True  # type: ignore[union-attr]  # its process shows the traceback
        return error


class Line:
    """Talk between `size` processes through a store. All of them make the same calls in the same order."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._calls = 0
        self._ending = threading.Event()  # this process knows that the run ends
        self._parent = os.getppid()
        self._watcher = threading.Thread(target=self._watch, name="lightning_tas group", daemon=True)
        self._watcher.start()

    def broadcast(self, value: T) -> T:
        """Rank 0's value; plain Python objects."""
        key = self._next()
        if self.rank == 0:
            self.store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are fine
            return value
        self._await(lambda: self.store.check([key]))
        received: T = pickle.loads(self.store.get(key))
        return received

    def barrier(self) -> None:
        """Wait until every process has come here."""
        key = self._next()
        self.store.add(key, 1)
        self._await(lambda: self.store.add(key, 0) >= self.size)

    def failure(self) -> Failure | None:
        """What the first process that failed has said, None while none has."""
        if not self.store.check(["failed"]):
            return None
        found: Failure = pickle.loads(self.store.get("failed"))
        return found

    def fail(self, failure: Failure) -> Failure:
        """Make `failure` known, and return the one that counts: another may have been first."""
        self._ending.set()
        release_children()
        if self.store.add("failures", 1) == 1:
            self.store.set("failed", pickle.dumps(failure))  # type: ignore[arg-type]
        _poll(lambda: self.store.check(["failed"]), FAREWELL_SECONDS)
        return self.failure() or failure

    def tell(self) -> bool:
        """Whether this process is the one to print the message: rank 0, or another if rank 0 cannot."""
        if self.rank > 0:
            _poll(lambda: self.store.check(["told"]), FAREWELL_SECONDS)
        first = self.store.add("tellers", 1) == 1
        self.store.set("told", "")
        return first

    def leave(self, children: bool) -> None:
        """Part: rank 0 goes last, because the store may live in its process.

        `children` of rank 0 stay a little longer when the run has failed: Lightning would kill rank 0 for their status.
        """
        self._ending.set()
        self._watcher.join()
        failed = self.store.check(["failed"])
        self.store.add("left", 1)
        if self.rank == 0:
            _poll(lambda: self.store.add("left", 0) >= self.size, FAREWELL_SECONDS)
        elif failed and children:
            _poll(lambda: os.getppid() != self._parent, FAREWELL_SECONDS)

    def _next(self) -> str:
        self._calls += 1
        return f"call/{self._calls}"

    def _await(self, ready: Callable[[], bool]) -> None:
        def settled() -> bool:
            return ready() or self.store.check(["failed"])

        try:
            in_time = _poll(settled, AGREE_SECONDS)
            failure = self.failure()
            if failure is not None and not ready():
                self._ending.set()
                release_children()
                raise failure.error()
        except RuntimeError as error:
            raise Stopped(f"lost the process or the node that started first ({plain(error)})", 1) from None
        if not in_time:
            raise Stopped(f"another process of this run did not answer for {AGREE_SECONDS:.0f} s", 1)

    def _watch(self) -> None:
        """End this process when another has failed, or has taken the store with it, and the main thread hears nothing.

        Gloo notices a lost process at once, nccl after minutes, for which the GPU would be taken.
        """
        try:
            while not self._ending.wait(1.0):
                failure = self.failure()
                if failure is None:
                    continue
                release_children()
                signalled = failure.status in (INTERRUPTED, TERMINATED)
                if self._ending.wait(GRACE_ON_SIGNAL_SECONDS if signalled else GRACE_SECONDS):
                    return
                if self.tell() and failure.kind != "bug":
                    sys.stderr.write(f"\nlightning_tas: {failure.message}\n")
                    sys.stderr.flush()
                os._exit(failure.status)
        except RuntimeError:  # the store is gone with the process that held it
            if not self._ending.wait(GRACE_SECONDS):
                sys.stderr.write("\nlightning_tas: lost the process or the node that started first\n")
                sys.stderr.flush()
                os._exit(1)


_line: Line | None = None


def rank() -> int:
    """This process among all of the run, also before any group exists; 0 is the one that writes and prints."""
    return environment.rank() if _line is None else _line.rank


def size() -> int:
    """Number of processes that a launcher started, or that Lightning has started by now."""
    line = _current()
    return 1 if line is None else line.size


def meet() -> None:
    """Find the other processes that a launcher started; nothing happens where there are none, or a second time.

    Raises:
        UserError: not all of them came within `JOIN_SECONDS`; variables of the environment that make no sense.
    """
    global _line
    if _line is not None:
        return
    environment.check()
    mine, count = environment.rank(), environment.world_size()
    if count == 1:
        _tell_lightning(mine)
        return
    host, port = environment.address()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    from torch.distributed import PrefixStore

    store = meeting_place(mine, count, host, port, JOIN_SECONDS)
    with _lost():
        line = Line(PrefixStore(_PREFIX, store), mine, count)
        line.store.add("present", 1)
        if not _poll(lambda: line.store.add("present", 0) >= count, JOIN_SECONDS):
            present = line.store.add("present", 0)
            raise UserError(f"launch: {present} of {count} processes came within {JOIN_SECONDS:.0f} s; {ADVICE}")
    _line = line
    _tell_lightning(mine)


def _tell_lightning(rank: int) -> None:
    """Who speaks and writes in Lightning, which otherwise heeds variables of a launcher that is not there."""
    if any(name in os.environ for name in environment.READ_BY_LIGHTNING):
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = rank  # type: ignore[attr-defined]


def join(accelerator: str = "auto") -> None:
    """`meet`, and build the process group that training will use: nccl on this rank's GPU, gloo elsewhere."""
    meet()
    import torch

    if _line is None or torch.distributed.is_initialized():
        return
    # Nobody else's failure is heard while a process group is being built: all must be here before it is begun.
    _line.barrier()
    backend = "gloo"
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(environment.local_rank() % torch.cuda.device_count())
    with _lost():
        torch.distributed.init_process_group(backend, store=_line.store, rank=_line.rank, world_size=_line.size)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Inside, another process may die: that is no error of this one."""
    try:
        yield
    except RuntimeError as error:
        raise Stopped(f"lost another process of this run ({plain(error)})", 1) from None


def leave() -> None:
    """Take the group down, so that a process ends without torch's complaint; rank 0 goes last."""
    global _line
    line, _line = _line, None
    if line is None:
        # DeepSpeed makes a group for one process too.
        loaded = sys.modules.get("torch.distributed")
        if loaded is not None and loaded.is_available() and loaded.is_initialized():
            loaded.destroy_process_group()
        return
    import torch.distributed as dist

    # The communicator of a failed run may wait for processes that will not answer.
    failed = True
    with contextlib.suppress(RuntimeError):  # the store is gone with the process that held it
        failed = line.failure() is not None
    if dist.is_initialized() and not (failed and dist.get_backend() == "nccl"):
        dist.destroy_process_group()
    with contextlib.suppress(RuntimeError):
        line.leave(children=not environment.launched())


def broadcast(value: T) -> T:
    """What rank 0 gives; plain Python objects. Every process calls it."""
    line = _current()
    return value if line is None else line.broadcast(value)


def first(function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, where alone it runs; processes that Lightning has just started run it too."""
    line = _current()
    if line is None:
        return function()
    return line.broadcast(function() if line.rank == 0 else cast(T, None))


def claims(what: str) -> bool:
    """Whether this process is the first of all to say `what`; no other need be there."""
    line = _current()
    try:
        return line is None or line.store.add(f"said/{what}", 1) == 1
    except RuntimeError:  # the store is gone with the process that held it
        return True


def barrier() -> None:
    """Wait for all processes; raises their error when one of them has failed."""
    line = _current()
    if line is not None:
        line.barrier()


def together(function: Callable[[], T]) -> T:
    """Run `function` on every process, and go on only when it has succeeded on all of them.

    Raises:
        UserError, Stopped: the same on every process, whichever failed first. Only the process for which
            `speaks(error)` is true prints it.
    """
    try:
        result = function()
        barrier()
        return result
    except BaseException as error:
        settled = settle(error)
        if settled is error:
            raise
        raise settled from None


def settle(error: BaseException) -> BaseException:
    """Tell the others of `error`, and return what this process should end with: its own error, or an earlier one."""
    line = _current()
    if line is None or is_agreed(error):
        return error
    try:
        failure = line.fail(_failure_of(error, line.rank))
    except RuntimeError:  # the store is gone with the process that held it
        return error
    if failure.rank == line.rank:
        return agreed(error)
    return failure.error()


def speaks(error: BaseException) -> bool:
    """Whether this process is the one that prints `error`: one does, of all that end with it."""
    line = _current()
    if getattr(error, "lightning_tas_silent", False):
        return False
    if line is None or not is_agreed(error):
        return True
    try:
        return line.tell()
    except RuntimeError:
        return line.rank == 0


def is_lost(error: BaseException) -> bool:
    """Whether a collective ended with `error` because another process is gone."""
    text = str(error).lower()
    lost = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", "nccl")
    return isinstance(error, RuntimeError) and size() > 1 and any(sign in text for sign in lost)


def agreed(error: BaseException) -> BaseException:
    """Mark `error` as known to all processes."""
    error.lightning_tas_agreed = True  # type: ignore[attr-defined]
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether all processes know of `error`."""
    return getattr(error, "lightning_tas_agreed", False)


def release_children() -> None:
    """From here on processes end on purpose: Lightning must not kill this one because one that it started did so.

    It looks every few seconds for those that ended with a status other than 0, and every phase has a launcher of its
    own, of which only the first one knows them. One that is gone without a word is still noticed, by its connection.
    """
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            getattr(thread, "_child_processes", []).clear()


def _failure_of(error: BaseException, rank: int) -> Failure:
    if isinstance(error, UserError):
        return Failure(rank, str(error), 2, "user")
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, "interrupted", INTERRUPTED, "stopped")
    if isinstance(error, Stopped):
        return Failure(rank, str(error), error.status, "stopped")
    reason = " ".join(str(error).split()) or "no message"
    return Failure(rank, f"process {rank} ended with {type(error).__name__}: {reason}", 1, "bug")


def _current() -> Line | None:
    """The line of a launcher's processes, or of those that Lightning has started by now."""
    global _line
    if _line is None and "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            from torch.distributed.distributed_c10d import _get_default_store

            store = dist.PrefixStore(_PREFIX, _get_default_store())
            _line = Line(store, dist.get_rank(), dist.get_world_size())
    return _line


def _poll(ready: Callable[[], bool], seconds: float) -> bool:
    """Ask until `ready()` or the time is over, ever more rarely; in Python, so that signals are heeded."""
    end, pause = time.monotonic() + seconds, 0.005
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return True
