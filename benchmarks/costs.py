"""Encoded architectures counted per second, on one core, against counting them one by one.

python benchmarks/costs.py --number 1000000
"""

from __future__ import annotations

import argparse
import os
import time

import lightning_tas as tas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    for name in ("autoformer_tiny", "autoformer_small", "autoformer_base"):
        space = tas.space(name)
        codes = space.sample_codes(0, options.number)
        best = float("inf")
        for _ in range(options.rounds):
            start = time.process_time()
            found = tas.cost(codes, space)
            best = min(best, time.process_time() - start)
        archs = space.decode(codes[:2000])
        start = time.process_time()
        singly = [tas.cost(arch) for arch in archs]
        each = (time.process_time() - start) / len(archs)
        assert [c.params for c in singly] == found.params[:2000].tolist()
        rate = options.number / best
        print(f"{name}: {rate / 1e6:.2f} million codes a second; {rate * each:.0f} times as fast as one by one")


if __name__ == "__main__":
    main()
