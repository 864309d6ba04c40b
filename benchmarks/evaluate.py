"""What evaluating populations costs: racing against full evaluation, shared prefixes, images per second.

simulate: populations of known accuracies (normal with the stated spread, a standard deviation in points, around --mean)
    race in generations. Image evaluations used, in percent of full evaluation; seeds in which racing changed which
    networks are the best --top; regret, the mean accuracy that the returned ones lack, over all --images, in points.
    "alike": images have difficulties in common, so that networks err on the same ones (two networks of 75 % agree on
    86 % of the images); "independent": they have not, which no real networks do, and which is harder.
supernet: the same for the sub-networks of a trained supernet, racing over their real hits in random orders of images
    and networks; and images per second, one by one, together, and racing.
sharing: blocks (and poolings) that shared prefixes save, in random generations and in those
    of an evolution.

    python benchmarks/evaluate.py simulate --seeds 200
    python benchmarks/evaluate.py supernet                     # trains one on Fashion-MNIST first; or --ckpt PATH
    python benchmarks/evaluate.py sharing
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm

import lightning_tas as tas
from lightning_tas.analysis.tables import text_table
from lightning_tas.forward_tree import ForwardTree, path_of
from lightning_tas.racing import Race, run
from lightning_tas.randomness import numpy_generator

Bools = npt.NDArray[np.bool_]
RECIPE = "autoformer_fashion_mnist"
COMMON = {"alike": 0.8, "independent": 0.0}
"""Share of the variance of a network's ease with an image that is the image's."""


class Outcome(NamedTuple):
    """Of one race: image evaluations as a share, whether the best differ, points lost, range of accuracies [%]."""

    used: float
    wrong: bool
    regret: float
    low: float
    high: float


def population(
    rng: np.random.Generator, networks: int, images: int, spread: float, mean: float, common: float
) -> Bools:
    """Hits (networks, images): network c is right where sqrt(common) z_i + sqrt(1 - common) e_ic is below t_c."""
    accuracy = np.clip(mean + spread * rng.standard_normal(networks), 1, 99) / 100
    threshold = norm.ppf(accuracy).astype(np.float32)
    shared = np.sqrt(np.float32(common)) * rng.standard_normal(images, dtype=np.float32)
    hits = np.empty((networks, images), dtype=bool)
    for row, limit in zip(hits, threshold, strict=True):
        row[:] = shared + np.sqrt(np.float32(1 - common)) * rng.standard_normal(images, dtype=np.float32) < limit
    return hits


def race(hits: Bools, top: int, error: float, generation: int) -> Outcome:
    """Race networks in the order of their rows, over the images in the order of the columns."""
    names = [f"{number:06d}" for number in range(len(hits))]
    images, counted = hits.shape[1], [0]

    def look(asked: Sequence[str], begin: int, end: int) -> dict[str, Bools]:
        counted[0] += len(asked) * (end - begin)
        return {name: hits[int(name), begin:end] for name in asked}

    judge = Race(images, top, error)
    for start in range(0, len(names), generation):
        run(judge, names[start : start + generation], look)
    right = hits.sum(axis=1)
    best = np.lexsort((np.arange(len(hits)), -right))[:top]
    found = np.array([int(name) for name in judge.ids])
    regret = 100 * (right[best].mean() - right[found].mean()) / images
    share = right * 100.0 / images
    return Outcome(counted[0] / hits.size, set(best) != set(found), float(regret), share.min(), share.max())


def row(name: Sequence[Any], found: Sequence[Outcome]) -> list[Any]:
    used, wrong, regret, low, high = (np.array(column) for column in zip(*found, strict=True))
    reach, share = f"{low.mean():.1f} to {high.mean():.1f}", f"{100 * used.mean():.1f} ± {100 * used.std():.1f}"
    changed = f"{100 * wrong.mean():.1f}"
    return [*name, reach, len(found), share, changed, f"{regret.mean():.5f}", f"{regret.max():.4f}"]


COLUMNS = ["range [%]", "races", "evaluations [%]", "changed [%]", "mean regret", "largest regret [points]"]


def simulate(options: argparse.Namespace) -> None:
    lines = []
    for model, common in COMMON.items():
        for spread in options.spreads:
            began, found = time.process_time(), []
            for seed in range(options.seeds):
                rng = numpy_generator(seed, "evaluate", model, round(1000 * spread))
                hits = population(rng, options.networks, options.images, spread, options.mean, common)
                found.append(race(hits, options.top, options.error, options.generation))
            lines.append([*row([model, spread], found), f"{(time.process_time() - began) / options.seeds:.2f}"])
    print(text_table(["images are", "spread [points]", *COLUMNS, "processor [s]"], lines))


# --- a trained supernet --------------------------------------------------------------------------------------------


def trained(options: argparse.Namespace) -> Path:
    """The checkpoint of a supernet, trained by the recipe's first phase where none is given."""
    if options.ckpt is not None:
        return Path(options.ckpt)
    command = [sys.executable, "-m", "lightning_tas.fit", f"recipe={RECIPE}", "run=evaluate", "phases=[supernet]"]
    command += [f"output_dir={options.output}", "search.strategy=null", "resume=auto", *options.overrides]
    subprocess.run(command, check=True)
    return next((options.output / RECIPE / "evaluate").glob("phases/*-supernet/checkpoints/final.ckpt"))


