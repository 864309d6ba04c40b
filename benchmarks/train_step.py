"""Images per second of supernet training, against a plain timm ViT of equal size, and where the time goes.

For each size the network that the published supernet allocates (which has a timm twin of the same depth, width, heads
and MLP) is trained by the recipe's own Trainer: loader with its augmentation, mixing, gradient guard, clipping, AdamW,
logging. Within the same processes, turn and turn about in every round: the bare supernet (forward, loss, backward), the
bare timm ViT, and timm's in a plain loop with AdamW. Printed are medians over rounds (and the least), and medians of
the rounds' ratios: "Trainer / timm loop" of images per second (1: as fast), "bare step / timm" of time; "outside model"
is the Trainer's step less the bare supernet's. Images are made up (noise, 224 x 224): nothing is read from disk, but
they are cropped, augmented and normalised like real ones. Peak memory is torch's on a GPU (with the rivals' unless
`--memory`); on CPU it is what the process has gained since before training.

    python benchmarks/train_step.py --sizes tiny --rounds 5
    python benchmarks/train_step.py --device cuda --precision bf16-mixed --batch 128 --workers 12 --json out.json
    python benchmarks/train_step.py --memory --sizes tiny          # sandwich, memory-lean, activation checkpoints
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from step_worker import Case, free_port, work

log = logging.getLogger("train_step")
PLAIN = ("model.relative_position=false",)
STRATEGIES = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


@dataclass(frozen=True)
class Row:
    """What one case showed: the worker's seconds per step by name, one for each round, and bytes."""

    case: Case
    seconds: dict[str, list[float]]
    shares: dict[str, float]
    memory: float  # GiB

    def ratio(self, name: str, other: str) -> float:
        """Median over rounds of the ratio of two times."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def cells(self) -> list[object]:
        """The cells that both tables have."""
        case, step = self.case, self.seconds["step"]
        return [
            *(case.size, case.title, case.precision, case.processes, case.batch),
            f"{1000 * statistics.median(step):.1f}",
            f"{1000 * min(step):.1f}",
            f"{case.batch * case.processes / statistics.median(step):.1f}",
            f"{self.memory:.2f}",
        ]

    def compared(self) -> list[object]:
        """The cells of the comparison with timm, and the shares of the step."""
        images = self.case.batch * self.case.processes
        return [
            f"{images / statistics.median(self.seconds['timm loop']):.1f}",
            f"{self.ratio('timm loop', 'step'):.2f}",
            f"{self.ratio('model', 'timm'):.2f}",
            f"{100 * (1 - self.ratio('model', 'step')):.1f}",
            f"{100 * self.shares['loader']:.1f}",
            f"{100 * self.shares['optimiser']:.1f}",
        ]


SPEEDS = ("size", "training", "precision", "processes", "batch", "ms/step", "least", "images/s", "peak [GiB]")
COMPARED = (
    "timm loop [images/s]", "Trainer / timm loop", "bare step / timm", "outside model [%]", "loader [%]",
    "optimiser [%]",
)  # fmt: skip


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """What to measure, in order."""
    for size in given.sizes:
        for precision in given.precision:
            fixed: dict[str, Any] = {
                "size": size, "precision": precision, "batch": given.batch, "device": given.device,
                "rounds": given.rounds, "block": given.block, "workers": given.workers, "side": given.side,
                "extra": tuple(given.overrides),
            }  # fmt: skip
            yield from memory_cases(fixed) if given.memory else speed_cases(given, fixed)


def speed_cases(given: argparse.Namespace, fixed: dict[str, Any]) -> Iterator[Case]:
    """One process, then every strategy on every number of processes."""

    def more(case: dict[str, Any], *overrides: str) -> dict[str, Any]:
        return {**case, "extra": (*overrides, *case["extra"])}

    for processes in given.processes:
        fixed = {**fixed, "processes": processes}
        if processes == 1:
            yield Case("largest", **fixed)
            if not given.quick:
                yield Case("largest, no relative position", **more(fixed, *PLAIN))
                yield Case("uniform", sampler="uniform", **fixed)
        elif "ddp" in given.strategies:
            yield Case("largest, DDP", strategy="ddp", **fixed)
        for strategy in given.strategies:
            if strategy != "ddp" and (processes > 1 or given.device == "cuda"):
                yield Case(f"largest, ZeRO-{strategy[-1]}", strategy=strategy, **fixed)


def memory_cases(fixed: dict[str, Any]) -> Iterator[Case]:
    """What a step keeps, with the ways to keep less."""
    recompute = "train.checkpoint_activations=true"
    fixed = {**fixed, "rivals": False}
    extra = fixed.pop("extra")
    yield Case("largest", extra=extra, **fixed)
    yield Case("largest, checkpoint_activations", extra=(recompute, *extra), **fixed)
    yield Case("sandwich", sampler="sandwich", extra=extra, **fixed)
    yield Case("sandwich, memory_lean", sampler="sandwich", extra=("train.memory_lean=true", *extra), **fixed)
    yield Case("sandwich, checkpoint_activations", sampler="sandwich", extra=(recompute, *extra), **fixed)


def measure(case: Case, timeout: float) -> Row:
    """Run a case in processes of its own, so that memory is its own and a failure ends nothing else.

    Raises:
        RuntimeError: it failed, with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
        words = [str(Path(__file__).resolve()), "--worker", json.dumps(asdict(case)), "--json", f"{folder}/result.json"]
        if case.processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={case.processes}"]
            words = [*launcher, "--master-addr=127.0.0.1", f"--master-port={free_port()}", *words]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment(case), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise RuntimeError(f"{case.title}: status {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
        found = json.loads(Path(folder, "result.json").read_text())
    return Row(case, found["seconds"], found["shares"], found["memory"])


def environment(case: Case) -> dict[str, str]:
    """Variables of the worker: this checkout first, cores shared by its processes."""
    root = str(Path(__file__).resolve().parents[1])
    threads = max(1, len(os.sched_getaffinity(0)) // case.processes)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"DS_ACCELERATOR": "cpu"} if case.device == "cpu" else {}
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **more}


def table(rows: list[Row], memory: bool) -> str:
    """The rows as text."""
    from lightning_tas.analysis.tables import text_table

    if memory:
        return text_table(SPEEDS, [row.cells() for row in rows])
    return text_table([*SPEEDS, *COMPARED], [[*row.cells(), *row.compared()] for row in rows])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small", "base"], choices=("tiny", "small", "base"))
    parser.add_argument("--rounds", type=int, default=7, help="after one for warming up")
    parser.add_argument("--block", type=int, default=2, help="steps of each kind in a round")
    parser.add_argument("--batch", type=int, default=8, help="images per process")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", nargs="+", default=["32-true"], choices=("32-true", "bf16-mixed"))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--workers", type=int, default=0, help="data workers per process")
    parser.add_argument("--side", type=int, default=224, help="of the images, in pixels")
    parser.add_argument("--memory", action="store_true", help="measure memory of sandwich steps instead of speeds")
    parser.add_argument("--quick", action="store_true", help="neither uniform sampling nor plain attention")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    return parser.parse_args()


def main() -> int:
    """Measure every case; a failed one is reported and the others go on."""
    given = arguments()
    if given.worker:
        work(Case.read(json.loads(given.worker)), given.json)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    rows, failed = [], 0
    for case in cases(given):
        load = os.getloadavg()[0]
        try:
            row = measure(case, given.timeout)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            log.info("FAILED %s", error)
            failed += 1
            continue
        rows.append(row)
        step = statistics.median(row.seconds["step"])
        log.info("%s, %s, %s: %.1f ms (load %.1f)", case.size, case.title, case.precision, 1000 * step, load)
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    log.info("\n%s\n%s", given.device, table(rows, given.memory))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
