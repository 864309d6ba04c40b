"""Processor time until a command line with a mistake is answered, of nine mistakes that its text alone tells.

python benchmarks/typos.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

TYPOS = (
    "fit recipe=quickstart run=../../x",
    "fit recipe=quickstrat",
    "fit recipe=quickstart seed=x",
    "fit recipe=quickstart data.name=digit",
    "fit recipe=quickstart space=autoformer_tinny",
    "fit recipe=etas_tiny search.strategy=evolutoin",
    "search recipe=t_razor_tiny search.score=dsp",
    "search recipe=t_razor_tiny search.options.populatoin=3",
    "score recipe=vit_bench_pit bench.proxies=[snap]",
)


def used() -> float:
    """Seconds of processor time of the processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f}")
    for typo in TYPOS:
        command, *arguments = typo.split()
        before = used()
        done = subprocess.run([sys.executable, "-m", f"lightning_tas.{command}", *arguments], capture_output=True)
        assert done.returncode == 2, done.stderr
        print(f"{used() - before:.2f} s  {typo}")


if __name__ == "__main__":
    main()
