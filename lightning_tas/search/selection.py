"""What a selection hands over: the preferred architectures, the empty bins, and how they were found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.spaces import SearchSpace


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
        own = {key: data[key] for key in ("score", "params", "macs", "bin")}
        return cls(arch=Architecture.from_dict(data["arch"]), **own)


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
    def labels(self) -> tuple[str, ...]:
        """The name of every candidate in metrics, tables and pictures, in their order."""
        return tuple(candidate_labels(self.candidates))

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
            "candidates": [
                {"label": label, **c.to_dict()} for label, c in zip(self.labels, self.candidates, strict=True)
            ],
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


def cut_space(space: SearchSpace, archs: Sequence[Architecture]) -> SearchSpace:
    """`space` without the choices beyond the maxima of `archs`, allocated for no more than those maxima.

    A supernet of it holds every one of `archs` and little else: the released PreNAS code trains such a one.
    One-stage spaces only.
    """
    most = {
        "embed_dim": max(arch.embed_dim for arch in archs),
        "depth": max(arch.depth for arch in archs),
        "num_heads": max(max(arch.num_heads) for arch in archs),
        "mlp_ratio": max(max(arch.mlp_ratio) for arch in archs),
    }
    kept = {name: [choice for choice in space.choices(name) if choice <= limit] for name, limit in most.items()}
    return space.with_choices(name=f"{space.name}-cut", allocated=most, **kept)


def candidate_labels(candidates: Sequence[Candidate]) -> dict[str, Architecture]:
    """Fixed names of selected networks: their parameters to three digits, with a number where names meet."""
    labels: dict[str, Architecture] = {}
    for candidate in candidates:
        name = label = _short(candidate.params)
        repeat = 2
        while label in labels:
            label, repeat = f"{name}-{repeat}", repeat + 1
        labels[label] = candidate.arch
    return labels


def _short(params: int) -> str:
    """5212345 -> "5.21M", 26150 -> "26.2k"; always in plain digits, as part of a metric's name."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if params >= 0.9995 * size:
            value = params / size
            digits = max(0, 2 - max(0, len(str(int(value))) - 1))
            return f"{value:.{digits}f}{unit}"
    return str(params)
