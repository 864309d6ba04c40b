"""What scoring costs: fast forms of the proxies against their formulas done plainly, the whole suite, many networks.

AutoFormer-Tiny at 224 pixels, one process. Rivals take turns within each round, so that a busy machine slows both;
printed are medians over rounds and medians of the rounds' ratios, of wall time and of processor time (the one to trust
on a busy machine, best with one thread). The plain forms:

    dss        cut the network out, one backward of an image of ones under |W|, the nuclear norm of each weight and
               gradient by torch.linalg.svd in float64, and by svdvals in float64 and float32
    ntkt       one forward and backward of the same batch, gradients of all weights: the least that any gradient costs
    gradsign   a loop over images, one forward and backward each

    python benchmarks/proxies.py --threads 2 --rounds 5
    python benchmarks/proxies.py --only suite --networks 3          # seconds a network, proxy by proxy
    python benchmarks/proxies.py --many                             # 10,000 networks inherited, 200 exactly
    python benchmarks/proxies.py --agreement 30                     # do both modes rank alike?
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.proxies.inherited import COSTS, LOOKUPS, agreement, build_tables
from lightning_tas.proxies.many import Exact
from lightning_tas.proxies.probe import gaussian_batch
from lightning_tas.proxies.registry import chosen, proxies
from lightning_tas.proxies.setting import Setting

GROUP = 4
"""Networks that DSS is timed on together."""
PARTS = ("dss", "ntkt", "gradsign", "inherited", "suite")


@dataclass
class Rivals:
    """Times of functions that take turns, by name: (wall, processor) seconds of every round."""

    work: dict[str, Callable[[], Any]]
    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def run(self, rounds: int) -> Rivals:
        """Take turns, after a round of warming up."""
        for round_ in range(rounds + 1):
            for name, work in self.work.items():
                began = time.perf_counter(), time.process_time()
                work()
                if round_:
                    taken = time.perf_counter() - began[0], time.process_time() - began[1]
                    self.seconds.setdefault(name, []).append(taken)
        return self

    def ratio(self, a: str, b: str, kind: int) -> float:
        """Median over rounds of the ratio of two times; kind 0 is wall, 1 processor."""
        pairs = zip(self.seconds[a], self.seconds[b], strict=True)
        return statistics.median(one[kind] / other[kind] for one, other in pairs)

    def say(self, title: str, comparisons: Sequence[tuple[str, str, str]]) -> None:
        """Print the times, and a / b with what is wanted of it."""
        print(title)
        for name, pairs in self.seconds.items():
            wall, processor = (statistics.median(pair[kind] for pair in pairs) for kind in (0, 1))
            spread = f"{min(p[1] for p in pairs):.3f} to {max(p[1] for p in pairs):.3f}"
            print(f"  {name:24s} {wall:8.3f} s wall, {processor:8.3f} s of processor ({spread})")
        for a, b, wanted in comparisons:
            both = f"{self.ratio(a, b, 0):.2f} wall, {self.ratio(a, b, 1):.2f} processor"
            print(f"  {a} / {b}: {both} (wanted: {wanted})")


# --- the formulas done plainly ----------------------------------------------------------------------------------------


def naive_dss(net: Any, arch: Architecture, singular: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float:
    """DSS of one network, paper eq. 9, with singular values by `singular`."""
    alone = net.subnet(arch).eval()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.abs_()
    alone(torch.ones(1, 3, 224, 224)).sum().backward()

    def norm(matrix: Tensor) -> Tensor:
        return singular(matrix.detach().to(dtype)).sum()

    total = 0.0
    for block in alone.blocks:
        for layer in (block.attn.qkv, block.attn.proj):
            total += float(norm(layer.weight.grad) * norm(layer.weight))
        for layer in (block.mlp.fc1, block.mlp.fc2):
            total += float((layer.weight.grad * layer.weight).detach().abs().sum())
    return total


def forward_backward(alone: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the mean loss by all parameters."""
    return torch.autograd.grad(F.cross_entropy(alone(images), labels), list(alone.parameters()))


