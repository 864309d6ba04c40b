"""The true optimum and the Pareto front of a whole space, for scores that are sums of tables.

SNIP, normalised SNIP, DSS and others become such sums when all networks inherit the gradients of the supernet's widest
one (`proxies.inherited`), and so does any score that adds up over blocks. Costs are sums as well (`costs.terms`), so
nothing need be sampled: `lightning_tas.additive` finds the best network within limits, and proves it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_tas.additive import Problem, Solution, Total, best, front, ranges
from lightning_tas.architecture import Architecture
from lightning_tas.costs import CostOptions, cost_options
from lightning_tas.costs.terms import cost_terms
from lightning_tas.errors import UserError, unknown
from lightning_tas.limits import Limits
from lightning_tas.proxies.inherited import build_tables
from lightning_tas.proxies.options import check_additive, components
from lightning_tas.proxies.probe import bare
from lightning_tas.proxies.registry import Proxy
from lightning_tas.proxies.registry import proxy as registered
from lightning_tas.proxies.scorer import check_arguments
from lightning_tas.spaces import SearchSpace

COSTS = ("params", "macs")
Limit = Sequence[float | str | None]


@runtime_checkable
class Region(Protocol):
    """A space under limits that knows them as sums of whole numbers; see `lightning_tas.limits`."""

    @property
    def exact(self) -> bool:
        """Whether all of its limits are such sums."""

    def whole_limits(self) -> tuple[dict[str, Total], dict[str, tuple[float, float]]]:
        """The limited sums, and their bounds."""


@dataclass(frozen=True)
class Found:
    """One network: its score, of which more is better, and its costs."""

    arch: Architecture
    score: float
    params: int
    macs: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "arch": self.arch.to_dict()}


@dataclass(frozen=True)
class ExactResult:
    """What an exact search found; iterates like the list of its networks, best first or, of a front, by costs.

    optimal: proven for the whole space within the limits. bound: no network within the limits scores above it; of a
    front, by how much at most a network can exceed one of the front that costs no more (0 where it is complete).
    size: of the space. labels: partial networks told apart. seconds: by part, no part of the result's identity.
    """

    networks: tuple[Found, ...]
    optimal: bool
    bound: float
    size: int
    labels: int
    settings: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.networks)

    def __iter__(self) -> Iterator[Found]:
        return iter(self.networks)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; an infinite bound is null."""
        data = {**vars(self), "networks": [network.to_dict() for network in self.networks]}
        return {**data, "bound": self.bound if math.isfinite(self.bound) else None}


def search_exact(
    net: nn.Module,
    proxy: str = "snip",
    limits: Limits | Mapping[str, Limit] | Region | None = None,
    top: int = 1,
    front: bool = False,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    batch_size: int = 16,
    init: str | None = None,
    device: torch.device | str | None = None,
) -> ExactResult:
    """The `top` best networks of a supernet's space within limits by a proxy of inherited gradients, or its front.

    proxy: one of `proxies.inherited.LOOKUPS` (snip, snip_norm, dss, plain, synflow, grad_norm); options: its own.
    limits: (least, most) of "params" and "macs", both inclusive, None where open, as `Limits.read` takes them; or a
    `Region`. top: where more networks share the last of their scores, it is some of these. front: all networks within
    the limits that no other one there dominates in score, params and MACs; `top` has no meaning then.
    seed, images, labels, batch_size, init, device: of the gradient pass, as of `score_many`. The scores are those of
    ``score_many(proxy, net, archs, mode="inherited", ...)``.

    Raises UserError for a proxy that is no sum of tables, a network that is no supernet, and limits that nothing
    meets, with the values and what the space reaches.
    """
    one = additive_proxy(proxy)
    parts, given = components([one], {one.name: dict(options)} if options else {})
    check_arguments(parts, given, seed, images, labels, batch_size, device)
    began = time.perf_counter()
    bared = bare(net)
    tables = build_tables(parts, bared, given, seed, images, labels, batch_size, init, device)
    seconds = {"tables": time.perf_counter() - began}
    found = search_tables(
        cast(SearchSpace, tables.space), tables.total(one.name), cost_options(bared), limits, top, front
    )
    settings = {"proxy": one.name, "options": dict(options or {}), "seed": seed, **found.settings}
    return ExactResult(
        found.networks, found.optimal, found.bound, found.size, found.labels, settings, {**seconds, **found.seconds}
    )


