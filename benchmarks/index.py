"""Seconds until every process knows which images there are: listing them, and reading the list that was kept.

    python benchmarks/index.py

Lists real class folders and webdataset shards of few images, and reads the kept list of ImageNet's 1,281,167 in several
processes at once. Files are made in a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from lightning_tas.data import index_cache
from lightning_tas.data.index import Index, of_folders, of_shards, stamps_of
from lightning_tas.data.splits import stratified

IMAGENET, CLASSES = 1_281_167, 1000
LONG_AGO = 10**9


def folders(root: Path, images: int, classes: int = CLASSES) -> None:
    """Class folders with so many empty files in all."""
    for label in range(classes):
        folder = root / f"n{label:08d}"
        folder.mkdir(parents=True)
        for number in range(label, images, classes):
            (folder / f"n{label:08d}_{number}.JPEG").touch()
        os.utime(folder, (LONG_AGO, LONG_AGO))
    os.utime(root, (LONG_AGO, LONG_AGO))


def shard(path: Path, samples: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            for extension, content in (("jpg", b"x" * 100), ("cls", b"%d" % (number % CLASSES))):
                member = tarfile.TarInfo(f"{number:08d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def synthetic(root: Path, images: int) -> Index:
    """A list of as many images in the (empty) class folders of `root`."""
    targets = np.sort(np.arange(images, dtype=np.int64) % CLASSES)
    names = [f"n{label:08d}/n{label:08d}_{number}.JPEG".encode() for number, label in enumerate(targets.tolist())]
    few = of_folders(root, lambda number: None)
    zeros = np.zeros(images, np.int64)
    return Index(
        classes=few.classes,
        named=True,
        targets=targets,
        text=np.frombuffer(b"".join(names), np.uint8),
        ends=np.cumsum([len(name) for name in names]),
        files=[],
        file=zeros.astype(np.int32),
        offset=zeros,
        size=zeros - 1,
        stamps=stamps_of(root, [".", *few.classes]),
        unused=few.unused,
    )


def read(root: Path, cache: Path, images: int, start: float) -> str:
    """What one process does at its start."""
    began = time.process_time()

    def never(advance: object) -> Index:
        raise AssertionError("the list must come from the cache")

    index = index_cache.index_of("folders", root, (), never, CLASSES, cache)
    listed, used = time.time() - start, time.process_time() - began
    assert len(index.targets) == images
    held = stratified(index.targets, images // 10, 0, "search-val", leave_one=True)
    np.delete(np.arange(images), held)
    split, both = time.time() - start, time.process_time() - began
    return f"list {listed:.2f} s ({used:.2f} s of processor time), split as well {split:.2f} s ({both:.2f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=IMAGENET, help="images of the list that is read")
    parser.add_argument("--listed", type=int, default=50_000, help="real files that are listed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folders(root / "real", options.listed)
        shard(root / "x.tar", options.listed // 10)
        for what, count, make in (
            ("class folders", options.listed, lambda: of_folders(root / "real", lambda number: None)),
            ("shards", options.listed // 10, lambda: of_shards(root, ["x.tar"], lambda number: None)),
        ):
            began = time.process_time()
            make()
            each = (time.process_time() - began) / count
            print(f"listing {what}: {1e6 * each:.1f} us an image, {each * IMAGENET:.0f} s for ImageNet", flush=True)
        folders(root / "empty", 0)
        (root / "cache").mkdir()
        path = root / "cache" / index_cache.file_name("folders", root / "empty", ())
        began = time.time()
        index_cache.write(path, synthetic(root / "empty", options.images), time.time_ns())
        print(f"kept {options.images:,} images: {path.stat().st_size / 2**20:.0f} MiB, {time.time() - began:.1f} s")
        start = time.time()
        with multiprocessing.get_context("fork").Pool(options.processes) as pool:
            arguments = [(root / "empty", root / "cache", options.images, start)] * options.processes
            for line in pool.starmap(read, arguments, chunksize=1):
                print(f"reading it in {options.processes} processes at once: {line}")


if __name__ == "__main__":
    main()
