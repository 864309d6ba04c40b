"""The tables of docs/vit_bench_101.md, in Markdown, from runs of the score command.

A cell is tau-b, its standard deviation between initialisations behind the sign, and the published figure in brackets.

    python benchmarks/proxy_table.py RUN...
    python benchmarks/proxy_table.py --agreement RUN OTHER      # do two settings rank the networks of both alike?
    python benchmarks/proxy_table.py --published RUN --subset 40    # would 40 of the networks give what is printed?
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau, pearsonr, spearmanr

COLUMNS = {
    "c100_kd_acc": "CIFAR-100", "flower_kd_acc": "Flowers", "chaoyang_kd_acc": "Chaoyang",
    "c100_base_acc": "CIFAR-100, plain", "flower_base_acc": "Flowers, plain", "chaoyang_base_acc": "Chaoyang, plain",
    "imagenet_super_acc": "ImageNet, inherited",
}  # fmt: skip

COEFFICIENTS = {"tau": ("tau-b", kendalltau), "spearman": ("rho", spearmanr), "pearson": ("r", pearsonr)}


def cell(row: dict[str, Any]) -> str:
    """tau-b ± sd [published]."""
    if row["tau_b"] is None:
        return "-"
    text = f"{row['tau_b']:.3f}"
    if row["spread"]:
        text += f" ± {row['spread']:.3f}"
    return text if row["published_tau"] is None else f"{text} [{row['published_tau']:.3f}]"


def table(run: Path) -> str:
    """One bench: a line for every proxy, those that rank best on average first, params and MACs on top."""
    record = json.loads((run / "score.json").read_text(encoding="utf-8"))
    rows = {(row["accuracy"], row["proxy"]): row for row in record["correlations"]}
    columns = [name for name in COLUMNS if any(name == column for column, _ in rows)]
    names = list(dict.fromkeys(proxy for _, proxy in rows))
    first = columns[0]
    head = ["proxy", *(COLUMNS[name] for name in columns), f"given params ({COLUMNS[first]})", "mean best rank", "s"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for name in names:
        row = rows[first, name]
        partial, best = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("partial", "best_rank"))
        cells = [f"`{name}`", *(cell(rows[column, name]) for column in columns)]
        cells += [partial, best, f"{row['seconds']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    low, high = (count / 1e6 for count in record["params"])
    return f"{record['networks']} networks, {low:.2f} to {high:.2f} M params\n\n" + "\n".join(lines) + "\n"


def scores(run: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Rows of scores.csv by (network, initialisation)."""
    with (run / "scores.csv").open(encoding="utf-8", newline="") as file:
        return {(row["id"], row["init"]): row for row in csv.DictReader(file)}


def agreement(run: Path, other: Path) -> str:
    """tau-b between the scores of two runs, proxy by proxy, over the networks and initialisations of both."""
    one, two = scores(run), scores(other)
    shared = [key for key in one if key in two]
    names = [name for name in json.loads((run / "score.json").read_text(encoding="utf-8"))["proxies"] if name in
             two[shared[0]]]  # fmt: skip
    lines = ["| proxy | tau-b | networks |", "| --- | --- | --- |"]
    for name in names:
        pairs = [(float(one[key][name]), float(two[key][name])) for key in shared if one[key][name] and two[key][name]]
        tau = kendalltau(*zip(*pairs, strict=True)).statistic if pairs else float("nan")
        lines.append(f"| `{name}` | {tau:.3f} | {len(pairs)} |")
    return "\n".join(lines) + "\n"


def against_published(run: Path, subset: int, leave_out: Sequence[str] = (), draws: int = 1000, seed: int = 0) -> str:
    """Each published coefficient beside ours, and the middle 95 % of ours over random subsets of the networks.

    Papers that judge on a part of a bench without naming it publish one such subset; one initialisation a draw. The
    last line says how near one subset comes to all the published tau (but those of `leave_out`) at once.
    """
    record = json.loads((run / "score.json").read_text(encoding="utf-8"))
    given: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader((run / "scores.csv").open(encoding="utf-8", newline="")):
        given.setdefault(row["init"], []).append(row)
    random = np.random.default_rng(seed)
    inits = list(given)
    picks = [(random.integers(len(inits)), random.permutation(record["networks"])[:subset]) for _ in range(draws)]
    apart: list[Any] = []
    head = ["proxy", "accuracy", "coefficient", "all networks", "a subset, 95 %", "published", ""]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for told in record["correlations"]:
        for key, (name, coefficient) in COEFFICIENTS.items():
            printed = told[f"published_{key}"]
            if printed is None:
                continue
            values = np.array([[float(row[told["proxy"]]) for row in given[init]] for init in inits])
            accuracy = np.array([float(row[told["accuracy"]]) for row in given[inits[0]]])
            found = [coefficient(values[init, few], accuracy[few]).statistic for init, few in picks]
            if key == "tau" and told["proxy"] not in leave_out:
                apart.append(np.array(found) - printed)
            low, high = np.percentile(found, (2.5, 97.5))
            ours = np.mean([coefficient(one, accuracy).statistic for one in values])
            cells = [f"`{told['proxy']}`", COLUMNS[told["accuracy"]], name, f"{ours:.2f}", f"{low:.2f} to {high:.2f}"]
            cells += [f"{printed:.2f}", "" if low <= printed <= high else "outside"]
            lines.append(f"| {' | '.join(cells)} |")
    distances = np.sqrt(np.mean(np.square(apart), axis=0))
    nearest = np.array(apart)[:, distances.argmin()]
    lines += ["", f"The nearest of {draws:,} subsets of {subset}: root mean square difference {distances.min():.3f}, "
              f"largest {np.abs(nearest).max():.3f}, over {len(apart)} published tau; median subset "
              f"{np.median(distances):.3f}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders of the score command")
    parser.add_argument("--agreement", nargs=2, type=Path, metavar=("RUN", "OTHER"))
    parser.add_argument("--published", type=Path, metavar="RUN")
    parser.add_argument("--subset", type=int, default=40, help="networks in a subset")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="PROXY", help="of the search for one subset")
    parser.add_argument("--draws", type=int, default=1000, help="subsets")
    arguments = parser.parse_args()
    for run in arguments.runs:
        sys.stdout.write(table(run) + "\n")
    if arguments.agreement:
        sys.stdout.write(agreement(*arguments.agreement))
    if arguments.published:
        sys.stdout.write(against_published(arguments.published, arguments.subset, arguments.leave_out, arguments.draws))


if __name__ == "__main__":
    main()
