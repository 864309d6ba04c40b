"""Shared fixtures: where the reference numbers lie, one thread per worker."""

from __future__ import annotations

import os
from pathlib import Path

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
