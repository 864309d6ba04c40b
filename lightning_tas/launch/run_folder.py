"""The one folder that a run writes: `output_dir/<recipe>/<run>/`.

config.yaml  study.json  log.txt  metrics.csv  selection.json  result.json  *.png
phases/NN-name/checkpoints/
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_tas.errors import UserError, check_path
from lightning_tas.launch import environment, group
from lightning_tas.launch.files import make_folder, take_lock, writing

# Processes that Lightning starts inherit the environment: rank 0 chose the run's folder, they find it here.
RUN_VARIABLE = "LIGHTNING_TAS_RUN"
LOCK_SECONDS = 10
SETTINGS = ("config.yaml", "study.json", "bench.json", "log.txt")
"""What a run writes before it works; everything else in its folder is work, and is never removed."""


def global_rank() -> int:
    """This process among all of the run, see `group.rank`."""
    return group.rank()


def default_run_name(seed: int) -> str:
    """Slurm job id, else time and seed."""
    return environment.slurm_run_name() or f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"


def recipe_folder(output_dir: str | Path, recipe: str) -> Path:
    """Where the runs of a recipe lie; a user's `mine.yaml` is the recipe `mine`."""
    return Path(output_dir) / (Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run. Creating the value touches nothing; `create` makes the folder."""

    path: Path

    @classmethod
    def locate(cls, output_dir: str | Path, recipe: str, run: str | None, seed: int) -> RunFolder:
        """The folder of `run` (default: see `default_run_name`) of `recipe` under `output_dir`."""
        name = run or default_run_name(seed)
        if not re.fullmatch(r"[\w.+=-]+", name) or name in (".", ".."):
            raise UserError(f"run: {name!r} is not a folder name; valid: letters, digits and any of . _ + = -")
        path = recipe_folder(output_dir, recipe) / name
        check_path("run", name)
        check_path("output_dir", str(path.absolute()))
        return cls(path)

    @classmethod
    def begun(cls) -> RunFolder | None:
        """The folder that rank 0 has chosen, in a process that Lightning started; None elsewhere."""
        chosen = os.environ.get(RUN_VARIABLE)
        return cls(Path(chosen)) if chosen and group.rank() > 0 and group.size() == 1 else None

    def create(self) -> RunFolder:
        """Make the folder and tell the processes launched from this one which it is.

        Raises:
            UserError: something that is not a folder stands in the way, or it may not be written.
        """
        make_folder(self.path)
        os.environ[RUN_VARIABLE] = str(self.path)
        return self

    @staticmethod
    def forget() -> None:
        """The run has ended: what this process starts from now on is not a part of it."""
        os.environ.pop(RUN_VARIABLE, None)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other run out of this folder while the context lasts, also when this process is killed.

        Waits a little: the data workers of a killed run live on for some seconds, and so does its lock.

        Raises:
            UserError: another process is running in this folder.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            if not take_lock(handle, LOCK_SECONDS):
                raise UserError(f"run: another process is running in {str(self.path)!r}; choose another run=NAME")
            yield
        finally:
            os.close(handle)

    def missing(self) -> list[Path]:
        """The folders that `create` will make, innermost first: the run's, its recipe's, output_dir."""
        candidates = (self.path, self.path.parent, self.path.parent.parent)
        return [folder for folder in candidates if not folder.exists()]

    def remove(self, made: list[Path]) -> None:
        """Delete those of `made` (see `missing`) that hold nothing but the settings of this run, which did no work."""
        inside = sorted(self.path.rglob("*"), reverse=True)  # what lies in a folder comes before it
        if any(path.name not in SETTINGS for path in inside if not path.is_dir()):
            return
        with contextlib.suppress(OSError):  # another run has begun beside this one
            for path in inside:
                path.rmdir() if path.is_dir() else path.unlink()
            for folder in made:
                folder.rmdir()

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def study(self) -> Path:
        return self.path / "study.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def selection(self) -> Path:
        return self.path / "selection.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def phase(self, index: int, name: str) -> Path:
        """Folder of one phase, `phases/NN-name`."""
        return self.path / "phases" / f"{index:02d}-{name}"

    def make_phase(self, index: int, name: str) -> None:
        """Make the folder of one phase; UserError where that of the run is there no more."""
        path = self.phase(index, name)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            path.mkdir(exist_ok=True)

    def checkpoints(self, index: int, name: str) -> Path:
        """Folder of the checkpoints of one phase."""
        return self.phase(index, name) / "checkpoints"
