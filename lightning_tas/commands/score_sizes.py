"""Batch sizes and options that proxies are scored with: the bench's own, or (`bench.paper`) those of the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.config import BenchConfig
from lightning_tas.proxies.options import components
from lightning_tas.proxies.registry import proxy


class Size(NamedTuple):
    """Images in the batch (None: it looks at none), further options of the proxy, and where both are from."""

    batch_size: int | None
    options: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Group:
    """Proxies that are scored together, with one batch of `batch_size` images."""

    batch_size: int
    names: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_ZERO_COST_NAS = "Zero-Cost NAS (arXiv:2101.08134), released code"
PAPER: dict[str, Size] = {
    **dict.fromkeys(("grad_norm", "snip", "plain", "grasp", "fisher", "jacob_cov"), Size(64, {}, _ZERO_COST_NAS)),
    "naswot": Size(64, {}, "TF-TAS, released code"),
    **dict.fromkeys(("te_nas", "te_ntk", "te_regions"), Size(64, {}, "TF-TAS, released code")),
    "ntk_trace": Size(64, {}, "as Zero-Cost NAS"),
    "gradsign": Size(64, {}, "as Zero-Cost NAS"),
    "knas": Size(50, {}, "KNAS (arXiv:2111.13293), released code: 50 samples"),
    "zico": Size(128, {}, "two batches of 64, as Zero-Cost NAS has one"),
    "meco": Size(64, {}, "as Zero-Cost NAS; one image of the batch counts"),
    "zen": Size(16, {"repeat": 32}, "Zen-NAS (arXiv:2102.01063), released code"),
    "snip_norm": Size(64, {}, "PreNAS, released code (there pixels have ImageNet's mean and deviation)"),
    **dict.fromkeys(("auto_prox_a", "auto_prox_released"), Size(128, {}, "Auto-Prox: a mini-batch of 128 images")),
    **dict.fromkeys(("ntkt", "ntsr"), Size(32, {}, "our choice: ETAS names no batch")),
}
"""What papers or their released code use; proxies that are not named here keep the bench's own."""


def groups(names: Sequence[str], bench: BenchConfig) -> list[Group]:
    """`names` by the batch that each is scored with, the largest group first; who sees no batch joins that one."""
    found: dict[int, list[str]] = {}
    blind = []
    for name in names:
        batch_size = size_of(name, bench).batch_size
        if batch_size is None:
            blind.append(name)
        else:
            found.setdefault(batch_size, []).append(name)
    ordered = sorted(found, key=lambda batch: (-len(found[batch]), batch)) or [bench.batch_size]
    members = {batch: tuple(found.get(batch, ())) for batch in ordered}
    members[ordered[0]] = (*blind, *members[ordered[0]])
    return [Group(batch, own, _options(own, bench)) for batch, own in members.items()]


def _options(names: Sequence[str], bench: BenchConfig) -> dict[str, Mapping[str, Any]]:
    """The options of proxies that are scored together, and of their components, which may be in another group too."""
    known = dict.fromkeys(part for name in names for part in (name, *proxy(name).combines))
    found = {name: size_of(name, bench).options for name in known}
    return {name: options for name, options in found.items() if options}


def size_of(name: str, bench: BenchConfig) -> Size:
    """The batch and options of one proxy; `bench.options` has the last word."""
    if bench.paper and name in PAPER:
        size = PAPER[name]
    elif name == "zen":
        size = Size(bench.batch_size, {"repeat": bench.zen_repeat}, "bench.batch_size, bench.zen_repeat")
    elif proxy(name).needs.data:
        size = Size(bench.batch_size, {}, "bench.batch_size")
    else:
        size = Size(None, {}, "-")
    return size._replace(options={**size.options, **((bench.options or {}).get(name) or {})})


def check(names: Sequence[str], bench: BenchConfig) -> None:
    """Refuse options of proxies that are not scored, options that a proxy cannot have, and batches too small for it."""
    options = {} if bench.options is None else bench.options
    if not isinstance(options, Mapping) or not all(isinstance(given, Mapping) for given in options.values()):
        raise UserError(f"bench.options: {options!r} is not valid; valid: a mapping, as {{dss: {{mode: released}}}}")
    for name in options:
        if name not in names:
            raise unknown("bench.options", name, names)
    try:
        # All at once: a component has the same options in whatever group it is scored.
        components([proxy(name) for name in names], _options(names, bench))
    except UserError as error:
        raise UserError(f"bench.options: {str(error).removeprefix('options: ')}") from None
    for one in groups(names, bench):
        parts, given = components([proxy(name) for name in one.names], one.options)
        for part in parts:
            part.check_images(
                one.batch_size,
                given.get(part.name, {}),
                "bench.options" if given.get(part.name) else "bench.batch_size",
            )
