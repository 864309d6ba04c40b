"""What a selection hands over: the preferred architectures, the empty bins, and how they were found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_tas.architecture import Architecture


@dataclass(frozen=True)
class Candidate:
    """One preferred architecture. bin: upper edge of its interval, in the selection's unit; score: its plain SNIP."""

    arch: Architecture
    score: float
    params: int
    macs: int
    bin: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "arch": self.arch.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Candidate:
        """Read `to_dict`'s form."""
        return cls(**{**data, "arch": Architecture.from_dict(data["arch"])})


@dataclass(frozen=True)
class Selection:
    """Candidates in ascending order of their bins, best first inside a bin; iterates like the list of them.

    `settings` are those in force (mode, margin, unit, limits, allocation, norm, classes, ...); `examined` counts the
    isomer classes scored; `seconds` the time of each part, which is no part of the result's identity.
    """

    candidates: tuple[Candidate, ...]
    empty_bins: tuple[float, ...]
    settings: dict[str, Any]
    examined: int
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def archs(self) -> tuple[Architecture, ...]:
        """The architectures, in the order of the candidates."""
        return tuple(c.arch for c in self.candidates)

    @property
    def mode(self) -> str:
        """ "paper" or "released"."""
        return str(self.settings["mode"])

    @property
    def unit(self) -> str:
        """Unit of the bins: "Mparams" or "GMACs"."""
        return str(self.settings["unit"])

    @property
    def id(self) -> str:
        """Sixteen hex characters over everything but the timings: equal on every rank that found the same."""
        text = json.dumps({k: v for k, v in self.to_dict().items() if k != "timing"}, sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8"), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __getitem__(self, index: int) -> Candidate:
        return self.candidates[index]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, the content of ``selection.json``; only ``timing`` differs between identical runs."""
        return {
            "settings": self.settings,
            "candidates": [c.to_dict() for c in self.candidates],
            "empty_bins": list(self.empty_bins),
            "examined": self.examined,
            "timing": self.seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selection:
        """Read `to_dict`'s form."""
        return cls(
            tuple(Candidate.from_dict(c) for c in data["candidates"]),
            tuple(data["empty_bins"]),
            dict(data["settings"]),
            int(data["examined"]),
            dict(data.get("timing", {})),
        )
