"""Processes that a launcher started agree, and end together when one of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_tas.errors import Stopped, UserError
from lightning_tas.launch import group
from lightning_tas.launch.compare import compare
from tests.processes import Processes, free_port

TORCHRUN = {"TORCHELASTIC_RUN_ID": "test"}


def _conversation() -> dict[str, Any]:
    group.join("cpu")
    rank = group.rank()
    heard: dict[str, Any] = {}
    heard["size"] = group.size()
    heard["broadcast"] = group.broadcast({"from": rank})
    heard["first"] = group.first(lambda: ("only rank", rank))
    heard["claims"] = (group.claims("once"), group.claims("once"))
    heard["together"] = group.together(lambda: rank * 10)
    compare("launch", {"seed": "0"})
    began = time.time()
    if rank == 1:
        time.sleep(0.5)
    group.barrier()
    heard["waited"] = rank == 1 or time.time() - began > 0.4

    def failing() -> None:
        if rank == 2:
            raise UserError("sampler.name: 'x' is not valid")

    try:
        group.together(failing)
    except UserError as error:
        heard["error"], heard["speaks"] = str(error), group.speaks(error)
    group.leave()
    return heard


@pytest.mark.slow
def test_three_processes_agree(processes: Processes) -> None:
    heard = processes.run(_conversation, 3, group=False, env=TORCHRUN, timeout=90)
    assert sorted(found.pop("claims") for found in heard) == [(False, False), (False, False), (True, False)]
    for rank, found in enumerate(heard):
        assert found == {
            "size": 3,
            "broadcast": {"from": 0},
            "first": ("only rank", 0),
            "together": rank * 10,
            "waited": True,
            "error": "sampler.name: 'x' is not valid",
            "speaks": rank == 0,
        }


def _mistake_before_the_group() -> tuple[float, str]:
    """Rank 1 fails at once, long before rank 0 wants a process group with it."""
    began = time.monotonic()

    def work() -> None:
        if group.rank() == 1:
            raise UserError("train.lr: -1.0 is not valid")
        time.sleep(1.5)
        group.join("cpu")

    group.meet()
    try:
        group.together(work)
    except UserError as error:
        return time.monotonic() - began, str(error)
    finally:
        group.leave()
    return time.monotonic() - began, "nothing"


@pytest.mark.slow
def test_a_mistake_is_heard_before_a_process_group_is_built(processes: Processes) -> None:
    heard = processes.run(_mistake_before_the_group, 2, group=False, env=TORCHRUN, timeout=90)
    assert [message for _, message in heard] == ["train.lr: -1.0 is not valid"] * 2
    assert max(seconds for seconds, _ in heard) < 30


def _other_settings() -> str:
    group.join("cpu")
    try:
        compare("launch", {"seed": str(group.rank() // 2), "step": "7"})
        return "nothing"
    except UserError as error:
        return str(error)
    finally:
        group.leave()


@pytest.mark.slow
def test_a_rank_with_other_settings_is_named_on_every_rank(processes: Processes) -> None:
    heard = processes.run(_other_settings, 3, group=False, env=TORCHRUN, timeout=90)
    assert len(set(heard)) == 1
    assert "process 2 differs from process 0: seed 1 (process 0: 0)." in heard[0] and "step" not in heard[0]


# Rank 0 sleeps as it would in a collective that rank 1 does not come to.
STUCK = """
import sys, time
from lightning_tas.errors import Stopped, UserError
from lightning_tas.launch import group
group.GRACE_SECONDS, group.FAREWELL_SECONDS = 1.0, 5.0
def act():
    if group.rank() == 0:
        time.sleep(60)
    raise Stopped('20 bad steps in a row', 3)
group.join("cpu")
try:
    group.together(act)
except (UserError, Stopped) as error:
    if group.speaks(error):
        sys.stderr.write(f"told by {{group.rank()}}: {{error}}\\n")
    sys.exit(getattr(error, "status", 2))
finally:
    group.leave()
"""


def test_a_process_that_waits_for_a_failed_one_ends_with_it(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    started = _start(processes, script, 2)
    assert processes.wait(started, timeout=90, check=False) == [3, 3]
    assert [process.stderr.count("20 bad steps in a row") for process in started] == [1, 0]


GONE = """
import os, signal, time
from lightning_tas.launch import group
group.GRACE_SECONDS = 0.5
group.join("cpu")
group.barrier()
if group.rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_process_that_waits_for_a_killed_first_one_ends(processes: Processes, tmp_path: Path) -> None:
    """As it would in a collective of nccl, which itself waits for minutes."""
    script = tmp_path / "gone.py"
    script.write_text(GONE)
    started = _start(processes, script, 2)
    assert processes.wait(started, timeout=50, check=False) == [-9, 1]
    assert "lost the process or the node that started first" in started[1].stderr


@pytest.mark.parametrize("on_purpose", [True, False])
def test_lightning_kills_no_process_for_children_that_end_on_purpose(on_purpose: bool) -> None:
    def child(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    parent, children = child("import time; time.sleep(60)"), [child("raise SystemExit(3)")]
    try:
        children[0].wait(30)
        observer = _ChildProcessObserver(parent.pid, list(children), sleep_period=1)
        observer.start()
        if on_purpose:
            group.release_children()
        observer.join(30)
        assert not observer.is_alive()
        if on_purpose:
            assert parent.poll() is None
        else:
            assert parent.wait(30) == -9
    finally:
        parent.kill()
        parent.wait()


ALONE = """
from lightning_tas.errors import UserError
from lightning_tas.launch import group
group.JOIN_SECONDS = 1.0
try:
    group.meet()
except UserError as error:
    raise SystemExit(str(error))
"""


@pytest.mark.slow
def test_a_process_that_never_comes_is_an_error(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    (only,) = _start(processes, script, 1, world=2)
    assert processes.wait([only], timeout=50, check=False) == [1]
    assert "of 2" in only.stderr and "start the same command on every node" in only.stderr


def test_nothing_happens_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    group.join("cpu")
    assert (group.rank(), group.size(), group.broadcast("x"), group.first(lambda: 1)) == (0, 1, "x", 1)
    group.barrier()
    error = Stopped("stopped", 143)
    assert group.settle(error) is error and group.speaks(error)
    with pytest.raises(UserError, match="mine"):
        group.together(lambda: _raise(UserError("mine")))


def _raise(error: Exception) -> None:
    raise error


def _start(processes: Processes, script: Path, n: int, world: int | None = None) -> list[Any]:
    """`n` of `world` processes as torchrun would start them; rank 0 holds the store."""
    port = str(free_port())
    return [
        processes.command(
            "python",
            script,
            env={
                **TORCHRUN,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world or n),
                "LOCAL_WORLD_SIZE": str(world or n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "PATH": os.environ["PATH"],
            },
            fork=True,
        )
        for rank in range(n)
    ]
