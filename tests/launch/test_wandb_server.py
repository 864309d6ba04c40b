"""Whether W&B can be used is known in seconds, and W&B never stops or stalls a run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightning_tas.commands.config import Config
from lightning_tas.errors import UserError
from lightning_tas.launch import wandb_logger, wandb_server
from lightning_tas.launch.loggers import RunLoggers, check_loggers
from lightning_tas.launch.run_folder import RunFolder

from .wandb_records import Attempt, attempts

CLOSED = "http://127.0.0.1:9"
SECONDS = 25
"""Generous for a loaded machine; W&B alone tries for a minute and a half."""


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that answers, but not as W&B does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(404)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def log_one_row(config: Config, folder: RunFolder) -> list[str]:
    """Log a row and end; return the warnings about W&B."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loggers = RunLoggers(config, folder)
        for logger in loggers.for_phase("supernet", 0, 0):
            logger.log_metrics({"train/loss": 1.5, "epoch": 0}, step=0)
        loggers.close()
    return [str(w.message) for w in caught if str(w.message).startswith("wandb")]


def test_any_answer_counts_and_silence_does_not(no_wandb: pytest.MonkeyPatch, refusing: str) -> None:
    assert wandb_server.reachable(refusing)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in (CLOSED, f"http://127.0.0.1:{silent.getsockname()[1]}"):
            began = time.monotonic()
            assert not wandb_server.reachable(url, seconds=0.5)
            assert time.monotonic() - began < 2.5
    no_wandb.setenv("http_proxy", refusing)
    no_wandb.delenv("no_proxy", raising=False)
    no_wandb.delenv("NO_PROXY", raising=False)
    assert wandb_server.reachable("http://nowhere.invalid"), "the proxy is what must answer"


@pytest.mark.slow
def test_without_a_network_the_run_is_offline(no_wandb: pytest.MonkeyPatch, folder: RunFolder) -> None:
    no_wandb.setenv("WANDB_BASE_URL", CLOSED)
    began = time.monotonic()
    said = log_one_row(Config(logger="wandb"), folder)
    assert time.monotonic() - began < SECONDS
    assert len(said) == 1
    assert "does not answer" in said[0] and f"wandb sync {folder.path / 'wandb'}" in said[0]
    (attempt,) = attempts(folder.path)
    assert attempt.column("train/loss") == [1.5]


def test_without_a_key_the_run_is_offline(no_wandb: pytest.MonkeyPatch, folder: RunFolder, refusing: str) -> None:
    no_wandb.setenv("WANDB_BASE_URL", refusing)
    check_loggers(Config(logger="wandb"))
    said = log_one_row(Config(logger="wandb"), folder)
    assert len(said) == 1
    assert "no API key" in said[0]
    (attempt,) = attempts(folder.path)
    assert attempt.column("train/loss") == [1.5]


def test_a_server_that_refuses_makes_the_run_offline(
    no_wandb: pytest.MonkeyPatch, folder: RunFolder, refusing: str
) -> None:
    no_wandb.setenv("WANDB_BASE_URL", refusing)
    no_wandb.setenv("WANDB_API_KEY", "x" * 40)
    began = time.monotonic()
    said = log_one_row(Config(logger="wandb"), folder)
    assert time.monotonic() - began < SECONDS
    assert len(said) == 1
    assert "did not accept" in said[0]
    (attempt,) = attempts(folder.path)
    assert attempt.column("train/loss") == [1.5]


def test_the_death_of_its_service_costs_a_warning(no_wandb: pytest.MonkeyPatch, folder: RunFolder) -> None:
    """Slurm signals every process of a job."""
    config = Config(logger="wandb")
    config.wandb.mode = "offline"
    loggers = RunLoggers(config, folder)
    (metrics, board) = loggers.for_phase("supernet", 0, 0)
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    for line in children.stdout.splitlines():
        if "wandb-core" in line:
            os.kill(int(line.split()[0]), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(200):
            board.log_metrics({"train/loss": 1.0}, step=step)
            metrics.log_metrics({"train/loss": 1.0}, step=step)
            time.sleep(0.005)
        began = time.monotonic()
        loggers.close(143)
    assert time.monotonic() - began < 5
    assert len([w for w in caught if "nothing more is logged there" in str(w.message)]) == 1
    assert len(folder.metrics.read_text().splitlines()) == 201


def test_the_variable_of_wandb_counts(no_wandb: pytest.MonkeyPatch) -> None:
    config = Config()
    assert wandb_logger.mode(config) == "online"
    no_wandb.setenv("WANDB_MODE", "offline")
    assert wandb_logger.mode(config) == "offline"
    config.wandb.mode = "disabled"
    assert wandb_logger.mode(config) == "disabled"


def test_disabled_leaves_nothing(no_wandb: pytest.MonkeyPatch, folder: RunFolder) -> None:
    no_wandb.setenv("WANDB_MODE", "disabled")
    assert log_one_row(Config(logger="wandb"), folder) == []
    assert sorted(path.name for path in folder.path.iterdir()) == ["metrics.csv"]


def test_a_missing_package_is_named(no_wandb: pytest.MonkeyPatch) -> None:
    no_wandb.setattr(wandb_logger.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "tensorboard"):
        with pytest.raises(UserError, match=f"pip install {name}"):
            check_loggers(Config(logger=["csv", name]))
    check_loggers(Config(logger="csv"))


@pytest.mark.parametrize("name", ["run", "ü=+" + "long" * 40])
def test_an_id_is_valid_kept_and_never_used_again(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "recipe" / name).create()
    config = Config(logger="wandb")
    made = wandb_logger.WandbRun(config, folder).id
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", made) and len(f"selection-{made}") <= 128
    assert wandb_logger.WandbRun(config, folder).id == made
    shutil.rmtree(folder.path)
    assert wandb_logger.WandbRun(config, folder.create()).id != made


ONE_ROW = """
import os, signal, sys
from pathlib import Path
from lightning_tas.commands.config import Config
from lightning_tas.launch.loggers import RunLoggers
from lightning_tas.launch.run_folder import RunFolder

config = Config(logger="wandb")
config.wandb.mode = "offline"
loggers = RunLoggers(config, RunFolder(Path(sys.argv[1])))
for logger in loggers.for_phase("supernet", 0, 0):
    logger.log_metrics({"train/loss": 1.5, "epoch": 0}, step=0)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
loggers.close()
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_where_another_programs_service_still_holds_it(
    no_wandb: pytest.MonkeyPatch, folder: RunFolder
) -> None:
    """A program that uses W&B itself, a sweep for example, hands its service down to the runs that it starts."""
    import wandb

    no_wandb.delenv("WANDB_SERVICE", raising=False)
    wandb.teardown()
    wandb.setup().ensure_service()
    try:
        assert "WANDB_SERVICE" in os.environ
        for ending, status in (("killed", -signal.SIGKILL), ("ended", 0)):
            command = [sys.executable, "-c", ONE_ROW, str(folder.path), ending]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == status, done.stderr
            assert "in use" not in done.stderr and "nothing more" not in done.stderr
        # The attempt that was refused has left an empty folder.
        written = sorted(path.parent for path in (folder.path / "wandb").glob("offline-run-*/*.wandb"))
        assert len(written) == 2 and Attempt(written[-1]).column("train/loss") == [1.5]
    finally:
        wandb.teardown()
