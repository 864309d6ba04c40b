"""Which architectures a training step uses: a function of (seed, step), of nothing else.

A sampler is a callable ``sampler(step) -> list[Architecture]``; the module sums (or averages) the gradients of what it
returns. Because step t never depends on step t - 1, every rank draws the same architectures without talking, and a
resumed run continues with exactly those of the uninterrupted one.

`uniform` (AutoFormer), `sandwich` (S3, PreNAS's option), `preferred` (uniform over a list) and `balanced` (PreNAS,
eq. 11) are built in; `register` adds a user's own under a name, as does the entry point group
``lightning_tas.samplers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError, unknown
from lightning_tas.randomness import derive, numpy_generator
from lightning_tas.spaces import SearchSpace

ENTRY_POINTS = "lightning_tas.samplers"


@runtime_checkable
class Sampler(Protocol):
    """What the training module needs of a sampler."""

    @property
    def covers_all_parameters(self) -> bool:
        """Whether every step gives a gradient to each parameter tensor that any step gives one to.

        A supernet allocated deeper than anything the sampler draws has blocks beyond that, which no step trains.
        """

    @property
    def archs(self) -> tuple[Architecture, ...]:
        """The fixed list that it draws from; empty when it draws from a whole space."""

    def __call__(self, step: int) -> list[Architecture]:
        """The architectures of optimiser step `step`: at least one, all different."""


class Uniform:
    """One architecture a step, drawn from the space (AutoFormer)."""

    archs: tuple[Architecture, ...] = ()

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space, self.seed = space, seed
        self.covers_all_parameters = all(len(space.choices("depth", s)) == 1 for s in range(space.stages))

    def __call__(self, step: int) -> list[Architecture]:
        """See `Sampler`."""
        return [_draw(self.space, self.seed, step, 0)]


class Preferred:
    """One architecture a step, uniform over a list of candidates."""

    def __init__(self, candidates: Sequence[Architecture], seed: int = 0) -> None:
        self.archs = _distinct(candidates)
        self.seed = seed
        self.covers_all_parameters = all(_deepest(arch, self.archs) for arch in self.archs)

    def __call__(self, step: int) -> list[Architecture]:
        """See `Sampler`."""
        index = numpy_generator(self.seed, "preferred", step).integers(len(self.archs))
        return [self.archs[index]]


class Balanced:
    """One architecture a step: uniform over the groups of equal (width, depth), then inside the group (PreNAS)."""

    def __init__(self, candidates: Sequence[Architecture], seed: int = 0) -> None:
        self.archs = _distinct(candidates)
        self.seed = seed
        self.covers_all_parameters = all(_deepest(arch, self.archs) for arch in self.archs)
        groups: dict[tuple[tuple[int, int], ...], list[Architecture]] = {}
        for arch in self.archs:
            groups.setdefault(_shape(arch), []).append(arch)
        self.groups = tuple(tuple(groups[key]) for key in sorted(groups))

    def __call__(self, step: int) -> list[Architecture]:
        """See `Sampler`."""
        generator = numpy_generator(self.seed, "balanced", step)
        group = self.groups[generator.integers(len(self.groups))]
        return [group[generator.integers(len(group))]]


class Sandwich:
    """Largest, smallest and `middle` others a step, all different, from a space or from a list of candidates.

    With fewer architectures than middle + 2 every step trains all that exist. The largest and the smallest of a list
    are those of most and fewest parameters.
    """

    def __init__(
        self,
        space: SearchSpace | None,
        seed: int = 0,
        middle: int = 2,
        candidates: Sequence[Architecture] | None = None,
    ) -> None:
        if middle < 0:
            raise UserError(f"sampler.middle: {middle} must not be negative")
        self.space, self.seed, self.middle = space, seed, middle
        self.archs = _distinct(candidates) if candidates is not None else ()
        if self.archs:
            by_size = sorted(self.archs, key=lambda arch: (cost(arch).params, arch.id))
            self.largest, self.smallest = by_size[-1], by_size[0]
        elif space is not None:
            self.largest, self.smallest = space.largest(), space.smallest()
        else:
            raise UserError("sampler: sandwich needs a space or a list of candidates")
        if self.archs or space is None:
            self.covers_all_parameters = _deepest(self.largest, self.archs)
        else:
            self.covers_all_parameters = _reaches_all(self.largest, space)
        # All others, of a list or of a space too small for drawing different members by chance; else None.
        listed: Iterable[Architecture] | None = self.archs or None
        if listed is None and space is not None and space.size() <= 8 * (middle + 2):
            listed = space.enumerate()
        ends = (self.largest, self.smallest)
        self._others = None if listed is None else tuple(arch for arch in listed if arch not in ends)

    def __call__(self, step: int) -> list[Architecture]:
        """See `Sampler`."""
        chosen = list(dict.fromkeys((self.largest, self.smallest)))
        if self._others is not None:
            order = numpy_generator(self.seed, "sandwich", step).permutation(len(self._others))
            return chosen + [self._others[i] for i in order[: self.middle]]
        assert self.space is not None
        wanted = len(chosen) + self.middle
        slot = 0
        while len(chosen) < wanted:
            arch = _draw(self.space, self.seed, step, slot)
            slot += 1
            if arch not in chosen:
                chosen.append(arch)
        return chosen


def uniform(space: SearchSpace, seed: int = 0) -> Uniform:
    """One architecture of the space per step, see `Uniform`."""
    return Uniform(space, seed)


def preferred(candidates: Sequence[Architecture], seed: int = 0) -> Preferred:
    """One candidate per step, see `Preferred`."""
    return Preferred(candidates, seed)


def balanced(candidates: Sequence[Architecture], seed: int = 0) -> Balanced:
    """One candidate per step, (width, depth) groups equally often, see `Balanced`."""
    return Balanced(candidates, seed)


def sandwich(
    space: SearchSpace | None, seed: int = 0, middle: int = 2, candidates: Sequence[Architecture] | None = None
) -> Sandwich:
    """Largest, smallest and `middle` others per step, see `Sandwich`."""
    return Sandwich(space, seed, middle, candidates)


@dataclass
class SamplerConfig:
    """Which sub-networks a training step takes."""

    name: str = "uniform"  # uniform, sandwich; preferred, balanced (after the phase select); or a registered one
    middle: int = 2  # of the sandwich: networks between the smallest and the largest


Builder = Callable[[SamplerConfig, SearchSpace | None, Sequence[Architecture] | None, int], Sampler]
_BUILDERS: dict[str, Builder] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Decorator: make ``build(config, space, candidates, seed) -> Sampler`` available as ``sampler.name=<name>``."""

    def add(builder: Builder) -> Builder:
        if name in _BUILDERS:
            raise UserError(f"sampler.name: {name!r} is registered already")
        _BUILDERS[name] = builder
        return builder

    return add


