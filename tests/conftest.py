"""Shared fixtures: where the reference numbers lie, one thread per worker, several processes."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
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
def flip() -> Callable[[Path], None]:
    """Change one bit of a file: of torch's in the middle of its largest tensor, which torch reads without a word."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        place = len(content) // 2
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                entry = max(archive.infolist(), key=lambda info: ("/data/" in info.filename, info.file_size))
            # A local header is 30 bytes, name and extra field; a byte behind its half is well inside the data.
            place = entry.header_offset + entry.file_size // 2 + 200
        content[place] ^= 1
        path.unlink()  # another name of the same file stays as it is
        path.write_bytes(content)

    return change


@pytest.fixture
def registered() -> Iterator[None]:
    """Proxies that a test registers are gone afterwards."""
    from lightning_tas.proxies import registry

    registry.proxies()
    before = dict(registry._PROXIES)
    yield
    registry._PROXIES.clear()
    registry._PROXIES.update(before)


class Clock:
    """Moves by what the pieces that run are said to take; `slow` is how much the machine is held up."""

    def __init__(self) -> None:
        self.now = 0
        self.slow = 1.0
        self.waits = 0

    def stamp(self) -> int:
        return self.now

    def wait(self) -> None:
        self.waits += 1

    def between(self, begin: int, end: int) -> int:
        return end - begin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The stopwatch of latency, which only moves when a piece of a network runs: a table is exact by it."""
    from lightning_tas import latency
    from lightning_tas.supernets.blocks import Block, PatchEmbed
    from lightning_tas.supernets.image_network import ImageNetwork
    from lightning_tas.supernets.pit import Pool

    found = Clock()

    def takes(owner: Any, name: str, nanoseconds: Callable[[Any], int]) -> None:
        run = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.now += round(nanoseconds(self) * found.slow)
            return run(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    takes(Block, "forward", lambda b: 5_000 + 7 * b.attn.qkv.weight.numel() + 3 * b.mlp.fc1.weight.numel())
    takes(PatchEmbed, "forward", lambda p: 1_000 * p.proj.weight.shape[0])
    takes(Pool, "forward", lambda p: 11 * p.fc.weight.numel())
    takes(ImageNetwork, "forward_head", lambda n: 13 * n.embed_dim)
    monkeypatch.setattr(latency, "stopwatch", lambda device: found)
    return found