def supernet(options: argparse.Namespace) -> None:
    from lightning_tas.data import TASDataModule
    from lightning_tas.data.config import DataConfig
    from lightning_tas.population import Population
    from lightning_tas.training.checkpoint import load_supernet

    loaded = load_supernet(trained(options))
    net = loaded.net
    config = DataConfig(
        name="fashion_mnist", root=options.root, search_val=options.held, crop="none", eval_batch_size=500
    )
    data = TASDataModule(config, loaded.seed)
    archs = list(dict.fromkeys(net.space.sample(seed=0, n=4 * options.subnets)))[: options.subnets]
    hits = Population(net, data.search_loader()).hits(archs)
    share = 100 * hits.mean(axis=1)
    likeness = np.mean([(hits[i] == hits[i + 1]).mean() for i in range(len(hits) - 1)])
    print(
        f"{len(archs)} sub-networks of {net.space.name!r}, {hits.shape[1]} images: top-1 {share.min():.2f} to "
        f"{share.max():.2f} %, deviation {share.std():.2f} points; two agree on {100 * likeness:.1f} % of the images",
        flush=True,
    )
    found = []
    for seed in range(options.seeds):
        rng = numpy_generator(seed, "evaluate", "orders")
        mixed = hits[rng.permutation(len(hits))][:, rng.permutation(hits.shape[1])]
        found.append(race(mixed, options.top, options.error, options.generation))
    print(text_table(["supernet", *COLUMNS], [row([net.space.name], found)]), flush=True)
    speed(net, data, archs[: options.generation], options)


def speed(net: Any, data: Any, archs: Sequence[Any], options: argparse.Namespace) -> None:
    """Images per second of one generation of an evolution's size, by each way of evaluating it."""
    from lightning_tas.evaluator import evaluate
    from lightning_tas.population import Population

    population, images = Population(net, data.search_loader()), len(data.search_loader().sampler.indices)
    print(f"decoded once: {timed(lambda: population.images)[1]:.2f} s")
    racing = Population(net, data.search_loader())
    racing.race(archs[: options.top], top=options.top)  # a search has its best after the first networks
    ways: dict[str, Callable[[], Any]] = {
        "one by one, decoding each time": lambda: [evaluate(net, [arch], data.search_loader())[0] for arch in archs],
        "one pass over the loader": lambda: evaluate(net, archs, data.search_loader()),
        "Population.accuracies": lambda: population.accuracies(archs),
        "Population.race": lambda: racing.race(archs, top=options.top),
    }
    lines, results = [], {}
    for name, way in ways.items():
        results[name], wall, processor = timed(way)
        rate = len(archs) * images / processor
        lines.append([name, f"{wall:.2f}", f"{processor:.2f}", f"{rate:,.0f}"])
    first, second, third, _ = results.values()
    assert first == second == third, "accuracies differ"
    print(text_table(["way", "wall [s]", "processor [s]", "network images a second of processor"], lines))
    print(
        f"blocks: {population.work.blocks_alone / population.work.blocks:.2f} times fewer by shared prefixes; ", end=""
    )
    print(f"{torch.get_num_threads()} thread(s), load {os.getloadavg()[0]:.1f}")


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """(Result, wall seconds, processor seconds)."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - processor


# --- shared prefixes -----------------------------------------------------------------------------------------------


def generations(space: Any, size: int, seeds: int) -> Iterator[tuple[str, list[Any]]]:
    """(kind, networks): random ones, and half mutants, half children of ten parents, as in AutoFormer's evolution."""
    for seed in range(seeds):
        networks = space.sample(seed=seed, n=size)
        yield "random", networks
        rng = numpy_generator(seed, "evaluate", "parents")
        parents = networks[:10]
        children = []
        for number in range(size):
            one, other = (parents[i] for i in rng.choice(len(parents), 2, replace=False))
            draw = int(rng.integers(2**62))
            children.append(space.mutate(one, draw) if number % 2 else space.crossover(one, other, draw))
        yield "evolution", children


def sharing(options: argparse.Namespace) -> None:
    lines = []
    for name in options.spaces:
        with torch.device("meta"):
            net = tas.supernet(name)
        found: dict[str, list[tuple[int, int]]] = {}
        for kind, archs in generations(net.space, options.generation, options.seeds):
            tree = ForwardTree(net, {arch: path_of(net, arch) for arch in archs})
            found.setdefault(kind, []).append((tree.blocks(tree.order), tree.blocks_alone(tree.order)))
        for kind, pairs in found.items():
            blocks, alone = np.array(pairs).sum(axis=0) / len(pairs)
            lines.append([name, kind, f"{alone:.0f}", f"{blocks:.0f}", f"{100 * (1 - blocks / alone):.1f}"])
    print(text_table(["space", "generation", "blocks alone", "blocks shared", "saved [%]"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulate", "supernet", "sharing"])
    parser.add_argument("--seeds", type=int, default=200, help="races, or generations of sharing")
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.5, 1, 2, 5], metavar="POINTS")
    parser.add_argument("--mean", type=float, default=75.0, help="mean accuracy [%%]")
    parser.add_argument("--networks", type=int, default=1000)
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--error", type=float, default=0.05, help="stated probability that racing changes the best")
    parser.add_argument("--generation", type=int, default=50)
    parser.add_argument("--spaces", nargs="+", default=["autoformer_tiny", "autoformer_base", "pit_ti"])
    parser.add_argument("--ckpt", default=None, help="trained supernet of Fashion-MNIST; default: train one")
    parser.add_argument("--held", type=int, default=2000, help="held-out images, as in its training")
    parser.add_argument("--subnets", type=int, default=300)
    parser.add_argument("--root", default=None, help="folder of the IDX files")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", help="key=value for the training")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"simulate": simulate, "supernet": supernet, "sharing": sharing}[options.what](options)


if __name__ == "__main__":
    main()
