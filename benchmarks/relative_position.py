"""Training step with factorised, without, and with explicit (N x N x 64) relative position, side by side.

Largest AutoFormer-Tiny network in its supernet, forward + backward + AdamW. The three take turns within each round of
one process, so that a busy machine slows all of them; printed are medians and the median ratio over rounds, of wall
time and of processor time (the one to trust on a busy machine, with one thread).

    python benchmarks/relative_position.py --threads 2 --batch 8 --rounds 15
    python benchmarks/relative_position.py --device cuda --autocast --batch 128
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch import Tensor

import lightning_tas as tas
from lightning_tas.supernets import autoformer
from lightning_tas.supernets.relative_position import RelativePosition


def explicit_attention(
    qkv: Tensor, keys: RelativePosition, values: RelativePosition, grid_size: tuple[int, int], dropout: float = 0.0
) -> Tensor:
    """The textbook form: R of shape (N, N, 64) for keys and for values. Same arguments as the shipped `attention`."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
    vertical, horizontal = offsets(grid_size, qkv.device)
    r_k = keys.vertical[vertical] + keys.horizontal[horizontal]  # (N, N, D)
    r_v = values.vertical[vertical] + values.horizontal[horizontal]
    logits = (q @ k.transpose(-1, -2) + torch.einsum("bhnd,nmd->bhnm", q, r_k)) * q.shape[-1] ** -0.5
    weights = logits.softmax(-1)
    x = weights @ v + torch.einsum("bhnm,nmd->bhnd", weights, r_v)
    return x.transpose(1, 2).flatten(2)


def offsets(grid_size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row of the vertical and of the horizontal table for each (query, key): two index tensors (N, N)."""
    gh, gw = grid_size
    tables = []
    for place, side in ((torch.arange(gh).repeat_interleave(gw), gh), (torch.arange(gw).repeat(gh), gw)):
        index = torch.zeros(1 + gh * gw, 1 + gh * gw, dtype=torch.int64)
        index[1:, 1:] = place[None, :] - place[:, None] + side + 1
        tables.append(index.to(device))
    return tables[0], tables[1]


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """(Wall, processor) seconds per step of each form, one entry per round (after two rounds of warming up)."""
    torch.set_num_threads(args.threads)
    space = tas.space(args.space)
    arch = space.largest()
    images = torch.randn(args.batch, 3, 224, 224, device=args.device)
    targets = torch.arange(args.batch, device=args.device)
    explicit = mock.patch.object(autoformer, "attention", explicit_attention)
    contexts: dict[str, AbstractContextManager[object]] = {
        "none": nullcontext(),
        "factorised": nullcontext(),
        "explicit": explicit,
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contexts}
    nets = {}
    for name in contexts:
        net = tas.supernet(space, relative_position=name != "none", drop_path_rate=0.0).to(args.device)
        nets[name] = net, torch.optim.AdamW(net.parameters(), lr=1e-4)
    for round_ in range(args.rounds + 2):
        for name, context in contexts.items():
            net, optimizer = nets[name]
            with context:
                start = time.perf_counter(), time.process_time()
                optimizer.zero_grad()
                with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.autocast):
                    loss = torch.nn.functional.cross_entropy(net(images, arch), targets)
                loss.backward()
                optimizer.step()
                if args.device == "cuda":
                    torch.cuda.synchronize()
                if round_ > 1:
                    seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--space", default="autoformer_tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast")
    args = parser.parse_args()
    seconds = measure(args)
    for kind, clock in enumerate(("wall", "processor")):
        print(f"{clock} time, {args.device}, {args.threads} threads, batch {args.batch}, autocast {args.autocast}")
        taken = {name: [pair[kind] for pair in pairs] for name, pairs in seconds.items()}
        for name, values in taken.items():
            print(f"  {name:11s} {statistics.median(values):.4f} s per step (least {min(values):.4f})")
        for other, limit in (("none", 1.2), ("explicit", 0.5)):
            ratios = [a / b for a, b in zip(taken["factorised"], taken[other], strict=True)]
            print(f"  factorised / {other:8s} {statistics.median(ratios):.3f} (wanted: at most {limit})")


if __name__ == "__main__":
    main()
