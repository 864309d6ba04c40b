"""Processes of a launcher meet at rank 0's store and at nothing else that listens on its port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_tas.errors import UserError
from lightning_tas.launch import meeting
from lightning_tas.launch.meeting import meeting_place, plain

HOST = "127.0.0.1"


@pytest.fixture(params=["a program that says nothing", "the store of another run"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that something else serves."""
    monkeypatch.setattr(meeting, "HELLO_SECONDS", 0.3)
    with socket.create_server((HOST, 0)) as listener:
        port = int(listener.getsockname()[1])
        if request.param.endswith("nothing"):
            yield port
            return
    store = TCPStore(HOST, port, None, True, timedelta(seconds=5), wait_for_workers=False)
    store.set("here", "")
    yield port


def test_a_port_in_use_is_told_at_once_on_every_process(taken: int) -> None:
    began = time.monotonic()
    for rank in range(3):
        with pytest.raises(UserError, match=rf"^launch: port {taken} of {HOST} is in use .*MASTER_PORT") as told:
            meeting_place(rank, 3, HOST, taken, 600)
        assert getattr(told.value, "lightning_tas_silent", False) == (rank == 2)
    assert time.monotonic() - began < 20


def test_they_meet_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = int(listener.getsockname()[1])
    places: dict[int, Any] = {}

    def come(rank: int) -> None:
        places[rank] = meeting_place(rank, 2, HOST, port, 20)

    second = threading.Thread(target=come, args=(1,))
    second.start()
    time.sleep(0.3)
    come(0)
    second.join(20)
    places[0].set("key", "value")
    assert places[1].get("key") == b"value"


def test_nobody_comes(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = int(listener.getsockname()[1])
    with pytest.raises(UserError, match=r"process 1 of 2 could not meet .* within 1 s \(Connection refused\); start"):
        meeting_place(1, 2, HOST, port, 1)
    assert capfd.readouterr() == ("", "")  # no frames of C++


def test_what_torch_says_in_a_line() -> None:
    gloo = (
        "[/__w/gloo/tcp/pair.cc:545] Read error [127.0.0.1]:63192: Connection reset by peer. This is typically caused"
    )
    assert plain(RuntimeError(gloo)) == "Read error [127.0.0.1]:63192: Connection reset by peer"
    frames = "Timed out.\nException raised from f at a.cpp:1 (most recent call first):\nframe #0: c10::Error"
    assert plain(RuntimeError(frames)) == "Timed out" and plain(RuntimeError()) == "RuntimeError"
