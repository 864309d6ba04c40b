"""Are two runs of one study the same to the last bit? Everything that is to be equal is compared, by name."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_tas.launch.results import comparable

# Speeds, memory and times of day: measurements of the machine, not of the study.
MEASURED = ("system.csv", "log.txt")


def compare(straight: Path, other: Path) -> list[str]:
    """What differs between the studies run in two working folders (both hold `runs/`); empty: identical."""
    found = [f"files: {name}" for name in _names(straight / "runs") ^ _names(other / "runs")]
    for name in sorted(_names(straight / "runs") & _names(other / "runs")):
        a, b = straight / "runs" / name, other / "runs" / name
        if a.name in ("result.json", "selection.json"):
            left, right = (comparable(json.loads(path.read_text())) for path in (a, b))
            found += differences(left, right, name)
        elif a.suffix in (".ckpt", ".pt"):
            found += differences(_load(a), _load(b), name)
        elif a.suffix != ".png" and a.read_bytes() != b.read_bytes():
            found.append(f"{name}: other bytes{_first_line(a, b)}")
    return found


def check_whole(home: Path) -> None:
    """AssertionError unless the run in `home` is worth comparing with: one folder, one config, depths that vary."""
    names = _names(home / "runs")
    assert len({name.split("/")[1] for name in names}) == 1, names
    assert [name for name in names if name.endswith("config.yaml")] == ["quickstart/drill/config.yaml"]
    with (home / "runs/quickstart/drill/metrics.csv").open() as file:
        sizes = [row["train/params"] for row in csv.DictReader(file) if row["train/params"]]
    assert len(set(sizes)) > 1, sizes
    record = json.loads((home / "runs/quickstart/drill/result.json").read_text())
    depths = {len(entry["arch"]["stages"][0]["blocks"]) for entry in record["architectures"]}
    assert len(depths) > 1, depths
    assert any(name.endswith("final.ckpt") for name in names), names


def _names(folder: Path) -> set[str]:
    """Every file below `folder`, hidden ones too: what a killed run leaves lying about is a difference."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in MEASURED}


def _load(path: Path) -> Any:
    # DeepSpeed writes objects of its own into its shards.
    return torch.load(path, map_location="cpu", weights_only=path.suffix == ".ckpt")


def _first_line(a: Path, b: Path) -> str:
    if a.suffix not in (".csv", ".json", ".yaml"):
        return ""
    ours, theirs = a.read_text().splitlines(), b.read_text().splitlines()
    for number, (left, right) in enumerate(zip(ours, theirs, strict=False), 1):
        if left != right:
            return f" (line {number}: {left!r}, now {right!r})"
    return f" ({len(ours)} lines, now {len(theirs)})"


def differences(a: Any, b: Any, place: str = "") -> Iterator[str]:
    """Where two nested values differ, tensors and floats compared by their bits (NaN equals itself)."""
    if type(a) is not type(b):
        yield f"{place}: {type(a).__name__}, now {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{place}: {tuple(a.shape)} {a.dtype}, now {tuple(b.shape)} {b.dtype}"
        elif not torch.equal(_bits(a), _bits(b)):
            yield f"{place}: {int((a != b).sum())} of {a.numel()} numbers differ"
    elif isinstance(a, Mapping):
        for key in sorted({*a, *b}, key=str):
            if key not in a or key not in b:
                yield f"{place}.{key}: {'missing before' if key not in a else 'missing now'}"
            else:
                yield from differences(a[key], b[key], f"{place}.{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{place}: {len(a)} entries, now {len(b)}"
        for index, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from differences(left, right, f"{place}[{index}]")
    elif isinstance(a, float):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            yield f"{place}: {a!r}, now {b!r}"
    elif hasattr(a, "__dict__") and type(a).__module__.split(".")[0] == "deepspeed":
        yield from differences(vars(a), vars(b), place)
    elif a != b:
        yield f"{place}: {a!r}, now {b!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
