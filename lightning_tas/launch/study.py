"""`study.json`: which phases of a run are finished, and what they handed on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.launch.settings import Settings

PENDING, RUNNING, FINISHED = "pending", "running", "finished"


def phase_labels(phases: Sequence[str]) -> list[str]:
    """What each of `phases` is called in a run: its name, from the second time on with its number, `supernet-2`."""
    counts = [list(phases[:i]).count(name) + 1 for i, name in enumerate(phases)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(phases, counts, strict=True)]


def read_study(path: Path, key: str = "resume") -> dict[str, Any]:
    """The record in `study.json`; UserError when the file is missing, broken, or something else."""
    record = read_json(path, key=key)
    phases = record.get("phases") if isinstance(record, dict) else None
    if not isinstance(phases, list) or not all(
        isinstance(phase, dict) and {"name", "status", "outputs"} <= set(phase) for phase in phases
    ):
        raise UserError(f"{key}: {str(path)!r} is not the study.json of a run")
    return dict(record)


class Study:
    """The list of phases of a run with status and outputs, written atomically after every change.

    Args:
        path: the file.
        phases: labels of the phases in order. An existing file must list the same ones: a run is one plan.
        settings: what decides the result; a run that was begun with others is refused.
        write: only rank 0 writes.
    """

    def __init__(self, path: Path, phases: list[str], settings: Settings, write: bool = True) -> None:
        self.path, self.write = path, write
        if path.exists():
            self._adopt(read_study(path), phases, settings)
        else:
            self.record: dict[str, Any] = {
                "config_hash": settings.hash,
                "settings": dict(settings.values),
                "phases": [{"name": name, "status": PENDING, "outputs": {}} for name in phases],
            }
            self._save()

    def _adopt(self, record: dict[str, Any], phases: list[str], settings: Settings) -> None:
        recorded = [phase["name"] for phase in record["phases"]]
        if recorded != list(phases):
            raise UserError(f"resume: {self.path} holds the phases {recorded}, the recipe has {list(phases)}")
        if different := settings.differing(record, self.path.with_name("config.yaml")):
            raise UserError(
                f"resume: {self.path} was begun with other settings: {'; '.join(different)}; give the same, or "
                "choose another run="
            )
        self.record = record

    def _save(self) -> None:
        if self.write:
            write_json(self.path, self.record)

    @property
    def finished(self) -> bool:
        """True when every phase is finished."""
        return all(phase["status"] == FINISHED for phase in self.record["phases"])

    def status(self, index: int) -> str:
        """`pending`, `running` or `finished`."""
        status: str = self.record["phases"][index]["status"]
        return status

    def start(self, index: int) -> None:
        """Mark a phase as running."""
        self.record["phases"][index]["status"] = RUNNING
        self._save()

    def finish(self, index: int, outputs: dict[str, Any]) -> None:
        """Mark a phase as finished with what later phases need (JSON values; paths relative to the run folder)."""
        self.record["phases"][index].update(status=FINISHED, outputs=outputs)
        self._save()

    def go_back(self, index: int, checkpoint: str) -> None:
        """Do phase `index` and all after it again, from its `checkpoint` (relative to the run folder) on.

        What came after that is to be deleted now; `back_to` says so until `went_back`, also to a later process.
        """
        for phase in self.record["phases"][index:]:
            phase.update(status=PENDING, outputs={})
        self.record["back_to"] = checkpoint
        self._save()

    @property
    def back_to(self) -> Path | None:
        """The checkpoint that the run goes back to, while what came after it may still be there."""
        checkpoint = self.record.get("back_to")
        return None if checkpoint is None else self.path.parent / checkpoint

    def went_back(self) -> None:
        """What came after `back_to` is gone."""
        del self.record["back_to"]
        self._save()

    def outputs_of(self, label: str | None) -> dict[str, Any]:
        """Outputs of the phase `label` if it is finished; else, and if there is none, empty."""
        found = (phase for phase in self.record["phases"] if phase["name"] == label and phase["status"] == FINISHED)
        return dict(next((phase["outputs"] for phase in found), {}))

    def outputs(self, name: str) -> dict[str, Any]:
        """Outputs of the last finished phase called `name` (or `name-2`, ...); empty when there is none."""
        for phase in reversed(self.record["phases"]):
            if phase["name"].partition("-")[0] == name and phase["status"] == FINISHED:
                outputs: dict[str, Any] = phase["outputs"]
                return outputs
        return {}
