"""The settings that decide the result of a run, and how they differ from those that it was begun with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tas.data.config import OF_A_NODE
from lightning_tas.errors import typed
from lightning_tas.reading import read_yaml

# What may differ between an interrupted run and its continuation: where it writes, how it is watched, who loads images.
FREE = ("run", "output_dir", "resume", "plan", "trust", "logger", "wandb", "config", "checkpoint", "per_phase")
FREE_DATA = (*OF_A_NODE, "class_names", "verify")
# What runs did that were begun before these keys, where that is not their default.
BEFORE = {"data.resize": "squash", "data.exif": False}


def decided(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration, as nested mappings, decides the result; settings of single phases are not in it."""
    kept = {key: value for key, value in tree.items() if key not in FREE}
    kept["data"] = {key: value for key, value in dict(tree.get("data") or {}).items() if key not in FREE_DATA}
    return kept


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, the values as JSON has them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= dotted(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.loads(json.dumps(value, default=str))
    return found


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run, by dotted key.

    defaults: of all keys: a run may have been begun when one did not exist yet, which then changes nothing.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @property
    def hash(self) -> str:
        """Short hash of the values."""
        return hashlib.sha256(json.dumps(dict(self.values), sort_keys=True).encode()).hexdigest()[:16]

    def differing(self, record: Mapping[str, Any], config: Path) -> list[str]:
        """The settings that differ from those of a study's `record`, with both values; empty: none.

        config: the run's `config.yaml`, of which they are read where an older version has not put them into the record.

        Raises:
            UserError: that cannot be read.
        """
        before = record.get("settings")
        if before is None:
            before = dotted(decided(read_yaml(config, key="resume")))
        found = []
        for key in {**before, **self.values}:
            was = before.get(key, BEFORE.get(key, self.defaults.get(key)))
            now = self.values.get(key, self.defaults.get(key))
            if was != now:
                found.append(f"{key} is {typed(now)}, in the run {typed(was)}")
        return found
