"""What a proxy returns: one number with its parts, its validity and its price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

INVALID = -math.inf
"""Value of an invalid score: it sorts behind every valid one."""


@dataclass(frozen=True)
class Score:
    """A proxy's verdict on one network.

    value: higher is better, whatever the direction of the formula; `INVALID` unless `valid`. parts: contribution of
    every block (empty where a proxy has none). reason: why a score is invalid. seconds: what it took alone, shared
    passes included. extras: the raw quantities behind `value`, under the names that the proxy documents; blocks: those
    of them that are sums over blocks, block by block.
    """

    value: float
    parts: tuple[float, ...] = ()
    valid: bool = True
    reason: str = ""
    seconds: float = 0.0
    extras: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def invalid(cls, reason: str, seconds: float = 0.0, extras: Mapping[str, float] | None = None) -> Score:
        """A score that says why there is none."""
        return cls(INVALID, valid=False, reason=reason, seconds=seconds, extras=dict(extras or {}))

    @classmethod
    def checked(
        cls,
        value: float,
        parts: tuple[float, ...],
        seconds: float,
        extras: Mapping[str, float],
        flaw: str | None,
        blocks: Mapping[str, tuple[float, ...]] | None = None,
    ) -> Score:
        """Valid only if `value` is finite and nothing was wrong with what it was computed from (`flaw`)."""
        if flaw is None and not math.isfinite(value):
            flaw = f"the value is {value}"
        if flaw is not None:
            return cls.invalid(flaw, seconds, extras)
        return cls(float(value), parts, True, "", seconds, dict(extras), dict(blocks or {}))