def naive_gradsign(alone: nn.Module, images: Tensor, labels: Tensor) -> float:
    """GradSign image by image, over weight matrices."""
    weights = [p for n, p in alone.named_parameters() if n.endswith("weight") and p.ndim > 1]
    signs = [torch.zeros_like(w) for w in weights]
    for b in range(len(images)):
        loss = F.cross_entropy(alone(images[b : b + 1]), labels[b : b + 1])
        for total, gradient in zip(signs, torch.autograd.grad(loss, weights), strict=True):
            total += gradient.sign()
    return float(sum(total.abs().sum(dtype=torch.float64) for total in signs))


# --- memory -----------------------------------------------------------------------------------------------------------


def peak(work: Callable[[], Any]) -> int:
    """Bytes that the process holds at most while `work` runs, beyond what it holds before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is anew
    before = held("VmRSS")
    work()
    return held("VmHWM") - before


def held(key: str) -> int:
    """A size of the process in bytes, as the kernel has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


# --- parts ------------------------------------------------------------------------------------------------------------


def exact(net: Any, names: Sequence[str], batch: int = 16) -> Exact:
    """The exact mode's scorer, which keeps what networks share."""
    return Exact(Setting(net, 0, None, None, batch, None, None, None), chosen(names), {})


def part_dss(net: Any, options: argparse.Namespace) -> None:
    # Several networks a round: the exact mode gives each thread one, plain code gives one to all threads.
    drawn = net.space.sample(1, n=GROUP * (options.rounds + 1))
    archs = {name: iter(drawn) for name in range(4)}
    scorer = exact(net, ["dss"])
    ways: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
        "svd float64": (lambda matrix: torch.linalg.svd(matrix, full_matrices=False).S, torch.float64),
        "svdvals float64": (torch.linalg.svdvals, torch.float64),
        "svdvals float32": (torch.linalg.svdvals, torch.float32),
    }

    def plainly(place: int, how: tuple[Callable[[Tensor], Tensor], torch.dtype]) -> Callable[[], list[float]]:
        return lambda: [naive_dss(net, arch, *how) for arch in islice(archs[place], GROUP)]

    work: dict[str, Callable[[], Any]] = {name: plainly(i, how) for i, (name, how) in enumerate(ways.items())}
    work["score_many"] = lambda: list(scorer.rows(list(enumerate(islice(archs[3], GROUP)))))
    wanted = [(name, "score_many", "at least 4" if name == "svd float64" else "-") for name in ways]
    Rivals(work).run(options.rounds).say(f"exact DSS, {GROUP} networks", wanted)


def part_ntkt(net: Any, options: argparse.Namespace) -> None:
    arch = net.space.middle()
    alone = net.subnet(arch).eval()
    images, labels = gaussian_batch(0, options.batch, 3, (224, 224), 1000)
    scorer = exact(alone, ["ntkt"], options.batch)
    work: dict[str, Callable[[], Any]] = {
        "ntkt": lambda: list(scorer.rows([(0, arch)])),
        "forward and backward": lambda: forward_backward(alone, images, labels),
    }
    rivals = Rivals(work).run(options.rounds)
    rivals.say(f"NTKT, batch {options.batch}", [("ntkt", "forward and backward", "at most 1.3")])
    memory = {name: statistics.median(peak(one) for _ in range(3)) for name, one in work.items()}
    ratio = memory["ntkt"] / memory["forward and backward"]
    sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items())
    print(f"  peak memory: {sizes}; ratio {ratio:.2f} (wanted: at most 1.2)")


def part_gradsign(net: Any, options: argparse.Namespace) -> None:
    arch = net.space.middle()
    alone = net.subnet(arch).eval()
    images, labels = gaussian_batch(0, options.batch, 3, (224, 224), 1000)
    scorer = exact(alone, ["gradsign"], options.batch)
    work: dict[str, Callable[[], Any]] = {
        "gradsign": lambda: list(scorer.rows([(0, arch)])),
        "loop": lambda: naive_gradsign(alone, images, labels),
    }
    wanted = [("gradsign", "loop", "at most 1")]
    Rivals(work).run(options.rounds).say(f"GradSign, batch {options.batch}", wanted)


