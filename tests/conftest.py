"""Shared fixtures: where the reference numbers lie, one thread per worker, several processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, and for the processes that tests start: several workers with several threads each would
# spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the reference numbers (golden/, vit_bench_101/), kept beside the checkout; CI must have it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"CI needs the reference numbers in {folder}")
        pytest.skip("the reference numbers are not beside this checkout")
    return folder


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Start functions and commands on several processes, ended with the test: see `tests/processes.py`."""
    if "processes" not in sys.modules:
        spec = importlib.util.spec_from_file_location("processes", ROOT / "tests" / "processes.py")
        assert spec is not None and spec.loader is not None
        sys.modules["processes"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["processes"])
    made = sys.modules["processes"].Processes(tmp_path / "processes")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def registered() -> Iterator[None]:
    """Proxies that a test registers are gone afterwards."""
    from lightning_tas.proxies import registry

    registry.proxies()
    before = dict(registry._PROXIES)
    yield
    registry._PROXIES.clear()
    registry._PROXIES.update(before)