def exact_front(
    net: nn.Module, proxy: str = "snip", limits: Limits | Mapping[str, Limit] | Region | None = None, **settings: Any
) -> ExactResult:
    """The Pareto front of score, params and MACs; everything as of `search_exact`."""
    return search_exact(net, proxy, limits, front=True, **settings)


def additive_proxy(name: str) -> Proxy:
    """The proxy `name`, if its scores of inherited gradients are sums of tables; `UserError` with the reason if not."""
    check_additive(name)
    return registered(name)


def search_tables(
    space: SearchSpace,
    score: Total,
    options: CostOptions | None = None,
    limits: Limits | Mapping[str, Limit] | Region | None = None,
    top: int = 1,
    front: bool = False,
) -> ExactResult:
    """The same for any `score` that is a sum of tables over the columns of `space`, each of at most one block.

    options: what costs depend on besides the architecture. Others as of `search_exact`.
    """
    if not isinstance(top, int) or top < 1:
        raise UserError(f"top: {top!r} must be a whole number of at least 1")
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    costs = cost_terms(space, options)
    further, bounds = _limits(limits)
    totals = {**costs, **further}
    seconds["costs"] = time.perf_counter() - began
    found = _solve(space, score, totals, bounds, top, front)
    seconds["search"] = found.seconds
    if not len(found) and found.optimal:
        raise _nothing(space, totals, bounds)
    codes = found.codes
    params, macs = (costs[name](codes).astype(int).tolist() for name in COSTS)
    rows = zip(space.decode(codes) if len(codes) else [], found.score.tolist(), params, macs, strict=True)
    settings = {
        "limits": {name: [None if math.isinf(b) else b for b in pair] for name, pair in bounds.items()},
        "front": front,
        "top": None if front else top,
        "space": space.id,
    }
    networks = tuple(Found(*row) for row in rows)
    return ExactResult(networks, found.optimal, found.bound, space.size(), found.labels, settings, seconds)


def _solve(
    space: SearchSpace,
    score: Total,
    totals: Mapping[str, Total],
    bounds: Mapping[str, tuple[float, float]],
    top: int,
    whole_front: bool,
) -> Solution:
    if not whole_front:
        # Costs without limits play no part: fewer partial networks differ.
        return best(Problem(space, score, {name: totals[name] for name in bounds}, bounds), top)
    # A front is over params and MACs; other limited quantities only say who takes part.
    problem = Problem(space, score, totals, bounds)
    if set(totals) == set(COSTS):
        return front(problem)
    raise UserError(
        f"front: of score, params and MACs only, but {', '.join(sorted(set(totals) - set(COSTS)))} is limited too; "
        "leave that limit out, or ask for the best networks"
    )


def _limits(
    limits: Limits | Mapping[str, Limit] | Region | None,
) -> tuple[dict[str, Total], dict[str, tuple[float, float]]]:
    """Sums of limited quantities besides params and MACs, and the bounds of all that is limited."""
    if limits is None:
        return {}, {}
    if isinstance(limits, Region):
        if not limits.exact:
            raise UserError(
                "limits: an exact search needs limits on sums of whole numbers over blocks; one here is not"
            )
        totals, bounds = limits.whole_limits()
        return {name: total for name, total in totals.items() if name not in COSTS}, bounds
    bounds = Limits.read(limits).bounds
    for name in bounds:
        if name not in COSTS:  # latency and activations are known to a `Region` only
            raise unknown("limits", name, COSTS)
    return {}, bounds


def _nothing(space: SearchSpace, totals: Mapping[str, Total], bounds: Mapping[str, tuple[float, float]]) -> UserError:
    """The error for limits that no network meets."""
    wanted = " and ".join(f"{name} from {low:,.0f} to {high:,.0f}" for name, (low, high) in bounds.items())
    reached = {name: ranges(space, totals[name]) for name in bounds}
    reaches = " and ".join(f"{name} from {low:,.0f} to {high:,.0f}" for name, (low, high) in reached.items())
    return UserError(f"limits: no network of {space.name!r} has {wanted}; the space reaches {reaches}")