def part_inherited(net: Any, options: argparse.Namespace) -> None:
    codes = net.space.sample_codes(0, 200_000)
    print(f"inherited mode, tables of one gradient (batch {options.batch}), {len(codes):,} codes")
    for name in LOOKUPS:
        parts = chosen([name])
        began = time.perf_counter()
        tables = build_tables(parts, net, {}, batch_size=options.batch)
        built = time.perf_counter() - began
        scores = tables.scores(codes, parts)
        whole: list[float] = []
        for _ in range(options.rounds):
            began = time.perf_counter()
            tables.scores(codes, parts)
            whole.append(time.perf_counter() - began)
        rate, all_in = 1 / scores.seconds(name)[0], len(codes) / statistics.median(whole)
        print(
            f"  {name:10s} tables {built:6.2f} s; {rate:10,.0f} networks/s looked up, {all_in:10,.0f} with codes "
            "checked and costs (wanted: at least 10,000)"
        )


def part_suite(net: Any, options: argparse.Namespace) -> None:
    names = [name for name, one in proxies().items() if not one.combines]
    archs = net.space.sample(2, n=options.networks + 1)
    scorer = exact(net, names, options.batch)
    list(scorer.rows([(0, archs[0])]))  # warms up, and takes what later networks share
    rows, seconds = [], []
    for place, arch in enumerate(archs[1:]):
        began = time.perf_counter(), time.process_time()
        rows += list(scorer.rows([(place, arch)]))
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, processor = (statistics.median(pair[kind] for pair in seconds) for kind in (0, 1))
    print(f"whole suite, {len(names)} proxies, batch {options.batch}, median of {len(rows)} networks")
    print(f"  {wall:.2f} s a network, {processor:.2f} s of processor (wanted: at most 7)")
    alone = {name: statistics.median(row.scores[name].seconds for row in rows) for name in names}
    print(f"  each alone, shared passes included (together {sum(alone.values()):.2f} s):")
    for name, took in sorted(alone.items(), key=lambda pair: -pair[1]):
        print(f"    {name:20s} {took:8.4f} s")


def many(net: Any, options: argparse.Namespace) -> None:
    """Time and peak memory of many networks, streamed to a file."""
    cases = [("snip", "inherited", 10_000), ("dss", "exact", 200)]
    for name, mode, number in cases:
        codes = net.space.sample_codes(0, number)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scores.csv"

            def work(name: str = name, mode: str = mode, path: Path = path, codes: Any = codes) -> None:
                tas.score_many(name, net, codes, mode=mode, path=path, batch_size=options.batch)

            began = time.perf_counter(), time.process_time()
            most = peak(work)
            wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
            print(
                f"{number:,} networks, {name} {mode}, to a file of {path.stat().st_size / 2**20:.1f} MiB: {wall:.1f} s "
                f"({processor:.1f} s of processor, {number / wall:,.1f} networks/s), peak {most / 2**20:.0f} MiB "
                f"beyond the supernet's ({held('VmRSS') / 2**20:.0f} MiB in all)"
            )


def compare_modes(net: Any, options: argparse.Namespace) -> None:
    """Rank agreement of inherited and exact scores."""
    archs = net.space.sample(3, n=options.agreement)
    names = [name for name in LOOKUPS if name not in COSTS]
    exactly, shared = (
        tas.score_many(names, net, archs, mode=mode, batch_size=options.batch) for mode in ("exact", "inherited")
    )
    print(f"Kendall's tau-b of inherited and exact scores, {len(archs)} networks of {net.space.name}")
    for name in names:
        print(f"  {name:10s} {agreement(exactly, shared, name):6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="autoformer_tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--networks", type=int, default=3, help="of the suite")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--many", action="store_true", help="10,000 networks inherited and 200 exactly, nothing else")
    parser.add_argument("--agreement", type=int, default=0, metavar="NETWORKS", help="compare both modes, nothing else")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    net = tas.supernet(options.space)
    print(f"{options.space}, {options.threads} thread(s), load {os.getloadavg()[0]:.1f}")
    if options.many:
        many(net, options)
    elif options.agreement:
        compare_modes(net, options)
    else:
        parts = {"dss": part_dss, "ntkt": part_ntkt, "gradsign": part_gradsign}
        for name, part in {**parts, "inherited": part_inherited, "suite": part_suite}.items():
            if name in options.only:
                part(net, options)


if __name__ == "__main__":
    main()
