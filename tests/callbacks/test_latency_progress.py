"""What is said while latencies are measured: on a terminal a bar, else lines, by one process and where it is asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.callbacks.search_build import latency_table
from lightning_tas.launch import group
from lightning_tas.pieces import Pieces
from lightning_tas.search.config import LimitsConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import small

GIVEN = LimitsConfig(latency=[None, 100], latency_repeats=3, latency_threads=1)


@pytest.mark.parametrize("terminal", [False, True])
def test_it_is_said_that_latency_is_measured(
    clock: Any, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr("lightning_tas.progress.EVERY", 0.0)  # a minute
    table = latency_table(small.make_net(), GIVEN, None)
    networks = len(Pieces(table.space).examples(deep=True)) + 16
    said = capsys.readouterr().err
    if terminal:
        assert f"latency of {networks} networks:   0%" in said and "measuring" not in said
        return
    first, *rest = said.splitlines()
    assert first == f"measuring the latency of {networks} networks, 3 passes each, on cpu with 1 thread ..."
    assert len(rest) == 2 * networks and rest[networks - 1] == "latency: 50% of the passes after 0 min"


@pytest.mark.parametrize("kind", ["kept", "unasked", "another process"])
def test_nothing_is_said(
    clock: Any, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net = small.make_net()
    if kind == "kept":
        latency_table(net, GIVEN, tmp_path)
        assert "measuring" in capsys.readouterr().err
    monkeypatch.setattr(group, "rank", lambda: int(kind == "another process"))
    latency_table(net, GIVEN, tmp_path, progress=kind != "unasked")
    assert capsys.readouterr().err == ""