def names() -> list[str]:
    """The names that ``sampler.name`` takes, sorted."""
    return sorted({*_BUILDERS, *(point.name for point in entry_points(group=ENTRY_POINTS))})


@register("uniform")
def _build_uniform(
    config: SamplerConfig, space: SearchSpace | None, candidates: Sequence[Architecture] | None, seed: int
) -> Sampler:
    if space is None:
        raise UserError("sampler.name: 'uniform' needs a space")
    return Uniform(space, seed)


@register("sandwich")
def _build_sandwich(
    config: SamplerConfig, space: SearchSpace | None, candidates: Sequence[Architecture] | None, seed: int
) -> Sampler:
    return Sandwich(space, seed, config.middle, candidates)


@register("preferred")
def _build_preferred(
    config: SamplerConfig, space: SearchSpace | None, candidates: Sequence[Architecture] | None, seed: int
) -> Sampler:
    return Preferred(_need(candidates, config), seed)


@register("balanced")
def _build_balanced(
    config: SamplerConfig, space: SearchSpace | None, candidates: Sequence[Architecture] | None, seed: int
) -> Sampler:
    return Balanced(_need(candidates, config), seed)


def build_sampler(
    config: SamplerConfig,
    space: SearchSpace | None = None,
    candidates: Sequence[Architecture] | None = None,
    seed: int = 0,
) -> Sampler:
    """The sampler that `config` names; UserError for an unknown name or missing candidates."""
    if config.name in _BUILDERS:
        return _BUILDERS[config.name](config, space, candidates, seed)
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if config.name not in others:
        raise unknown("sampler.name", config.name, names())
    builder: Builder = others[config.name].load()
    return builder(config, space, candidates, seed)


def _draw(space: SearchSpace, seed: int, step: int, slot: int) -> Architecture:
    """One architecture of the space for slot `slot` of a step."""
    arch: Architecture = space.sample(seed=derive(seed, "sampler", step, slot))
    return arch


def _need(candidates: Sequence[Architecture] | None, config: SamplerConfig) -> Sequence[Architecture]:
    if candidates is None:
        raise UserError(f"sampler.name: {config.name!r} needs the list of candidates of a selection")
    return candidates


def _distinct(candidates: Sequence[Architecture]) -> tuple[Architecture, ...]:
    """The candidates without repetitions, in their order."""
    archs = tuple(dict.fromkeys(candidates))
    if not archs:
        raise UserError("sampler: the list of candidates is empty")
    return archs


def _shape(arch: Architecture) -> tuple[tuple[int, int], ...]:
    """(width, depth) of every stage: what balanced sampling groups by (0 in families without such widths)."""
    return tuple(
        (int(stage.get("embed_dim", arch.get("base_dim", 0) * stage.get("num_heads", 0))), stage.depth)
        for stage in arch.stages
    )


def _deepest(arch: Architecture, others: Sequence[Architecture]) -> bool:
    """Whether `arch` runs every block that any of `others` runs: blocks are the only tensors that come and go."""
    return all(a >= b for other in others for a, b in zip(arch.depths, other.depths, strict=True))


def _reaches_all(arch: Architecture, space: SearchSpace) -> bool:
    """Whether `arch` is deepest in every stage: where a predicate bounds the sum of depths, not even the largest is."""
    return all(depth == space.choices("depth", s)[-1] for s, depth in enumerate(arch.depths))
