"""PreNAS on Fashion-MNIST against the same networks trained alone and under uniform sampling, at equal steps.

For every seed: one PreNAS run, one AutoFormer (uniform) run, and one run for each selected network on its own, all
with the recipe's optimiser, schedule, batch size and number of steps. Prints top-1 on the 10,000 test images per
network, mean and standard deviation over seeds, and writes them to `--output`.

    python benchmarks/fashion_mnist.py --seeds 0 1 2 --jobs 1
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_tas.analysis.tables import text_table
from lightning_tas.launch.results import read_architectures

RECIPE = "prenas_fashion_mnist"
log = logging.getLogger("fashion_mnist")


def fit(output: Path, run: str, seed: int, *overrides: str) -> Path:
    """Run one study in a process of its own, continuing it if it was begun; return its folder."""
    command = [sys.executable, "-m", "lightning_tas.fit", f"recipe={RECIPE}", f"seed={seed}", f"run={run}"]
    command += [f"output_dir={output}", "resume=auto", *overrides]
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (output / f"{run}.log").open("w") as stream:
        subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=True)
    log.info("%s: %.0f s", run, time.monotonic() - began)
    return output / RECIPE / run


def result(folder: Path) -> dict[str, Any]:
    """The networks of a run by id."""
    record = json.loads((folder / "result.json").read_text())
    return {entry["id"]: entry for entry in record["architectures"]}


def uniform_accuracy(folder: Path, networks: dict[str, Any], root: str | None) -> dict[str, float]:
    """Top-1 of the selected networks on the uniformly trained supernet."""
    from lightning_tas.architecture import Architecture
    from lightning_tas.data import TASDataModule
    from lightning_tas.data.config import DataConfig
    from lightning_tas.evaluator import evaluate
    from lightning_tas.training.checkpoint import load_supernet

    checkpoint = next(folder.glob("phases/*-supernet/checkpoints/final.ckpt"))
    data = TASDataModule(DataConfig(name="fashion_mnist", root=root, crop="pad", eval_batch_size=500))
    archs = [Architecture.from_dict(entry["arch"]) for entry in networks.values()]
    found = evaluate(load_supernet(checkpoint).net, archs, data.test_dataloader())
    return {key: accuracy.top1 for key, accuracy in zip(networks, found, strict=True)}


def study(output: Path, seeds: list[int], jobs: int, extra: list[str], root: str | None) -> list[dict[str, Any]]:
    """All runs of all seeds; one row per seed and network."""
    with ThreadPoolExecutor(jobs) as pool:
        selected = {seed: pool.submit(fit, output, f"select-{seed}", seed, "phases=[select]", *extra) for seed in seeds}
        preferred = {seed: pool.submit(fit, output, f"prenas-{seed}", seed, *extra) for seed in seeds}
        spread = ["sampler.name=uniform", "phases=[supernet,measure]", *extra]
        uniform = {seed: pool.submit(fit, output, f"uniform-{seed}", seed, *spread) for seed in seeds}
        alone = {}
        for seed in seeds:
            path = selected[seed].result() / "selection.json"
            for label, arch in read_architectures(path).items():
                one = ["phases=[retrain]", f"arch={path}@{label}", *extra]
                alone[seed, arch.id] = pool.submit(fit, output, f"alone-{seed}-{label}", seed, *one)
        rows = []
        for seed in seeds:
            networks = result(preferred[seed].result())
            shared = uniform_accuracy(uniform[seed].result(), networks, root)
            for key, entry in networks.items():
                if (seed, key) not in alone:  # a GPU adds in any order: two selections may break a tie differently
                    log.warning("seed %d: %s was selected only once and is left out", seed, entry["label"])
                    continue
                single = next(iter(result(alone[seed, key].result()).values()))
                assert single["id"] == key
                rows.append(
                    {
                        "seed": seed,
                        "network": entry["label"],
                        "id": key,
                        "params": entry["params"],
                        "prenas": entry["metrics"]["top1"],
                        "alone": single["metrics"]["top1"],
                        "uniform": shared[key],
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds for each position in the list of networks (smallest first)."""
    seeds = sorted({row["seed"] for row in rows})
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for seed in seeds:
        ordered = sorted((row for row in rows if row["seed"] == seed), key=lambda row: row["params"])
        for rank, row in enumerate(ordered):
            by_rank.setdefault(rank, []).append(row)

    def cell(group: list[dict[str, Any]], key: str) -> str:
        values = [row[key] for row in group]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.mean(values):.2f} ± {spread:.2f}"

    lines = []
    for group in by_rank.values():
        worst = max(row["alone"] - row["prenas"] for row in group)
        least = min(row["prenas"] for row in group)
        names = "/".join(dict.fromkeys(row["network"] for row in group))
        lines.append(
            [names, len(group), cell(group, "prenas"), cell(group, "alone"), cell(group, "uniform"), f"{least:.2f}",
             f"{worst:.2f}"]
        )  # fmt: skip
    header = ["network", "seeds", "PreNAS [%]", "alone [%]", "uniform [%]", "least PreNAS [%]", "largest gap to alone"]
    return text_table(header, lines)


def main() -> None:
    """Parse arguments, run, report."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/fashion_mnist_study"))
    parser.add_argument("--root", default=None, help="folder of the IDX files")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    extra = [*arguments.overrides, *([f"data.root={arguments.root}"] if arguments.root else [])]
    rows = study(arguments.output, arguments.seeds, arguments.jobs, extra, arguments.root)
    (arguments.output / "rows.json").write_text(json.dumps(rows, indent=2))
    log.info("%s", table(rows))


if __name__ == "__main__":
    main()
