"""Run functions and commands on several processes, with an end: what the tests of distributed behaviour share.

Tests get it as the fixture `processes` (see `tests/conftest.py`). Started as a script this file is one of the
processes: it joins the group, calls a function of a test file and leaves what it returned in a file. Imports are most
of the time of a small test, so a process can be a fork of one that has imported everything: see `serve`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "LIGHTNING_TAS_TEST_PROCESS"
# What a launcher tells its processes: it must not leak from this process (or from a test before) into others.
LAUNCHER = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "PL_GLOBAL_SEED", "TORCHELASTIC_RUN_ID", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR",
    "LIGHTNING_TAS_RUN", "WANDB_SERVICE",
)  # fmt: skip


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Process:
    """A started command; what it prints lies in files, so that it never waits for a reader."""

    def __init__(self, argv: Sequence[str], folder: Path, env: Mapping[str, str], cwd: Path) -> None:
        folder.mkdir(parents=True)
        self.argv, self.folder = list(argv), folder
        self.mark = f"{MARK}={folder}\0".encode()
        self.pid = self._start({**env, MARK: str(folder)}, cwd)

    def _start(self, env: Mapping[str, str], cwd: Path) -> int:
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            # A session of its own: signals for it do not reach pytest.
            self._popen = subprocess.Popen(self.argv, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True)
        return self._popen.pid

    @property
    def stdout(self) -> str:
        """What it has printed until now."""
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has printed to stderr until now."""
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs, -N after signal N."""
        return self._popen.poll()

    def send(self, number: int) -> None:
        """Send a signal to it, not to what it started."""
        if self.status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it and everything that it started, also what outlived it."""
        # Descendants by a mark in their environment: a launcher's workers lead sessions of their own.
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while self.status is None:
            assert time.monotonic() < end, self.report()
            time.sleep(0.005)

    def descendants(self) -> list[int]:
        """Ids of the running processes that it has started, directly or not."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != self.pid and self.mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def report(self) -> str:
        """Its command and the ends of its output, for the message of a failing test."""
        return f"{' '.join(self.argv)}\n-- status {self.status}\n{self.stdout[-4000:]}\n{self.stderr[-6000:]}"


class Forked(Process):
    """The same for ``python -m MODULE ...`` or ``python SCRIPT ...``, as a fork of the process that has the imports."""

    def _start(self, env: Mapping[str, str], cwd: Path) -> int:
        return server().fork(self.argv, env, cwd, self.folder)

    @property
    def status(self) -> int | None:
        """As above; the server leaves it in a file."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder / "status").read_text())
        return None


