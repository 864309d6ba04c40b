"""PreNAS: choose, before any training, the few architectures that a supernet is worth training on.

One backward pass of the largest network (`proxies.saliency`) becomes lookup tables (`proxies.slices`); the best member
of every isomer class is allocated exactly and scored (`isomers`, `allocation`); the best of every bin of size is
preferred (`bins`).
Paper: eqs. 8-10 and 13, algorithm 1; ``mode="released"`` follows the published code instead, quirks included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_tas.costs import CostOptions, cost, cost_options
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.saliency import Progress, gaussian_images, gradient_pass
from lightning_tas.proxies.slices import NORMS, Axes, Tables, build_tables
from lightning_tas.search.bins import UNITS, Bins
from lightning_tas.search.config import SelectConfig
from lightning_tas.search.isomers import Elected, elect
from lightning_tas.search.selection import Candidate, Selection
from lightning_tas.spaces import SearchSpace

MODES: dict[str, dict[str, Any]] = {
    "paper": {"allocation": "dp", "norm": "paper", "classes": "sums", "skip_unused_middle": False},
    "released": {"allocation": "released", "norm": "l1l1", "classes": "counts", "skip_unused_middle": True},
}
FAMILIES = ("autoformer",)


def select_preferred(
    net: nn.Module,
    space: SearchSpace | None = None,
    mode: str = "paper",
    margin: float = 1.0,
    unit: str = "Mparams",
    limits: tuple[float | None, float | None] | None = None,
    allocation: str | None = None,
    top: int = 1,
    images: Tensor | None = None,
    seed: int = 0,
    *,
    labels: Tensor | None = None,
    loss: str = "logits",
    norm: str | None = None,
    classes: str | None = None,
    skip_unused_middle: bool | None = None,
    batch_size: int = 64,
    micro_batch: int = 4,
    device: torch.device | str | None = None,
    progress: bool | Progress = False,
) -> Selection:
    """Preferred architectures of `space` (default: the supernet's own) under the weights of `net`.

    mode: "paper" or "released" decides every setting left None. allocation: "dp" (exact), "greedy" (algorithm 1) or
    "released". norm: "paper" (eq. 13), "l1l1" (released) or "none" (plain SNIP also inside classes). classes: isomers
    of equal "sums" (paper) or "counts" (released). skip_unused_middle: like the released loop, leave out classes in
    which a middle choice is unused.
    Bins are [c - margin, c) in `unit`, "Mparams" or "GMACs" (relative position not counted), named by c, between
    `limits` (low, high), by default the range of the space; the `top` best per bin are kept.
    loss: "logits" is data-free, on `batch_size` Gaussian images of `seed` unless `images` (B, C, H, W) are given;
    "ce" needs `images` and `labels` (B,). micro_batch: images per backward pass. device: where to run, default the
    network's. progress: True shows a bar, a function is called with (images done, images).

    The network is left as it was. The result depends on its weights, the settings and `seed` only. Raises UserError
    for a wrong setting, a space that is not isotropic or does not fit the network, and for a margin or limits without
    candidates, naming the reachable range.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    if not isinstance(top, int) or top < 1:
        raise UserError(f"top: {top!r} must be a whole number of at least 1")
    if limits is not None and len(limits) != 2:
        raise UserError(f"limits: {limits!r} must be a pair (low, high), where None leaves a side open")
    given = {"allocation": allocation, "norm": norm, "classes": classes, "skip_unused_middle": skip_unused_middle}
    rules = {**MODES[mode], **{key: value for key, value in given.items() if value is not None}}
    space = cast(SearchSpace, net.space) if space is None else space
    axes = space_axes(space)
    largest = space.largest()
    cast(Any, net).check(largest)
    options = cost_options(net)
    bins = Bins.build(margin, unit, _reach(space, net, unit), limits or (None, None), whole_only=mode == "released")
    _check_early(axes, options, rules, bins)

    seconds: dict[str, float] = {}
    if images is None:
        if loss == "ce":
            raise UserError("images: loss 'ce' needs images and labels; without data use loss='logits'")
        images = gaussian_images(seed, batch_size, options.in_chans, options.img_size)
    with _timed(seconds, "gradient"), _bar(progress) as report:
        saliency = gradient_pass(net, largest, images, labels, loss, micro_batch, device, report)
    with _timed(seconds, "tables"):
        tables = build_tables(saliency, axes, released=mode == "released")
        del saliency
    with _timed(seconds, "elect"):
        elected = elect(tables, options, space.family, **rules)
        candidates, empty = prefer(elected, bins, top)
    settings = {
        "mode": mode,
        "unit": unit,
        "margin": float(margin),
        "limits": [None if v is None else float(v) for v in limits or (None, None)],
        "top": top,
        **rules,
        "loss": loss,
        "images": len(images),
        "seed": seed,
        "space": space.id,
    }
    return Selection(candidates, empty, settings, len(elected), seconds)


def check_bins(config: SelectConfig, net: nn.Module) -> None:
    """Raise UserError when selection cannot work: a space of another kind than it is defined for, or margin and limits
    that leave no bin that the space reaches (meta device welcome).
    """
    space_axes(net.space)  # type: ignore[arg-type]
    reach = _reach(net.space, net, config.unit)  # type: ignore[arg-type]
    whole = config.mode == "released"
    Bins.build(config.margin, config.unit, reach, (config.low, config.high), whole_only=whole)


def select_with(
    config: SelectConfig,
    net: nn.Module,
    space: SearchSpace | None = None,
    images: Tensor | None = None,
    targets: Tensor | None = None,
    seed: int = 0,
    **more: Any,
) -> Selection:
    """`select_preferred` with a recipe's settings; `images`, `targets` for ``images: data``; more: device, progress."""
    settings = asdict(config)
    limits = (settings.pop("low"), settings.pop("high"))
    source = settings.pop("images")
    settings.pop("cut_supernet")  # about what is trained afterwards
    if source not in ("gaussian", "data"):
        raise unknown("select.images", source, ("gaussian", "data"))
    if source == "data" and images is None:
        raise UserError("select.images: 'data' needs a batch of the training set")
    batch = images if source == "data" else None
    return select_preferred(net, space, limits=limits, images=batch, labels=targets, seed=seed, **settings, **more)


def space_axes(space: SearchSpace) -> Axes:
    """The choices of an isotropic space; UserError for a space that the tables cannot describe."""
    if not isinstance(space, SearchSpace):
        raise UserError(f"space: expected a SearchSpace, got {type(space).__name__}; see lightning_tas.space")
    if space.family not in FAMILIES:
        raise UserError(
            f"space: PreNAS selection is defined for networks of family {' or '.join(FAMILIES)}, "
            f"but {space.name!r} is of family {space.family!r}"
        )
    found = {d.name: d for d in space.dimensions}
    scopes = {"embed_dim": "stage", "depth": "stage", "num_heads": "block", "mlp_ratio": "block"}
    wrong = sorted(set(found) ^ set(scopes)) or [n for n, scope in scopes.items() if found[n].scope != scope]
    if wrong or space.stages > 1 or space.predicates:
        raise UserError(
            f"space: PreNAS selection needs one stage with embed_dim and depth, num_heads and mlp_ratio per block, and "
            f"no predicates; {space.name!r} differs in {wrong or 'its stages or predicates'}"
        )
    return Axes(**{name: tuple(space.choices(name, stage=0)) for name in scopes})


def _reach(space: SearchSpace, net: nn.Module, unit: str) -> tuple[int, int]:
    """Cost of the smallest and the largest network (cost grows in every choice), in whole params or MACs."""
    ends = cost([space.smallest(), space.largest()], net)
    column = ends.macs if unit == "GMACs" else ends.params
    return int(column[0]), int(column[1])


def _check_early(axes: Axes, options: CostOptions, rules: dict[str, Any], bins: Bins) -> None:
    """Refuse, before any gradient, rules that do not fit and bins that stay empty: costs do not depend on scores."""
    if rules["norm"] not in NORMS:
        raise unknown("norm", rules["norm"], NORMS)
    elected = elect(Tables.ones(axes), options, **{**rules, "norm": "none"})
    costs = elected.costs.macs if bins.unit == "GMACs" else elected.costs.params
    if (bins.index(costs) < 0).all():
        scale = UNITS[bins.unit]
        raise UserError(
            f"margin, limits: none of the {len(elected)} isomer classes is in the bins from {bins.edges[0] / scale:g} "
            f"to {bins.names[-1]:g} {bins.unit}; the space reaches {costs.min() / scale:.6g} to "
            f"{costs.max() / scale:.6g} {bins.unit}"
        )


def prefer(elected: Elected, bins: Bins, top: int) -> tuple[tuple[Candidate, ...], tuple[float, ...]]:
    """The `top` best of every bin, and the bins that have none."""
    params, macs = elected.costs
    best = bins.best(macs if bins.unit == "GMACs" else params, elected.score, top)
    candidates = tuple(
        Candidate(elected.arch(int(i)), float(elected.score[i]), int(params[i]), int(macs[i]), name)
        for name, members in zip(bins.names, best, strict=True)
        for i in members
    )
    empty = tuple(name for name, members in zip(bins.names, best, strict=True) if not len(members))
    return candidates, empty


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


@contextmanager
def _bar(progress: bool | Progress) -> Iterator[Progress | None]:
    """A progress report: the caller's function, a bar, or nothing."""
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield None
    else:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        with tqdm(desc="selection", unit="image", disable=None) as bar:

            def update(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield update
