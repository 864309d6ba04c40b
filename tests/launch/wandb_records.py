"""Reads W&B's offline runs back with W&B's own reader."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from wandb.util import get_core_path


class Attempt:
    """One offline folder: its records by type, as `wandb leet inspect --json` shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = next(folder.glob("*.wandb"))
        command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file", str(file)]
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
        self.records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert self.records, done.stderr

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def run(self) -> dict[str, Any]:
        return self.of("run")[0]

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.run["config"]["update"]
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [record["item"] for record in self.of("history")]

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.rows if key in row]

    @property
    def axes(self) -> dict[str, str]:
        """Pattern of metric names to the metric that is their x axis."""
        return {m["glob_name"]: m["step_metric"] for m in self.of("metric") if "glob_name" in m}

    @property
    def charts(self) -> dict[str, dict[str, str]]:
        """Name of each custom chart to the columns that it shows."""
        updates = [record.get("update", {}) for record in self.of("config")]
        begin = "_wandb.visualize."
        return {
            key.removeprefix(begin): value["panel_config"]["fieldSettings"]
            for update in updates
            for key, value in update.items()
            if key.startswith(begin)
        }

    def table(self, row: dict[str, Any], key: str) -> list[dict[str, Any]]:
        """The table that `row` has under `key`, one mapping a line."""
        content = json.loads((self.folder / "files" / row[f"{key}.path"]).read_text())
        return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]

    def artifacts(self, kind: str) -> list[dict[str, Any]]:
        return [artifact for artifact in self.of("artifact") if artifact["type"] == kind]


def attempts(run_folder: Path) -> list[Attempt]:
    """The offline folders of a run, oldest first."""
    return [Attempt(folder) for folder in sorted((run_folder / "wandb").glob("offline-run-*"))]
