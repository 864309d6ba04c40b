"""Exact search timed: one-stage spaces, PiT, 1.2e22 networks of four stages, and what evolution loses against it.

python benchmarks/exact.py --parts isotropic pit stages evolution

Times of the search leave out the gradient pass and its tables, which are listed beside it. OMP_NUM_THREADS=1 measures
one thread; the search itself is NumPy's and never uses more.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import lightning_tas as tas
from lightning_tas.additive import Problem, Term, Total, best, count, front, ranges
from lightning_tas.additive.derive import derive_terms
from lightning_tas.costs import cost_options
from lightning_tas.costs.terms import cost_terms
from lightning_tas.proxies.inherited import build_tables
from lightning_tas.proxies.registry import proxy
from lightning_tas.search.exact import search_exact
from lightning_tas.spaces import Dimension, SearchSpace

ISOTROPIC = ("autoformer_tiny", "autoformer_small", "autoformer_base_paper")
PITS = ("pit_ti", "pit_xs", "pit_s")
INF = float("inf")


def timed(make: Callable[[], Any], rounds: int) -> tuple[Any, float, float]:
    """(result, least seconds on the clock, least seconds of the processor)."""
    clock, processor = [], []
    for _ in range(rounds):
        began = time.perf_counter(), time.process_time()
        result = make()
        clock.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
    return result, min(clock), min(processor)


def memory() -> str:
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB"


def whole_space(name: str, images: int, rounds: int) -> None:
    """Optimum, fronts and counts of a space with a real supernet."""
    torch.manual_seed(0)
    net = tas.supernet(name)
    space: Any = net.space
    began = time.perf_counter()
    tables = build_tables([proxy("snip")], net, {}, batch_size=images)
    passed = time.perf_counter() - began
    score = tables.total("snip")
    costs, terms, _ = timed(lambda: cost_terms(space, cost_options(net)), rounds)
    low, high = ranges(space, costs["params"])
    limit = {"params": (-INF, (low + high) / 2)}
    only = {"params": costs["params"]}
    full, least, used = timed(lambda: front(Problem(space, score, costs)), rounds)
    plain, quick, _ = timed(lambda: front(Problem(space, score, only)), rounds)
    one, single, _ = timed(lambda: best(Problem(space, score, only, limit)), rounds)
    number, counted, _ = timed(lambda: count(space, costs, limit), rounds)
    print(
        f"{name}: {space.size():.3g} networks; gradient pass and tables {passed:.1f} s, cost tables {terms:.3f} s\n"
        f"  front of score, params, MACs: {len(full)} networks in {least:.4f} s (processor {used:.4f}), "
        f"{full.labels} labels, complete: {full.optimal}\n"
        f"  front of score, params: {len(plain)} in {quick:.4f} s; best under {limit['params'][1] / 1e6:.1f}M: "
        f"{single:.4f} s, proven: {one.optimal}; {number:.6g} networks under it counted in {counted:.4f} s; {memory()}",
        flush=True,
    )


# --- four stages ------------------------------------------------------------------------------------------------------

SIDES = (56, 28, 14, 7)


def s3_like() -> SearchSpace:
    """The initial space of S3 (Chen et al. 2021): four stages of windowed blocks, 1.2e22 networks.

    Tests have it too; a benchmark runs without them.
    """
    return SearchSpace(
        "s3_initial",
        "s3",
        [
            Dimension("embed_dim", "stage", (224, 256, 288), step=64),
            Dimension("depth", "stage", (2, 3, 4), step=1),
            Dimension("window_size", "block", (7, 14), step=7),
            Dimension("num_heads", "block", (7, 8, 9), step=2),
            Dimension("mlp_ratio", "block", (3, 3.5, 4), step=0.5),
        ],
        stages=4,
    )


def s3_costs(space: SearchSpace, classes: int = 1000) -> dict[str, Total]:
    """Params and MACs of S3's networks at 224 pixels: Swin blocks with queries of 32 x heads."""
    places = {
        (c.name, c.stage, c.block): (i, np.array([*c.choices, 0], dtype=np.float64))
        for i, c in enumerate(space.columns)
    }

    def both(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        def chosen(name: str, stage: int, block: int | None = None) -> np.ndarray:
            at, choices = places[name, stage, block]
            return choices[codes[:, at]]

        widths = [chosen("embed_dim", s) for s in range(4)]
        params, macs = 51 * widths[0], 48 * widths[0] * SIDES[0] ** 2
        for s, (e, side) in enumerate(zip(widths, SIDES, strict=True)):
            if s:
                params = params + 8 * widths[s - 1] + 4 * widths[s - 1] * e
                macs = macs + 4 * widths[s - 1] * e * side**2
            for b in range(max(space.choices("depth", s))):
                heads, window = chosen("num_heads", s, b), np.minimum(chosen("window_size", s, b), side)
                here = heads > 0
                q, hidden = 32 * heads, np.floor(chosen("mlp_ratio", s, b) * e)
                params = params + here * (
                    6 * e + 4 * q * e + 3 * q + 2 * e * hidden + hidden + (2 * window - 1) ** 2 * heads
                )
                window = np.where(here, window, 1)
                padded = np.ceil(side / window) * window
                macs = macs + here * (4 * padded**2 * q * e + 2 * padded**2 * window**2 * q + 2 * side**2 * e * hidden)
        return params + 2 * widths[3] + classes * (widths[3] + 1), macs + classes * widths[3]

    return {
        "params": derive_terms(space, lambda codes: both(codes)[0], "params"),
        "macs": derive_terms(space, lambda codes: both(codes)[1], "macs"),
    }


def s3_score(space: SearchSpace, seed: int, noise: float) -> Total:
    """Tables as SNIP has them: sums over the slices of every block, each layer with a sensitivity of its own.

    noise: relative deviation of entries from that; above about 1 they are unrelated to size.
    """
    rng = np.random.default_rng(seed)
    layout, terms = space.layout, []
    for s in range(space.stages):
        widths, windows = space.choices("embed_dim", s), space.choices("window_size", s)
        heads, ratios = space.choices("num_heads", s), space.choices("mlp_ratio", s)
        e, w, n, r = np.meshgrid(widths, windows, heads, ratios, indexing="ij")
        for slot in range(layout.max_depth[s]):
            attention, mlp, bias = np.exp(0.5 * rng.normal(size=3))
            table = attention * 128 * n * e + mlp * 2 * e * np.floor(r * e) + 3 * bias * (2 * w - 1) ** 2 * n
            table = table / table.mean() * (1 + noise * rng.normal(size=table.shape))
            own = range(layout.block_start[s] + 3 * slot, layout.block_start[s] + 3 * slot + 3)
            column = next(i for i, c in enumerate(space.columns) if (c.name, c.stage) == ("embed_dim", s))
            terms.append(Term((column, *own), np.pad(table, [(0, 0), *[(0, 1)] * 3])))
    return Total(tuple(terms))


def stages(seeds: int) -> None:
    """Optima under one- and two-sided limits, and the whole front, of 1.2e22 networks."""
    space = s3_like()
    costs, seconds, _ = timed(lambda: s3_costs(space), 1)
    reach = {name: ranges(space, total) for name, total in costs.items()}
    print(
        f"S3-like: {space.size():.3g} networks, params {reach['params']}, MACs {reach['macs']}, tables {seconds:.2f} s"
    )

    def at(name: str, share: float) -> float:
        low, high = reach[name]
        return low + share * (high - low)

    for noise in (0.02, 0.2, 2.0):
        for seed in range(seeds):
            score = s3_score(space, seed, noise)
            times: list[tuple[float, float]] = []
            unproven = 0
            for params, macs in ((0.05, 0.05), (0.3, 0.3), (0.5, 0.5), (0.2, 0.4), (0.6, 0.3), (0.9, 0.9)):
                for band in (None, 0.02):
                    upper = {"params": at("params", params), "macs": at("macs", macs)}
                    bounds = {k: (-INF if band is None else (1 - band) * v, v) for k, v in upper.items()}
                    problem = Problem(space, score, costs, bounds)
                    found, *spent = timed(functools.partial(best, problem), 1)
                    times.append((spent[0], spent[1]))
                    unproven += not found.optimal
            problem = Problem(space, score, costs, {"params": (-INF, at("params", 0.3))})
            ten, _, used = timed(functools.partial(best, problem, top=10), 1)
            median, most = np.median(times, axis=0), np.max(times, axis=0)
            print(
                f"  noise {noise}, seed {seed}: {len(times)} optima in {median[0]:.2f} s (processor {median[1]:.2f}), "
                f"at most {most[0]:.2f} ({most[1]:.2f}), not proven: {unproven}; top 10 in {ten.seconds:.2f} s "
                f"(processor {used:.2f}), proven: {ten.optimal}",
                flush=True,
            )
            whole, least, used = timed(functools.partial(front, Problem(space, score, costs)), 1)
            print(
                f"    front: {len(whole)} networks in {least:.1f} s (processor {used:.1f}), {whole.labels} labels, "
                f"complete: {whole.optimal} (lacks at most {whole.bound:.3g} of {np.ptp(ranges(space, score)):.3g}); "
                + memory(),
                flush=True,
            )


# --- against sampling -------------------------------------------------------------------------------------------------


# What a strategy is given to reach 8,050 evaluations; AutoFormer's own evolution ends after 1,050.
SETTINGS = {"evolution": {"generations": 160}, "random": {"n": 8050}}
MOMENTS = (1050, 8050)


def evolution(strategies: list[str], names: list[str], seeds: int, images: int) -> None:
    """The best of a search after 1,050 and 8,050 evaluations against the optimum, on AutoFormer-Tiny, 5 to 7 M."""
    from lightning_tas.limits import Region
    from lightning_tas.proxies.score import Score
    from lightning_tas.search.strategy import build_strategy

    torch.manual_seed(0)
    net = tas.supernet("autoformer_tiny")
    space: Any = net.space
    limits = {"params": (5e6, 7e6)}
    for name in names:
        exact = search_exact(net, name, limits, batch_size=images)
        total = build_tables([proxy(name)], net, {}, batch_size=images).total(name)
        lowest = best(Problem(space, total.scaled(-1.0), {"params": cost_terms(space)["params"]}, limits))
        optimum, least = exact.networks[0].score, -float(lowest.score[0])
        print(
            f"{name}: optimum {optimum:.6g} (proven: {exact.optimal}), {exact.networks[0].params:,} params, range from "
            f"{least:.6g}; search {exact.seconds['search']:.3f} s"
        )

        def scorer(archs: Any, needs: Any, total: Total = total, name: str = name) -> list[dict[str, Score]]:
            return [{name: Score(value)} for value in total(space.encode(archs)).tolist()]

        for strategy in strategies:
            for seed in range(seeds):
                searched = build_strategy(strategy, Region(space, limits), name, seed, **SETTINGS.get(strategy, {}))
                began, said = time.perf_counter(), []
                for moment in MOMENTS:
                    while searched.evaluations < moment and not searched.done:
                        archs = searched.ask(moment - searched.evaluations)
                        searched.tell(scorer(archs, searched.needs))
                    lost = optimum - searched.best.value  # type: ignore[union-attr]
                    shares = f"{100 * lost / (optimum - least):.3f} % of the range, {100 * lost / optimum:.3f} % of it"
                    said.append(f"{lost:.4g} short of the optimum after {searched.evaluations} evaluations ({shares})")
                print(f"  {strategy}, seed {seed}: {'; '.join(said)} ({time.perf_counter() - began:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["isotropic", "pit", "stages", "evolution"])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--proxies", nargs="+", default=["snip", "snip_norm", "dss"])
    parser.add_argument("--strategies", nargs="+", default=["random", "evolution"])
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    if "isotropic" in options.parts:
        for name in ISOTROPIC:
            whole_space(name, options.images, options.rounds)
    if "pit" in options.parts:
        for name in PITS:
            whole_space(name, options.images, options.rounds)
    if "stages" in options.parts:
        stages(options.seeds)
    if "evolution" in options.parts:
        evolution(options.strategies, options.proxies, options.seeds, options.images)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
