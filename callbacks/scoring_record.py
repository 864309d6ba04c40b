"""What scoring beside training has found so far: kept in checkpoints, written to `scoring.csv`.

The file is a function of the record alone, so that a run that was killed and resumed leaves the one of an uninterrupted
run, byte for byte.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_tas.analysis.correlation import kendall
from lightning_tas.architecture import Architecture
from lightning_tas.costs import Cost
from lightning_tas.errors import UserError
from lightning_tas.evaluator import Accuracy
from lightning_tas.launch.files import write_json, write_text, writing

BASELINES = ("params", "macs")
"""Always beside the proxies: one that orders networks no better than their size is worth nothing."""
COLUMNS = ("epoch", "step", "network", "params", "macs", "top1", "loss", "proxy", "initial", "current", "reason")

Column = tuple[list[float], list[str]]
"""Scores of all networks by one proxy, and why each is invalid (empty where it is not)."""


@dataclass(frozen=True)
class Scoring:
    """One scoring of all networks.

    epoch: finished epochs, 0 before training; step: updates; initial: whether the weights are those that training
    began with; top1 [%] and loss [nats] with inherited weights; scores by proxy (-inf is invalid), and why those are.
    """

    epoch: int
    step: int
    initial: bool
    top1: list[float]
    loss: list[float]
    scores: dict[str, list[float]]
    reasons: dict[str, list[str]]

    @classmethod
    def of(
        cls, epoch: int, step: int, initial: bool, scores: Mapping[str, Column], accuracies: Sequence[Accuracy]
    ) -> Scoring:
        """From what was measured, in the order of the networks."""
        top1, loss = ([getattr(found, key) for found in accuracies] for key in ("top1", "loss"))
        values, reasons = ({name: column[part] for name, column in scores.items()} for part in (0, 1))
        return cls(epoch, step, initial, top1, loss, values, reasons)  # type: ignore[arg-type]


class Record:
    """The networks and every scoring of them; `proxies` are names without the baselines."""

    def __init__(self, proxies: Sequence[str]) -> None:
        self.proxies = list(proxies)
        self.archs: list[Architecture] = []
        self.prices: list[tuple[int, int]] = []
        self.settings: dict[str, Any] = {}
        self.scorings: list[Scoring] = []
        self._restored: dict[str, Any] | None = None

    def begin(self, archs: Sequence[Architecture], costs: Sequence[Cost], settings: dict[str, Any], step: int) -> None:
        """Take the networks of this run; after a restored checkpoint they must be the ones that it knows.

        Raises:
            UserError: the checkpoint scored other networks, by other proxies or with other settings.
        """
        self.archs, self.prices = list(archs), [(int(one.params), int(one.macs)) for one in costs]
        self.settings = settings
        restored, self._restored = self._restored, None
        if restored is not None:
            for key, now in self._identity().items():
                if restored[key] != now:
                    shown = "" if key == "networks" else f": {restored[key]} in the checkpoint, {now} now"
                    raise UserError(f"resume: scoring has other {key} than before{shown}")
            self.scorings = [Scoring(**one) for one in restored["scorings"]]
        elif step == 0:
            self.scorings = []  # of an earlier fit

    @property
    def initial(self) -> Scoring | None:
        """The scoring of the weights that training began with; None where the callback came later."""
        return next((one for one in self.scorings if one.initial), None)

    @property
    def baselines(self) -> dict[str, list[float]]:
        """Parameters and multiply-accumulates as scores."""
        return {name: [float(price[place]) for price in self.prices] for place, name in enumerate(BASELINES)}

    def correlations(self, found: Scoring) -> dict[str, float | None]:
        """Tau-b against `found.top1` of every baseline, and of every proxy as `<proxy>/initial` and `/current`."""
        columns: dict[str, Sequence[float]] = dict(self.baselines)
        for name in self.proxies:
            if self.initial is not None:
                columns[f"{name}/initial"] = self.initial.scores[name]
            columns[f"{name}/current"] = found.scores[name]
        return {name: kendall(values, found.top1)[1] for name, values in columns.items()}

    # --- files ------------------------------------------------------------------------------------------------------

    def table(self, found: Scoring) -> tuple[list[str], list[list[Any]]]:
        """`COLUMNS`, and a row for every network and proxy."""
        first, rows = self.initial, []
        for name in self.proxies:
            for place, (arch, (params, macs)) in enumerate(zip(self.archs, self.prices, strict=True)):
                before = first.scores[name][place] if first is not None else None
                measured = [params, macs, found.top1[place], found.loss[place]]
                scored = [name, before, found.scores[name][place], found.reasons[name][place]]
                rows.append([found.epoch, found.step, arch.id, *measured, *scored])
        return list(COLUMNS), rows

    def rewrite(self, folder: Path) -> None:
        """Write `scoring.csv` anew, as the record has it, and `scoring.json`, the networks by id."""
        write_json(folder / "scoring.json", {"networks": {arch.id: arch.to_dict() for arch in self.archs}})
        text = _lines([list(COLUMNS)]) + "".join(_lines(self.table(one)[1]) for one in self.scorings)
        write_text(folder / "scoring.csv", text)

    def append(self, folder: Path, found: Scoring) -> None:
        """Add one scoring to `scoring.csv`; what a killed process leaves half written goes with the next `rewrite`."""
        path = folder / "scoring.csv"
        with writing(path), path.open("a", encoding="utf-8", newline="") as file:
            file.write(_lines(self.table(found)[1]))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {"networks": [arch.id for arch in self.archs], "proxies": self.proxies, "settings": self.settings}

    def state_dict(self) -> dict[str, Any]:
        """As primitives, which ``torch.load(weights_only=True)`` reads."""
        return {**self._identity(), "scorings": [asdict(one) for one in self.scorings]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember `state` for `begin`."""
        self._restored = dict(state)


def _lines(rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