class Server:
    """A running `serve`, and the way to ask it for forks; it ends with this process."""

    def __init__(self) -> None:
        given = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
        given |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(given)}
        self._popen = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given
        )

    def fork(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, folder: Path) -> int:
        """Start a process; its id."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(json.dumps([list(argv), dict(env), str(cwd), str(folder)]) + "\n")
        self._popen.stdin.flush()
        return int(self._popen.stdout.readline())


@cache
def server() -> Server:
    """The one of this process, started at first use."""
    return Server()


def _path(env: Mapping[str, str]) -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])


class Processes:
    """Starts processes; `close` ends all of them, whatever happened.

    Every process has OMP_NUM_THREADS=1, this checkout on its path and no trace of another launcher in its environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Process] = []

    def command(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, fork: bool = False
    ) -> Process:
        """Start a command, without waiting. "python" as its first word is this interpreter.

        With `fork` it need not import what all commands import, and pays for nothing but its work. What an environment
        variable or a signal does while modules are imported is for a true process.
        """
        words = [str(word) for word in argv]
        if words[0] == "python":
            words[0] = sys.executable
        given = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
        given |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(given), **(env or {})}
        made = Forked if fork else Process
        process = made(words, self.folder / f"{len(self.started):02d}", given, cwd or self.folder)
        self.started.append(process)
        return process

    def torchrun(
        self, *argv: str | Path, nodes: int = 2, per_node: int = 1, env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> list[Process]:  # fmt: skip
        """Start ``torchrun ... argv`` once for each of `nodes` "nodes" of this machine, with a static rendezvous.

        `argv` begins with a script, or with "-m" and a module.
        """
        port = free_port()
        return [
            self.command(
                "python", "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}",
                f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", *argv, env=env, cwd=cwd,
            )
            for node in range(nodes)
        ]  # fmt: skip

    def wait(self, processes: Sequence[Process], timeout: float = 120.0, check: bool = True) -> list[int]:
        """Exit statuses once all have ended; AssertionError with their output after `timeout` seconds.

        With `check` also as soon as one of them fails: the others may wait for it for ever.
        """
        end = time.monotonic() + timeout
        while any(process.status is None for process in processes):
            failed = check and any(process.status for process in processes)
            if failed or time.monotonic() > end:
                break
            time.sleep(0.05)
        running = [process for process in processes if process.status is None]
        report = "\n\n".join(process.report() for process in processes)
        for process in running:
            process.kill()
        late = time.monotonic() > end and running
        assert not late, f"still running after {timeout} s\n{report}"
        assert not check or not any(process.status for process in processes), report
        return [int(process.status or 0) for process in processes]

    def run(
        self, target: Callable[..., Any] | str, n: int, *args: Any, timeout: float = 120.0, group: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call a function on `n` new processes; what each rank returned, in the order of ranks.

        Args:
            target: a function at the top level of a file (a test's own is fine), or "path/to/file.py:name". The file is
                imported afresh in every process, under no package.
            n: number of processes, as one node: RANK, LOCAL_RANK, WORLD_SIZE and the master's address are set, so that
                Lightning's ``Trainer(devices=n)`` uses these processes and starts none.
            args: given to the function; they and what it returns travel by pickle.
            timeout: seconds; AssertionError with all output when it is over, or as soon as a rank fails.
            group: initialise a gloo process group first.
            env: further environment variables.
        """
        import torch

        name = target if isinstance(target, str) else f"{target.__code__.co_filename}:{target.__qualname__}"
        folder = self.folder / f"call-{len(self.started):02d}"
        folder.mkdir(parents=True)
        torch.save(args, folder / "args")
        port, ranks = free_port(), []
        for rank in range(n):
            place = {
                "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            given = {**{key: str(value) for key, value in place.items()}, **(env or {})}
            argv = ("python", __file__, name, folder, "gloo" if group else "")
            ranks.append(self.command(*argv, env=given, fork=True))
        self.wait(ranks, timeout)
        return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(n)]

    def close(self) -> None:
        """End everything."""
        for process in self.started:
            process.kill()


def load(path: Path) -> ModuleType:
    """The module of a file outside of any package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for pickling what it defines, and for dataclasses
    spec.loader.exec_module(module)
    return module


def main(target: str, folder: str, backend: str) -> None:
    """Be one process of `Processes.run`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    path, name = target.rsplit(":", 1)
    if backend:
        dist.init_process_group(backend)
    try:
        function = getattr(load(Path(path)), name)
        value = function(*torch.load(Path(folder) / "args", weights_only=False))
        torch.save(value, Path(folder) / f"result-{os.environ['RANK']}")
    except BaseException:
        # At once and without tidying up: that would wait for the other ranks.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def serve() -> None:
    """Import what the commands import, then fork a process for every line of stdin; print its id.

    A line is [argv, environment, working folder, folder for stdout, stderr and, at the end, status] as JSON.
    """
    # Nothing may be computed before the forks: threads do not survive them.
    import lightning_tas.commands.evaluate
    import lightning_tas.commands.fit
    import lightning_tas.commands.phases
    import lightning_tas.launch.strategies

    filters = list(warnings.filters)
    lightning_tas.launch.strategies.prepare_deepspeed(on_cpu=True)
    warnings.filters[:] = filters  # type: ignore[index]
    folders: dict[int, Path] = {}

    def reap(*_: object) -> None:
        for pid, folder in list(folders.items()):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                del folders[pid]
                (folder / "status.new").write_text(str(os.waitstatus_to_exitcode(ended[1])))
                (folder / "status.new").rename(folder / "status")

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        argv, env, cwd, folder = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            folders[pid] = Path(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if not pid:
            return be(argv, env, cwd, Path(folder))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def be(argv: list[str], env: dict[str, str], cwd: str, folder: Path) -> None:
    """Go on as the process that ``argv`` starts: "python -m MODULE ..." or "python SCRIPT ..."."""
    os.setsid()
    for number, file in enumerate((os.devnull, folder / "stdout", folder / "stderr")):
        opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.orig_argv = argv
    module = argv[2] if argv[1] == "-m" else ""
    sys.path[0] = cwd if module else str(Path(argv[1]).parent)
    sys.argv = argv[2 if module else 1 :]
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[1], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
