"""A limit on latency: a table that is trusted only where its error is small, and what decides among networks found.

A search looks at millions of networks through a table of estimates; the networks that it finds are measured whole,
and those that break the limit are not handed on.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.limits import Limits, span
from lightning_tas.proxies.shards import share_of

if TYPE_CHECKING:
    from lightning_tas.callbacks.search_record import Found
    from lightning_tas.latency import Conditions, Latency, LatencyTable
    from lightning_tas.search.config import LimitsConfig
    from lightning_tas.search.history import Entry

MEASUREMENTS = 3
"""How often a table is measured before it is refused for its error: the machine may have been busy for a moment."""
SPARE = 32
"""So many of the best networks may break the limit before a search gives up handing on as many as it was asked for."""
FOUND = "latency-found.json"
"""Networks measured whole in this run: it decides by the same numbers when it is resumed."""


def measured_table(
    net: Any, repeats: int, under: Conditions, most: float, how: Mapping[str, Any], shown: bool
) -> LatencyTable:
    """A table whose median error is at most `most`; `UserError` where `MEASUREMENTS` of them had more."""
    from lightning_tas.callbacks.latency_progress import LatencyProgress
    from lightning_tas.latency import LatencyTable

    for number in range(1, MEASUREMENTS + 1):
        told = LatencyProgress(repeats, under, shown)
        try:
            table = LatencyTable.build(net, repeats=repeats, progress=told, **how)
        finally:
            told.close()
        rank_zero_info(str(table))
        if table.median_error <= most:
            return table
        if number < MEASUREMENTS:
            rank_zero_warn(
                f"the latency table has a median error of {table.median_error:.1%}, above limits.latency_error="
                f"{most:g}; it is measured again ({number + 1} of {MEASUREMENTS})"
            )
    raise UserError(
        f"limits.latency: estimates would decide that are {table.median_error:.1%} off (the median of "
        f"{len(table.errors)} networks; limits.latency_error={most:g}), also when measured {MEASUREMENTS} times"
        f"{_load()}; measure on an idle machine, give more passes than limits.latency_repeats={repeats}, or accept it: "
        f"limits.latency_error={math.ceil(20 * table.median_error) / 20 + 0.05:.2f}"
    )


def foresee(net: Any, given: LimitsConfig, how: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a plan says of a limit on latency, by quantity: two networks are measured, in a turn of a table's each."""
    from lightning_tas.latency import conditions, measure, networks_measured, rounds

    under, ends = conditions(net, **how), (net.space.smallest(), net.space.largest())
    measure(net, ends[0], warmup=1, repeats=1, **how)  # the first of a process takes longer
    began = time.perf_counter()
    taken = [measure(net, arch, warmup=1, repeats=2, **how).median_ms for arch in ends]
    networks = networks_measured(net.space)
    seconds = (time.perf_counter() - began) / len(ends) * networks * rounds(given.latency_repeats)
    bounds = Limits.read({"latency": given.latency}).bounds.get("latency", (0.0, math.inf))
    threads = f"{under.threads} thread{'' if under.threads == 1 else 's'}"
    return [
        ("latency", f"{_span(taken)} ms from smallest to largest (2 passes each); limits: {span(bounds)}"),
        ("latency is of", f"a batch of {under.batch_size} on {under.device}, {threads}"),
        (
            "latency table",
            f"{networks} networks, {given.latency_repeats} passes each: about {max(1, round(seconds))} s, at first; "
            f"up to {MEASUREMENTS} times while its error is above {given.latency_error:g}, then the run ends",
        ),
        ("networks found", "measured whole; what breaks the limit is not handed on"),
    ]


def _load() -> str:
    """How busy the processors are, where the system tells."""
    try:
        return f", on {os.cpu_count()} processors with a load of {os.getloadavg()[0]:.1f}"
    except OSError:
        return ""


@dataclass(frozen=True)
class LatencyLimit:
    """The limit on latency as direct measurement tests it.

    bounds: in ms. measure: takes the latency of a whole network. conditions: JSON values that say how, for which
    measurements are kept in `folder`.
    """

    bounds: tuple[float, float]
    measure: Callable[[Architecture], Latency]
    conditions: Mapping[str, Any]
    folder: Path | None = None

    def holds(self, taken: Mapping[str, Any]) -> bool:
        """Whether a network that was measured is within."""
        return bool(self.bounds[0] <= taken["median_ms"] <= self.bounds[1])

    def take(self, archs: Sequence[Architecture], wanted: int) -> dict[str, dict[str, Any]]:
        """Latencies by id, of the first of `archs` until so many are within."""
        known = self._kept()
        taken: dict[str, dict[str, Any]] = {}
        for arch in archs:
            if sum(map(self.holds, taken.values())) == wanted:
                break
            if arch.id not in known:
                known[arch.id] = self.measure(arch).to_dict()
                if self.folder is not None:
                    write_json(self.folder / FOUND, {"conditions": dict(self.conditions), "networks": known})
            taken[arch.id] = known[arch.id]
        return taken

    def _kept(self) -> dict[str, dict[str, Any]]:
        path = None if self.folder is None else self.folder / FOUND
        if path is None or not path.exists():
            return {}
        record = read_json(path, key="limits.latency")
        same = isinstance(record, dict) and record.get("conditions") == self.conditions
        return dict(record["networks"]) if same else {}

    def __str__(self) -> str:
        low, high = Limits((("latency", self.bounds),)).to_dict()["latency"]
        return f"limits.latency=[{'null' if low is None else low},{'null' if high is None else high}]"


def keep_limit(found: Found, top: int, limit: LatencyLimit | None) -> Found:
    """The `top` first networks found that keep the limit on latency as rank 0 measures them. Collective.

    Those before them that break it are left out. Where no limit is given, `found` as it is.
    """
    if limit is None:
        return found
    taken = share_of(None).first(lambda: limit.take([entry.arch for entry in found.networks], top))
    tried = [entry for entry in found.networks if entry.arch.id in taken]
    kept = [entry for entry in tried if limit.holds(taken[entry.arch.id])]
    broken = [entry for entry in tried if not limit.holds(taken[entry.arch.id])]
    why = ""
    if broken:
        told = _told(broken, [taken[entry.arch.id]["median_ms"] for entry in broken], limit)
        if kept:
            lacking = "" if len(kept) == top else f"; so {len(kept)} instead of {top} are handed on"
            rank_zero_warn(f"{told}: left out{lacking}")
        else:
            why = f"no network is handed on: {told}; give a limit that is tighter by the error of the latency table"
    return replace(found, networks=kept, latency=taken, left_out=broken, why_none=why)


def _told(broken: Sequence[Entry], times: Sequence[float], limit: LatencyLimit) -> str:
    """How far some networks are beyond the limit, in words."""
    guesses = [entry.quantities["latency"] for entry in broken]
    whose = broken[0].arch.id if len(broken) == 1 else f"the best {len(broken)} networks that were measured"
    return (
        f"{whose} break{'s' if len(broken) == 1 else ''} {limit} by direct measurement "
        f"({_span(times)} ms, estimated {_span(guesses)})"
    )


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"
