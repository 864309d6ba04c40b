"""Coverage of the 95 % intervals of Kendall's tau-b: how often the true value lies below and above, by simulation.

    python benchmarks/intervals.py [--experiments 1000]

Scores and accuracies are bivariate normal with correlation r, whose tau is 2/pi arcsin r; with --ties the scores are
rounded to whole numbers and the accuracies to tenths, and the true tau is that of 200,000 pairs.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np
from scipy import stats

from lightning_tas.analysis.correlation import bootstrap_interval, ranks
from lightning_tas.analysis.tables import text_table


def draw(n: int, r: float, ties: bool, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(n,) scores and (n,) accuracies."""
    a, b = generator.normal(size=(2, n))
    b = r * a + math.sqrt(1 - r * r) * b
    return (a.round(0), b.round(1)) if ties else (a, b)


def coverage(n: int, r: float, ties: bool, experiments: int) -> list[str]:
    """One row of the table."""
    generator = np.random.default_rng([n, round(100 * r), ties])
    true = float(stats.kendalltau(*draw(200_000, r, ties, generator)).statistic) if ties else 2 / math.pi * math.asin(r)
    below = above = none = 0
    widths = []
    for experiment in range(experiments):
        scores, truth = draw(n, r, ties, generator)
        low, high = bootstrap_interval(ranks(scores)[None], truth, seed=experiment, resamples=1000)
        if low is None or high is None:
            none += 1
            continue
        below, above = below + (true < low), above + (true > high)
        widths.append(high - low)
    shares = (f"{100 * count / max(1, len(widths)):.1f}" for count in (below, above))
    return [str(n), f"{r:.2f}", f"{true:.3f}", *shares, f"{np.mean(widths):.2f}", str(none)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--ties", action="store_true")
    given = parser.parse_args()
    header = ["networks", "r", "true tau", "below [%]", "above [%]", "width", "without interval"]
    rows = [coverage(n, r, given.ties, given.experiments) for n in (8, 12, 20, 60) for r in (0.0, 0.6, 0.8, 0.95)]
    sys.stdout.write(text_table(header, rows) + "\n")


if __name__ == "__main__":
    main()
