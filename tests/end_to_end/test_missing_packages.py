"""Without wandb and deepspeed everything works but the recipes that ask for them; these fail early and by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, arguments

BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from lightning_tas.commands.entry import main
raise SystemExit(main("fit", sys.argv[1:]))
"""


def fit_without(names: list[str], *given: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=names), *given],
        env=environment, text=True, capture_output=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_study_needs_neither(tmp_path: Path) -> None:
    done = fit_without(["wandb", "deepspeed"], *arguments(tmp_path, "a", "trainer.max_epochs=1"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart" / "a" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "override"), [("wandb", "logger=wandb"), ("deepspeed", "trainer.strategy=deepspeed_stage_2")]
)
def test_who_asks_for_it_is_told_by_name(tmp_path: Path, package: str, override: str) -> None:
    done = fit_without([package], *arguments(tmp_path, "a", override))
    assert done.returncode == 2
    assert f"pip install {package}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
