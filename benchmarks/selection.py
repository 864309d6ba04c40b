"""PreNAS selection after the gradient pass: fast tables against scoring class by class; optionally the pass itself.

Fast: tables of |g * w|, allocation and plain SNIP of every isomer class by counts, one candidate per bin. Naive: for
each class, allocate by sorting layers and sum |g * w| over the slices of the elected architecture, as published code
does (kinder: |g * w| is computed once beforehand, where that code multiplies anew for each class); timed on a sample
of classes and scaled up. Times are of one thread; processor time is the one to trust on a busy machine.

    python benchmarks/selection.py --space autoformer_small
    python benchmarks/selection.py --space autoformer_base --gradient 64      # with the pass: seconds and peak memory
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import lightning_tas as tas
from lightning_tas.costs import cost_options
from lightning_tas.proxies.saliency import Saliency, gaussian_images, gradient_pass
from lightning_tas.proxies.slices import Axes, build_tables
from lightning_tas.search.allocation import count_vectors
from lightning_tas.search.bins import Bins
from lightning_tas.search.isomers import elect
from lightning_tas.search.preferred import prefer, space_axes


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """(Result, wall seconds, processor seconds)."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - processor


def random_saliency(net: Any) -> Saliency:
    """Weights with gradients drawn at random: the pass costs minutes on a CPU and does not matter to what follows."""
    generator = torch.Generator().manual_seed(0)
    return {n: (p.detach(), torch.randn(p.shape, generator=generator)) for n, p in net.named_parameters()}


def naive_scores(saliency: Saliency, axes: Axes, number: int) -> list[float]:
    """Plain SNIP of the elected of `number` random classes, one by one from slices."""
    product = {name: (w * g).abs() for name, (w, g) in saliency.items()}
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(number):
        d, depth = int(rng.choice(axes.embed_dim)), int(rng.choice(axes.depth))
        heads = naive_allocation(product, "heads", axes, d, rng.choice(count_vectors(depth, len(axes.num_heads))))
        ratios = naive_allocation(product, "mlp", axes, d, rng.choice(count_vectors(depth, len(axes.mlp_ratio))))
        total = sum(
            float(v[..., :d].sum()) for n, v in product.items() if not n.startswith(("blocks", "patch", "head"))
        )
        total += float(product["head.weight"][:, :d].sum() + product["head.bias"].sum())
        total += float(product["patch_embed.proj.weight"][:d].sum() + product["patch_embed.proj.bias"][:d].sum())
        for layer in range(depth):
            q, f = 64 * heads[layer], int(ratios[layer] * d)
            for name, cut in slices(d, q, f).items():
                total += float(product[f"blocks.{layer}.{name}"][cut].sum())
        scores.append(total)
    return scores


def slices(d: int, q: int, f: int) -> dict[str, Any]:
    """What a block of width d, query width q and hidden width f uses of each of its parameters."""
    w, h, whole = slice(d), slice(f), slice(None)
    cuts: dict[str, Any] = {"attn.qkv.weight": (slice(3 * q), w), "attn.qkv.bias": slice(3 * q)}
    cuts |= {"attn.proj.weight": (w, slice(q)), "mlp.fc1.weight": (h, w), "mlp.fc1.bias": h, "mlp.fc2.weight": (w, h)}
    cuts |= {n: w for n in ("attn.proj.bias", "mlp.fc2.bias")}
    cuts |= {f"norm{i}.{n}": w for i in (1, 2) for n in ("weight", "bias")}
    cuts |= {f"attn.rel_pos_{k}.{n}": whole for k in "kv" for n in ("vertical", "horizontal")}
    return cuts


def naive_allocation(product: dict[str, Any], kind: str, axes: Axes, d: int, counts: Any) -> list[Any]:
    """Per choice from the largest down, the layers that score best; every score summed from its slice."""
    choices: tuple[Any, ...] = axes.num_heads if kind == "heads" else axes.mlp_ratio
    chosen = [choices[0]] * int(sum(counts))
    free = set(range(len(chosen)))
    for c in range(len(choices) - 1, 0, -1):
        score = {}
        for layer in free:
            if kind == "heads":
                rows = slice(192 * choices[c - 1], 192 * choices[c])
                score[layer] = float(product[f"blocks.{layer}.attn.qkv.weight"][rows, :d].sum())
            else:
                rows = slice(int(choices[c - 1] * d), int(choices[c] * d))
                score[layer] = float(product[f"blocks.{layer}.mlp.fc1.weight"][rows, :d].sum())
                score[layer] += float(product[f"blocks.{layer}.mlp.fc2.weight"][:d, rows].sum())
        for layer in sorted(free, key=lambda at: -score[at])[: int(counts[c])]:
            chosen[layer] = choices[c]
            free.discard(layer)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="autoformer_small")
    parser.add_argument("--gradient", type=int, default=0, metavar="IMAGES", help="run the pass on so many images")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--naive", type=int, default=100, metavar="CLASSES", help="classes that the naive way scores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    net = tas.supernet(options.space)
    axes, build = space_axes(net.space), cost_options(net)
    print(f"{options.space}, {options.threads} thread(s), load {os.getloadavg()[0]:.1f}, device {options.device}")

    if options.gradient:
        images = gaussian_images(0, options.gradient, 3, (224, 224))
        saliency, wall, processor = timed(
            lambda: gradient_pass(
                net, net.space.largest(), images, micro_batch=options.micro_batch, device=options.device
            )
        )
        print(f"gradient pass of {options.gradient} images: {wall:.1f} s ({processor:.1f} s of processor)")
        print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
        if options.device != "cpu":
            print(f"peak memory on the device: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    else:
        saliency = random_saliency(net)

    tables, wall, processor = timed(lambda: build_tables(saliency, axes))
    print(f"tables: {wall:.3f} s ({processor:.3f})")
    total = processor
    for allocation in ("dp", "released"):
        rules: dict[str, Any] = {"allocation": allocation, "classes": "counts", "norm": "l1l1"}
        elected, wall, processor = timed(partial(elect, tables, build, **rules))
        reach = int(elected.costs.params.min()), int(elected.costs.params.max())
        bins = Bins.build(1.0, "Mparams", reach)
        (candidates, _), more, more_processor = timed(partial(prefer, elected, bins, 1))
        print(
            f"{allocation}: {len(elected):,} classes allocated and scored in {wall:.3f} s ({processor:.3f}), "
            f"{len(candidates)} preferred in {more:.3f} s ({more_processor:.3f})"
        )
        if allocation == "dp":
            total += processor + more_processor
    if options.naive:
        saliency = {name: (w.cpu(), g.cpu()) for name, (w, g) in saliency.items()}
        _, wall, processor = timed(lambda: naive_scores(saliency, axes, options.naive))
        each = processor / options.naive
        print(
            f"naive: {1000 * each:.2f} ms of processor a class, {each * len(elected):.0f} s for all; "
            f"fast in all {total:.3f} s, {each * len(elected) / total:,.0f} times less"
        )


if __name__ == "__main__":
    main()
