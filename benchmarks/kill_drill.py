"""Kills small studies at random moments, starts them again, and compares with runs that nobody killed.

Twenty kills in turn over {1, 2 processes} x {DDP, ZeRO-2} x {0, 2 data workers}, then two processes under ZeRO-1 and
-3, and two torchrun nodes; moments and manners are drawn from the seed (see `tests/cluster/drill.py`). A continued run
is exact when result.json, metrics.csv, every checkpoint (weights, averages, optimiser) and the list of files equal
those of the uninterrupted run, bit for bit. Exit status 1 when one is not.

    python benchmarks/kill_drill.py --kills 20 --seed 0
    python benchmarks/kill_drill.py --kills 3 --combination spawn-zero2-0w nodes-zero3-0w
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("kill_drill")


def load_drills() -> tuple[Any, Any]:
    """The modules `tests/cluster/drill.py` and `tests/processes.py`."""
    for name, folder in (("drill_tests", ROOT / "tests"), ("drill_tests.cluster", ROOT / "tests" / "cluster")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return import_module("drill_tests.cluster.drill"), import_module("drill_tests.processes")


def main() -> int:
    """Parse arguments, kill, report."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    sys.path.insert(0, str(ROOT))
    drills, harness = load_drills()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments; another one gives other kills")
    parser.add_argument("--first", type=int, default=0, help="number of the first kill, to go on with a stopped drill")
    parser.add_argument(
        "--combination", nargs="+", choices=list(drills.COMBINATIONS), default=list(drills.COMBINATIONS), metavar="NAME"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that are not exact stay there")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="kill-drill-", dir=given.keep))
    processes = harness.Processes(home / "processes")
    try:
        outcomes = Drills(drills, processes, home, given.seed).run(given.first, given.kills, given.combination)
    finally:
        processes.close()
        if given.keep is None:
            shutil.rmtree(home)
    report(outcomes)
    return 0 if all(exact for exact, _ in outcomes) else 1


class Drills:
    """Runs kills one after the other; the uninterrupted run of a combination is made once."""

    def __init__(self, drills: Any, processes: Any, home: Path, seed: int) -> None:
        self.drills, self.processes, self.home, self.seed = drills, processes, home, seed
        self.whole: dict[str, tuple[Path, float]] = {}

    def run(self, first: int, kills: int, names: list[str]) -> list[tuple[bool, list[object]]]:
        """(Exact, row of the table) of each kill."""
        outcomes = []
        for index in range(first, first + kills):
            combination = self.drills.COMBINATIONS[names[index % len(names)]]
            kill = self.drills.draw_kill(self.seed, index)
            began, load = time.monotonic(), os.getloadavg()[0]
            try:
                exact, cells = self._kill(combination, kill, self.home / f"kill-{index:02d}")
            except AssertionError as error:
                exact, cells = False, [kill.when, "-", "-", "FAILED"]
                log.info("%s", "\n".join(line for line in str(error).splitlines() if "it/s" not in line)[-3000:])
            row = [index, combination.name, kill.how, *cells]
            log.info("%s  (%.0f s, load %.1f)", "  ".join(map(str, row)), time.monotonic() - began, load)
            outcomes.append((exact, row))
        return outcomes

    def _kill(self, combination: Any, kill: Any, home: Path) -> tuple[bool, list[object]]:
        if combination.name not in self.whole:
            straight = self.home / combination.name
            self.whole[combination.name] = straight, self.drills.whole_run(self.processes, combination, straight)
        outcome = self.drills.drill(self.processes, combination, kill, home, *self.whole[combination.name])
        for difference in outcome.differences[:8]:
            log.info("    %s", difference)
        if len(outcome.differences) > 8:
            log.info("    and %d more", len(outcome.differences) - 8)
        if not outcome.differences:
            shutil.rmtree(home)
        verdict = "NOT EXACT" if outcome.differences else "exact"
        return not outcome.differences, [kill.when, outcome.doing, outcome.redone, verdict]


def report(outcomes: list[tuple[bool, list[object]]]) -> None:
    """Print the table and the sums."""
    from lightning_tas.analysis.tables import text_table

    header = ["kill", "combination", "manner", "moment", "what was going on", "steps redone", "continued run"]
    log.info("\n%s\n", text_table(header, [row for _, row in outcomes]))
    exact = sum(exact for exact, _ in outcomes)
    redone = [int(str(row[5])) for _, row in outcomes if str(row[5]).isdigit()]
    log.info(
        "%d kills, %d exact; steps redone: %d in all, at most %d",
        len(outcomes),
        exact,
        sum(redone),
        max(redone, default=0),
    )


if __name__ == "__main__":
    raise SystemExit(main())
