"""What a run of the drill's study is doing, read from the outside, from the files of its folder."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Length:
    """Epochs of the study and optimiser steps in one."""

    epochs: int
    per_epoch: int

    @property
    def all(self) -> int:
        """Optimiser steps of the study."""
        return self.epochs * self.per_epoch


STEPS = Length(epochs=4, per_epoch=4)


class Progress:
    """Looks at one run folder; every property reads the files anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The phases in study.json, none before it is written."""
        try:
            phases: list[dict[str, Any]] = json.loads((self.folder / "study.json").read_text())["phases"]
        except FileNotFoundError:
            return []
        return phases

    @property
    def started(self) -> bool:
        """Whether the run has left any sign."""
        return (self.folder / "study.json").exists()

    @property
    def finished(self) -> bool:
        """Whether all phases are finished."""
        return self.started and all(phase["status"] == "finished" for phase in self.phases)

    @property
    def running(self) -> str | None:
        """The phase that is running."""
        return next((phase["name"] for phase in self.phases if phase["status"] == "running"), None)

    @property
    def trained(self) -> bool:
        """Whether the supernet is finished."""
        return any(phase["name"] == "supernet" and phase["status"] == "finished" for phase in self.phases)

    @property
    def rows(self) -> list[dict[str, str]]:
        """The whole rows of metrics.csv."""
        try:
            text = (self.folder / "metrics.csv").read_text()
        except FileNotFoundError:
            return []
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))

    @property
    def step(self) -> int:
        """Optimiser steps that have been logged."""
        return max((int(row["step"]) + 1 for row in self.rows if row.get("train/loss")), default=0)

    def validates(self, epoch: int | None = None) -> bool:
        """Whether `epoch` (None: any) is trained and not yet measured."""
        rows = self.rows
        measured = {int(row["epoch"]) for row in rows if not row.get("train/loss")}
        ended = {int(row["epoch"]) for row in rows if int(row["step"]) == (int(row["epoch"]) + 1) * STEPS.per_epoch - 1}
        return bool(ended - measured) if epoch is None else epoch in ended - measured

    @property
    def checkpoints(self) -> set[str]:
        """Names of the whole checkpoints."""
        return {path.name for path in self.folder.glob("phases/*/checkpoints/*.ckpt")}

    @property
    def writes(self) -> bool:
        """Whether a checkpoint is being written: its temporary is there."""
        return any(True for _ in self.folder.glob("phases/*/checkpoints/.*"))

    def doing(self) -> str:
        """What is going on, in words."""
        if not self.started:
            return "starting"
        if self.finished:
            return "finished, about to end"
        running = self.running
        if running is None:
            done = [phase["name"] for phase in self.phases if phase["status"] == "finished"]
            return f"between phases, after {done[-1]}" if done else "starting"
        if running != "supernet":
            return f"phase {running}"
        place = f"step {self.step}/{STEPS.all}"
        if self.writes:
            return f"{place}, writing a checkpoint"
        return f"{place}, validating" if self.validates() else place
