"""What the tests of loggers share: a machine without W&B settings of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_tas.launch.run_folder import RunFolder


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """No key, no proxy, no settings; W&B begins anew before and after."""
    import wandb

    wandb.teardown()  # first, as it names its service in the environment, which is put back afterwards
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["http_proxy", "HTTP_PROXY", "NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    yield monkeypatch
    wandb.teardown()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of the run `run` of the recipe `recipe`."""
    return RunFolder(tmp_path / "runs" / "recipe" / "run").create()
