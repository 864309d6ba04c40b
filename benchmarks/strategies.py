"""Search strategies beside each other at equal evaluations: a table, a picture, and what they lack of the optimum.

    python benchmarks/strategies.py --score snip --seeds 3 --evaluations 8050 --out docs/search
    python benchmarks/strategies.py --runs runs/t_razor_tiny/a runs/tf_tas_tiny/a --out compared

The first form searches a space under limits with inherited scores (one gradient pass; then millions of networks a
second), so that thousands of evaluations cost seconds and only the strategies differ. The second one reads searches
that `python -m lightning_tas.search` has made.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import yaml

import lightning_tas as tas
from lightning_tas.analysis.plots import save_figure
from lightning_tas.analysis.strategies import Curve, comparison_figure, comparison_table, read_runs
from lightning_tas.analysis.tables import text_table
from lightning_tas.limits import Region
from lightning_tas.proxies.inherited import LOOKUPS
from lightning_tas.search.exact import search_exact
from lightning_tas.search.objective import Objective
from lightning_tas.search.scorers import ProxyScorer
from lightning_tas.search.strategy import Strategy, build_strategy, run

# So many evaluations as asked for: settings by strategy, in units of generations of 50.
BUDGETS = {
    "random": lambda n: {"networks": n},
    "evolution": lambda n: {"population": 50, "generations": n // 50 - 1},
    "s3_evolution": lambda n: {"population": 50, "generations": n // 50 - 1},
    "blockwise": lambda n: {"population": 50, "generations": n // 50 - 1},
}


def search(scorer: ProxyScorer, region: Region, score: str, strategy: str, seed: int, evaluations: int) -> Strategy:
    """One search by inherited scores, of "name" or "name:setting=value,..."."""
    name, _, given = strategy.partition(":")
    settings = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in given.split(",") if one)}
    made = build_strategy(name, region, score, seed, **BUDGETS[name](evaluations), **settings)
    made.name = strategy  # what tables and pictures call it
    return run(made, lambda archs, names: scorer(archs, names))


def curves_of(searches: list[Strategy], score: str) -> list[Curve]:
    """Their curves; a rank-combined score ranks the networks of all searches together."""
    values = Objective.of(score).values([row for one in searches for row in one.history.scores])
    ends = np.cumsum([len(one.history) for one in searches])
    parts = np.split(values, ends[:-1])
    return [Curve.of(one.name, one.seed, part) for one, part in zip(searches, parts, strict=True)]


def moves_table(searches: list[Strategy]) -> str:
    """What became of proposals and of the draws behind them, per strategy: means over generations and seeds."""
    rows = []
    for name in dict.fromkeys(one.name for one in searches):
        own = [one for one in searches if one.name == name]
        stats = [row for one in own for row in one.stats]
        total = {key: sum(row[key] for row in stats) for key in ("drawn", "outside", "released")}
        networks = sum(one.evaluations for one in own)
        rows.append(
            [
                name,
                f"{100 * np.mean([row['unique'] for row in stats]):.1f}",
                f"{100 * (1 - total['outside'] / max(total['drawn'], 1)):.1f}",
                f"{100 * np.mean([row['acceptance'] for row in stats]):.1f}",
                f"{100 * min(row['acceptance'] for row in stats):.1f}",
                f"{total['drawn'] / networks:.1f}",
                f"{total['released'] / networks:.2f}",
            ]
        )
    heads = ["new [%]", "within the limits [%]", "both [%]", "least of a generation [%]"]
    return text_table(["strategy", *heads, "draws a network", "released a network"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="autoformer_tiny")
    parser.add_argument("--params", nargs=2, default=["5M", "7M"], metavar=("LOW", "HIGH"))
    parser.add_argument("--score", default="snip", help="a proxy with inherited tables: %(default)s, dss, dss_pp, ...")
    parser.add_argument("--strategies", nargs="+", default=list(BUDGETS), help="NAME or NAME:SETTING=VALUE,...")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=8050)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--runs", nargs="+", type=Path, help="run folders of finished searches instead")
    parser.add_argument("--out", type=Path, default=Path("strategies"), help="folder for the table and the picture")
    given = parser.parse_args()

    optimum, searches = None, []
    if given.runs:
        curves, title = read_runs(given.runs), f"{len(given.runs)} searches"
        evaluations = max(len(curve.best) for curve in curves)
    else:
        torch.manual_seed(0)
        net = tas.supernet(given.space, num_classes=1000, img_size=given.img_size)
        region = Region(net.space, {"params": given.params}, net)
        if given.score in LOOKUPS:
            optimum = search_exact(net, given.score, limits=region).networks[0].score
        scorer = ProxyScorer(net, mode="inherited")
        for name in given.strategies:
            for seed in range(given.seeds):
                began = time.perf_counter()
                searches.append(search(scorer, region, given.score, name, seed, given.evaluations))
                seconds = time.perf_counter() - began
                sys.stderr.write(f"{name}, seed {seed}: {searches[-1].evaluations:,} networks in {seconds:.1f} s\n")
        curves = curves_of(searches, given.score)
        title, evaluations = f"{given.space}, {'-'.join(given.params)} parameters", given.evaluations
    at = sorted({max(1, evaluations // 16), max(1, evaluations // 4), evaluations})
    sys.stdout.write(comparison_table(curves, given.score, at, optimum) + "\n")
    sys.stdout.write(moves_table(searches) + "\n" if searches else "")
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    figure = comparison_figure(curves, given.score, evaluations, title, optimum)
    given.out.mkdir(parents=True, exist_ok=True)
    save_figure(figure, given.out / f"strategies-{given.score}.png")
    with (given.out / f"strategies-{given.score}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "seed", *(f"best after {n}" for n in at)])
        writer.writerows([curve.strategy, curve.seed, *(curve.after(n) for n in at)] for curve in curves)


if __name__ == "__main__":
    main()
