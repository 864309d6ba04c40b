"""The tables of docs/vit_bench_101.md, in Markdown, from runs of the score command.

A cell is tau-b, its standard deviation between initialisations behind the sign, and the published figure in brackets.

    python benchmarks/proxy_table.py RUN...
    python benchmarks/proxy_table.py --agreement RUN OTHER      # do two settings rank the networks of both alike?
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

COLUMNS = {
    "c100_kd_acc": "CIFAR-100", "flower_kd_acc": "Flowers", "chaoyang_kd_acc": "Chaoyang",
    "c100_base_acc": "CIFAR-100, plain", "flower_base_acc": "Flowers, plain", "chaoyang_base_acc": "Chaoyang, plain",
    "imagenet_super_acc": "ImageNet, inherited",
}  # fmt: skip


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
    head = ["proxy", *(COLUMNS[name] for name in columns), f"given params ({COLUMNS[first]})", "mean best rank"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for name in names:
        row = rows[first, name]
        partial, best = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("partial", "best_rank"))
        cells = [f"`{name}`", *(cell(rows[column, name]) for column in columns), partial, best]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders of the score command")
    parser.add_argument("--agreement", nargs=2, type=Path, metavar=("RUN", "OTHER"))
    arguments = parser.parse_args()
    for run in arguments.runs:
        sys.stdout.write(table(run) + "\n")
    if arguments.agreement:
        sys.stdout.write(agreement(*arguments.agreement))


if __name__ == "__main__":
    main()
