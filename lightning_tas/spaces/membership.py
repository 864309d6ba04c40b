"""Why an architecture is outside a space, in words: place by place, value by value, then the predicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_tas.architecture import Architecture, Block
from lightning_tas.spaces.predicates import Predicate

if TYPE_CHECKING:
    from lightning_tas.spaces.searchspace import SearchSpace


def why_not(space: SearchSpace, arch: Architecture) -> str | None:
    """The first reason why `arch` is no member of `space`, with the numbers; None for a member."""
    return next(_reasons(space, arch), None)


def _reasons(space: SearchSpace, arch: Architecture) -> Iterator[str]:
    if arch.family != space.family:
        yield f"family: {arch.family!r} is not {space.family!r}"
    if len(arch.stages) != space.stages:
        yield f"stages: {len(arch.stages)} instead of {space.stages}"
        return
    yield from _misplaced(space, arch, "network", None, "")
    for s, stage in enumerate(arch.stages):
        at = f"stages[{s}]." if space.stages > 1 else ""
        depths = space.choices("depth", s)
        if stage.depth not in depths:
            yield f"{at}depth: {stage.depth} is not among {list(depths)}"
        yield from _misplaced(space, stage, "stage", s, at)
        for b, block in enumerate(stage.blocks):
            yield from _misplaced(space, block, "block", s, f"{at}blocks[{b}].")
    for predicate in space.predicates:
        yield from (predicate.says(p) for p in _points(space, predicate, arch) if not predicate.holds(p))


def _misplaced(space: SearchSpace, record: Any, scope: str, stage: int | None, at: str) -> Iterator[str]:
    """What is missing, unknown or not a choice among the own values of a network, stage or block."""
    dimensions = {d.name: d for d in space.dimensions if d.scope == scope and d.name != "depth"}
    for name, dimension in dimensions.items():
        if name not in record:
            yield f"{at}{name}: missing"
        elif record[name] not in dimension.at(stage):
            yield f"{at}{name}: {record[name]} is not among {list(dimension.at(stage))}"
    for name in record.keys() - dimensions.keys():
        yield f"{at}{name}: the space has no such choice here"


def _points(space: SearchSpace, predicate: Predicate, arch: Architecture) -> Iterator[dict[str, Any]]:
    """The values that a predicate must hold for: once, per stage or per block."""
    views = [{**arch.extras, **dict(stage.items()), "depth": stage.depth} for stage in arch.stages]
    if predicate.rule.path:
        yield {name: tuple(view[name] for view in views) for name in predicate.names}
        return
    per_block = any(space.dimension(name).scope == "block" for name in predicate.names)
    for view, stage in zip(views, arch.stages, strict=True):
        blocks: Iterable[Block] = stage.blocks if per_block else (Block(),)
        yield from ({**view, **dict(block.items())} for block in blocks)
