"""The table estimate of latency against direct measurements of other networks, on the machine at hand.

python benchmarks/latency.py --space autoformer_tiny --batch-size 1 --threads 1
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from scipy.stats import kendalltau

import lightning_tas as tas
from lightning_tas.latency import LatencyTable, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="autoformer_tiny")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=20, help="timed passes of a network")
    parser.add_argument("--networks", type=int, default=16)
    options = parser.parse_args()
    with torch.device("meta"):
        net = tas.supernet(options.space, img_size=options.img_size)
    common = {"batch_size": options.batch_size, "threads": options.threads, "device": options.device}
    print(f"load {os.getloadavg()[0]:.1f}, {options.img_size} px, {common}")
    start = time.perf_counter()
    table = LatencyTable.build(net, repeats=options.repeats, check=options.networks, **common)
    print(f"{table}\nbuilt in {time.perf_counter() - start:.0f} s; errors of the networks measured in turns:")
    print(", ".join(f"{error:+.2%}" for error in table.errors))

    archs = net.space.sample(1, n=options.networks)
    codes = net.space.encode(archs)
    start = time.perf_counter()
    direct = [measure(net, arch, repeats=options.repeats, **common) for arch in archs]
    each = (time.perf_counter() - start) / len(archs)
    medians = np.array([found.median_ms for found in direct])
    errors = np.abs(table(codes) / medians - 1)
    spread = np.median([(found.high_ms - found.low_ms) / found.median_ms for found in direct])
    print(
        f"{len(archs)} others, {medians.min():.1f} to {medians.max():.1f} ms, one after the other (median of "
        f"{options.repeats}, quartiles {spread:.1%} apart): error median {np.median(errors):.2%}, at most "
        f"{errors.max():.2%}, Kendall's tau {kendalltau(table(codes), medians).statistic:.3f}"
    )
    many = net.space.sample_codes(2, 100_000)
    start = time.perf_counter()
    table(many)
    rate = len(many) / (time.perf_counter() - start)
    print(f"measuring takes {each:.2f} s a network; the table gives {rate / 1e6:.1f} million estimates a second")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
