"""A whole recipe on two torchrun nodes of this machine, one of them killed at a random step, both started again.

The continued run must equal the one that nobody killed: result.json (but for times, host and run name), metrics.csv
and every tensor of final.ckpt. Exit status 1 when it does not.

    python benchmarks/node_drill.py                                     # prenas_fashion_mnist, ZeRO-2, about 30 minutes
    python benchmarks/node_drill.py recipe=quickstart trainer.strategy=ddp --kills 2
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kill_drill import load_drills

from lightning_tas.launch.results import comparable

log = logging.getLogger("node_drill")
DEFAULTS = {"recipe": "prenas_fashion_mnist", "trainer.strategy": "deepspeed_stage_2"}
RUN_SECONDS, END_SECONDS = 3600, 180


def main() -> int:
    """Run, kill, continue, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1, help="in the one run")
    parser.add_argument("--seed", type=int, default=0, help="of the steps and nodes that are hit")
    parser.add_argument("--keep", type=Path, help="folder for the two runs; default: a temporary one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    settings = {**DEFAULTS, **dict(item.split("=", 1) for item in given.overrides)}
    # The same command in two folders: it is a part of result.json.
    command = ["-m", "lightning_tas.fit", *(f"{k}={v}" for k, v in settings.items()), "run=drill", "resume=auto"]
    with tempfile.TemporaryDirectory() as temporary:
        home = given.keep or Path(temporary)
        _, library = load_drills()
        processes = library.Processes(Path(temporary) / "logs")
        try:
            return drill(processes, command, home, given.kills, random.Random(given.seed))
        finally:
            processes.close()


def drill(processes: Any, command: list[str], home: Path, kills: int, draw: random.Random) -> int:
    """The straight run and the killed one under `home`; the exit status of the benchmark."""
    straight, killed = home / "straight", home / "killed"
    for folder in (straight, killed):
        folder.mkdir(parents=True)
    began = time.monotonic()
    processes.wait(processes.torchrun(*command, cwd=straight), RUN_SECONDS)
    log.info("uninterrupted: %.0f s", time.monotonic() - began)
    total = last_step(straight)
    for step in sorted(draw.sample(range(1, total), kills)):
        job = processes.torchrun(*command, cwd=killed)
        while last_step(killed) < step and all(process.status is None for process in job):
            time.sleep(0.05)
        victim, reached = draw.randrange(len(job)), last_step(killed)
        job[victim].kill()
        began = time.monotonic()
        processes.wait(job, END_SECONDS, check=False)
        log.info(
            "node %d killed at step %d of %d (last row: %d); the other ended by itself after %.0f s",
            victim, step, total, reached, time.monotonic() - began,
        )  # fmt: skip
    began = time.monotonic()
    processes.wait(processes.torchrun(*command, cwd=killed), RUN_SECONDS)
    log.info("both nodes started again: %.0f s", time.monotonic() - began)
    wrong = differences(straight, killed)
    log.info("exact: %s", "no, different are " + ", ".join(wrong) if wrong else "yes")
    return bool(wrong)


def run_of(home: Path) -> Path:
    """The one run folder under `home`."""
    (folder,) = home.glob("runs/*/*")
    return folder


def last_step(home: Path) -> int:
    """The last step in `metrics.csv`, 0 before there is one."""
    rows: list[dict[str, str]] = []
    for path in home.glob("runs/*/*/metrics.csv"):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    return max((int(row["step"]) for row in rows if row["step"]), default=0)


def differences(one: Path, other: Path) -> list[str]:
    """Names of what is not the same in the two runs."""
    a, b = run_of(one), run_of(other)
    wrong = []
    results = [comparable(json.loads((folder / "result.json").read_text())) for folder in (a, b)]
    wrong += [f"result.json: {key}" for key in results[0] if results[0][key] != results[1].get(key)]
    if (a / "metrics.csv").read_bytes() != (b / "metrics.csv").read_bytes():
        wrong.append("metrics.csv")
    for path in a.glob("phases/*/checkpoints/final.ckpt"):
        states = [torch.load(file, weights_only=True)["state_dict"] for file in (path, b / path.relative_to(a))]
        wrong += [f"{path.parts[-3]}: {k}" for k in states[0] if not torch.equal(states[0][k], states[1][k])]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
