"""`result.json`: what a run hands over, and reading architectures back from the files of a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, absent, unknown
from lightning_tas.launch.checkpoints import handed_on, newest_whole
from lightning_tas.launch.files import DIGEST, read_json, write_json
from lightning_tas.launch.study import read_study
from lightning_tas.published import read_collection
from lightning_tas.reading import read_yaml
from lightning_tas.search import Selection
from lightning_tas.training.checkpoint import EXPORTED
from lightning_tas.training.sharded import is_sharded

# Two runs are identical when everything else in their result.json is.
NOT_COMPARED = ("timing", "host", "run", DIGEST)
YAML = (".yaml", ".yml")
LISTS = ("result.json", "search.json", "selection.json")
"""The files of a run that list networks by label."""


@dataclass(frozen=True)
class Specialised:
    """One network of a result: its name, architecture, cost and what was measured.

    `metrics` holds top1 and top5 in percent, loss, and samples; `score` and `bin` come from the selection.
    """

    label: str
    arch: Architecture
    params: int
    macs: int
    metrics: Mapping[str, float]
    score: float | None = None
    bin: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a metric that is not finite becomes null, with a warning, because JSON has no NaN."""
        metrics = {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}
        lost = [key for key, value in metrics.items() if value is None]
        if lost:
            warnings.warn(f"{self.label}: {', '.join(lost)} not finite: has training diverged?", stacklevel=2)
        return {**asdict(self), "arch": self.arch.to_dict(), "id": self.arch.id, "metrics": metrics}


def write_result(path: Path, networks: list[Specialised], **fields: Any) -> dict[str, Any]:
    """Write `result.json` with the networks and the further `fields`; return the record."""
    record = {"architectures": [network.to_dict() for network in networks], **fields}
    write_json(path, record)
    return record


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a result by which two runs are identical."""
    return {key: value for key, value in record.items() if key not in NOT_COMPARED}


def read_architectures(path: Path | str, key: str = "arch") -> dict[str, Architecture]:
    """Label to architecture of a JSON or YAML file, in any layout that is known (`published.read_collection`).

    A folder is a run: the first of `LISTS` that it has.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in LISTS if (path / name).exists()]
        if not found:
            raise UserError(f"{key}: {str(path)!r} holds none of {', '.join(LISTS)}")
        path = found[0]
    record = (read_yaml if path.suffix in YAML else read_json)(path, key)
    try:
        return read_collection(record, path.stem)
    except UserError as error:
        raise UserError(f"{key}: {str(path)!r}: {error}") from None


def read_selection(path: Path) -> Selection:
    """The selection in `selection.json`; UserError when the file is missing, broken, or something else."""
    record = read_json(path, key="selection")
    try:
        return Selection.from_dict(record)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"selection: {str(path)!r} is not a selection.json of this version") from None


def pick(archs: Mapping[str, Architecture], name: str, key: str = "arch") -> tuple[str, Architecture]:
    """The entry whose label or id is `name`."""
    for label, arch in archs.items():
        if name in (label, arch.id):
            return label, arch
    raise unknown(key, name, [*archs, *(arch.id for arch in archs.values())])


def find_checkpoint(path: Path | str, key: str = "ckpt", phase: str | None = None) -> Path:
    """The checkpoint that `path` means: itself (a file, or a folder of DeepSpeed), the weights in an exported folder,
    or the last checkpoint of a run's folder.

    A run's last one is what its phases handed on, or, while it is training or was stopped, its newest whole one.
    phase: `supernet` or `retrain`: of a run that has some of that phase, the last one of it.
    """
    path = Path(path)
    if not path.exists():
        raise absent(key, path, "give a checkpoint or the folder of a run")
    if not path.is_dir() or is_sharded(path):
        return path
    if (path / EXPORTED).is_file():
        return path / EXPORTED
    study = path / "study.json"
    phases = read_study(study, key)["phases"] if study.exists() else []
    handed = [path / phase["outputs"]["checkpoint"] for phase in phases if "checkpoint" in phase["outputs"]]
    for found in _of_phase_first([file for file in handed if file.exists()], phase, 1):
        return handed_on(found, key)
    for folder in _of_phase_first(sorted(path.glob("phases/*/checkpoints")), phase, 0):
        newest, _ = newest_whole(folder, key)
        if newest is not None:
            return newest
    raise UserError(f"{key}: {str(path)!r} holds no checkpoint; give a checkpoint or the folder of a run")


def _of_phase_first(paths: list[Path], phase: str | None, depth: int) -> list[Path]:
    """`paths` from the last to the first, those of `phase` before the others; `phases/NN-name` is a parent of each."""
    return sorted(reversed(paths), key=lambda path: path.parents[depth].name.split("-")[1:2] != [phase])
