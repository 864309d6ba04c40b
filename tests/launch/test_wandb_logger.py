"""W&B never stops or stalls a run: without a network it is offline, without a key the run does not begin."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from lightning_tas.commands.config import Config
from lightning_tas.errors import UserError
from lightning_tas.launch import wandb_logger as module
from lightning_tas.launch.run_folder import RunFolder


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No key, no proxy, no cache."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(module, "getproxies", dict)
    module.reachable.cache_clear()
    return monkeypatch


def test_reachable(clean: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert module.reachable(f"http://127.0.0.1:{port}")
        clean.setattr(module, "getproxies", lambda: {"https": f"127.0.0.1:{port}"})
        assert module.reachable("https://nowhere.invalid"), "the proxy is what must answer"
    began = time.monotonic()
    assert not module.reachable("http://127.0.0.1:9")
    assert time.monotonic() - began < module.PROBE_SECONDS + 1


def test_without_a_network_the_run_is_offline(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean.setattr(module, "address", lambda: "http://127.0.0.1:9")
    config = Config(logger="wandb")
    module.check_wandb(config)  # no key is no obstacle then
    with pytest.warns(UserWarning, match="does not answer"):
        logger = module.wandb_logger(config, RunFolder(tmp_path / "recipe" / "run"), "supernet")
    logger.experiment.finish()
    assert list(tmp_path.glob("recipe/run/wandb/offline-run-*"))


def test_with_a_network_a_key_is_needed(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        clean.setattr(module, "address", lambda: f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UserError, match="no API key"):
            module.check_wandb(Config(logger="wandb"))
        clean.setenv("WANDB_API_KEY", "x" * 40)
        module.check_wandb(Config(logger="wandb"))


def test_the_variable_of_wandb_counts(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("WANDB_MODE", "offline")
    config = Config()
    assert module.mode(config) == "offline"
    config.wandb.mode = "disabled"
    assert module.mode(config) == "disabled"
