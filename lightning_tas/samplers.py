"""Which architectures a training step uses: a function of (seed, step), of nothing else.

A sampler is a callable ``sampler(step) -> list[Architecture]``; the module averages (or sums) the gradients of what it
returns. Because step t never depends on step t - 1, every rank draws the same architectures without talking, and a
resumed run continues with exactly those of the uninterrupted one.

Every sampler draws from one `Source`: the candidates where a selection ran, else the space. `uniform` (AutoFormer),
`sandwich` (S3, PreNAS's option), `preferred` (uniform over candidates) and `balanced` (PreNAS, eq. 11) are built in;
`register` adds a user's own under a name, as does the entry point group ``lightning_tas.samplers``; commands import it
by ``sampler.name=MODULE:NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError, unknown
from lightning_tas.plugins import resolve
from lightning_tas.randomness import derive, numpy_generator
from lightning_tas.spaces import SearchSpace

ENTRY_POINTS = "lightning_tas.samplers"
SOURCES = ("candidates", "space")
REDUCE = ("mean", "sum")
NEED_CANDIDATES = ("preferred", "balanced")
"""Samplers that draw from a list only."""


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


@dataclass(frozen=True)
class Source:
    """The networks that a sampler draws from: `archs`, all different, or all of `space` where that list is empty."""

    space: SearchSpace | None = None
    archs: tuple[Architecture, ...] = ()

    def __post_init__(self) -> None:
        assert (self.space is None) == bool(self.archs), "a space or a list"

    @classmethod
    def of(
        cls,
        space: SearchSpace | None = None,
        candidates: Sequence[Architecture] | None = None,
        asked: str | None = None,
    ) -> Source:
        """The candidates where there are some, else the space; or what `asked` ("candidates", "space") says.

        Raises:
            UserError: there is no such thing, or the list is empty.
        """
        if asked is not None and asked not in SOURCES:
            raise unknown("sampler.source", asked, SOURCES)
        if asked == "space" or (candidates is None and asked is None):
            if space is None:
                raise UserError("sampler: needs a space or a list of candidates")
            return cls(space)
        if candidates is None:
            raise UserError("sampler.source: 'candidates' needs the list of candidates of a selection")
        archs = tuple(dict.fromkeys(candidates))
        if not archs:
            raise UserError("sampler: the list of candidates is empty")
        return cls(None, archs)

    def sample(self, seed: int, step: int, slot: int = 0) -> Architecture:
        """One network, all equally likely (in a space: every choice), for slot `slot` of a step."""
        if self.archs:
            stream = ("preferred", step) if slot == 0 else ("preferred", step, slot)
            return self.archs[numpy_generator(seed, *stream).integers(len(self.archs))]
        assert self.space is not None
        arch: Architecture = self.space.sample(seed=derive(seed, "sampler", step, slot))
        return arch

    def ends(self) -> tuple[Architecture, Architecture]:
        """The largest and the smallest network; of a list those of most and of fewest parameters."""
        if self.space is not None:
            return self.space.largest(), self.space.smallest()
        by_size = sorted(self.archs, key=lambda arch: (cost(arch).params, arch.id))
        return by_size[-1], by_size[0]

    def enumerate(self, most: int) -> tuple[Architecture, ...] | None:
        """All networks: of a list, or of a space of at most so many; None of a larger one."""
        if self.space is None:
            return self.archs
        return tuple(self.space.enumerate()) if self.space.size() <= most else None

    def deepest(self, arch: Architecture) -> bool:
        """Whether `arch` runs every block that any network runs: blocks are the only tensors that come and go.

        Where a predicate bounds the sum of depths, not even the largest of a space does.
        """
        if self.space is not None:
            return all(depth == self.space.choices("depth", s)[-1] for s, depth in enumerate(arch.depths))
        return all(a >= b for other in self.archs for a, b in zip(arch.depths, other.depths, strict=True))

    def equally_deep(self) -> bool:
        """Whether every network runs the same blocks."""
        if self.space is not None:
            return all(len(self.space.choices("depth", s)) == 1 for s in range(self.space.stages))
        return all(self.deepest(arch) for arch in self.archs)


class Uniform:
    """One architecture a step, all of the source equally likely (AutoFormer's, of a space)."""

    def __init__(self, source: Source, seed: int = 0) -> None:
        self.source, self.seed, self.archs = source, seed, source.archs
        self.covers_all_parameters = source.equally_deep()

    def __call__(self, step: int) -> list[Architecture]:
        """See `Sampler`."""
        return [self.source.sample(self.seed, step)]


class Balanced:
    """One architecture a step: uniform over the groups of equal (width, depth), then inside the group (PreNAS)."""

    def __init__(self, source: Source, seed: int = 0) -> None:
        self.archs, self.seed = source.archs, seed
        self.covers_all_parameters = source.equally_deep()
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
    """Largest, smallest and `middle` others of the source a step, all different.

    With fewer architectures than middle + 2 every step trains all that exist.
    """

    def __init__(self, source: Source, seed: int = 0, middle: int = 2) -> None:
        if middle < 0:
            raise UserError(f"sampler.middle: {middle} must not be negative")
        self.source, self.seed, self.middle, self.archs = source, seed, middle, source.archs
        self.largest, self.smallest = source.ends()
        self.covers_all_parameters = source.deepest(self.largest)
        # All others, of a list or of a space too small for drawing different members by chance; else None.
        listed = source.enumerate(8 * (middle + 2))
        ends = (self.largest, self.smallest)
        self._others = None if listed is None else tuple(arch for arch in listed if arch not in ends)

    def __call__(self, step: int) -> list[Architecture]:
        """See `Sampler`."""
        chosen = list(dict.fromkeys((self.largest, self.smallest)))
        if self._others is not None:
            order = numpy_generator(self.seed, "sandwich", step).permutation(len(self._others))
            return chosen + [self._others[i] for i in order[: self.middle]]
        wanted = len(chosen) + self.middle
        slot = 0
        while len(chosen) < wanted:
            arch = self.source.sample(self.seed, step, slot)
            slot += 1
            if arch not in chosen:
                chosen.append(arch)
        return chosen


def uniform(space: SearchSpace | None, seed: int = 0, candidates: Sequence[Architecture] | None = None) -> Uniform:
    """One network of the candidates, else of the space, per step, see `Uniform`."""
    return Uniform(Source.of(space, candidates), seed)


def preferred(candidates: Sequence[Architecture], seed: int = 0) -> Uniform:
    """One candidate per step, see `Uniform`."""
    return Uniform(Source.of(None, candidates), seed)


def balanced(candidates: Sequence[Architecture], seed: int = 0) -> Balanced:
    """One candidate per step, (width, depth) groups equally often, see `Balanced`."""
    return Balanced(Source.of(None, candidates), seed)


def sandwich(
    space: SearchSpace | None, seed: int = 0, middle: int = 2, candidates: Sequence[Architecture] | None = None
) -> Sandwich:
    """Largest, smallest and `middle` others of the candidates, else of the space, per step, see `Sandwich`."""
    return Sandwich(Source.of(space, candidates), seed, middle)


@dataclass
class SamplerConfig:
    """Which sub-networks a training step takes, and how their gradients are combined."""

    name: str = "uniform"  # uniform, sandwich; preferred, balanced (after the phase select); an own one: MODULE:NAME
    source: str | None = None  # what it draws from: candidates, space; None: candidates where a selection ran
    middle: int = 2  # of the sandwich: networks between the smallest and the largest
    reduce: str = "mean"  # gradients of a step's networks: mean (PreNAS), sum (S3); AdamW cares little, clipping does


Builder = Callable[[SamplerConfig, Source, int], Sampler]
_BUILDERS: dict[str, Builder] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Decorator: make ``build(config, source, seed) -> Sampler`` available as ``sampler.name=<name>``."""

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
@register("preferred")
def _build_uniform(config: SamplerConfig, source: Source, seed: int) -> Sampler:
    return Uniform(source, seed)


@register("sandwich")
def _build_sandwich(config: SamplerConfig, source: Source, seed: int) -> Sampler:
    return Sandwich(source, seed, config.middle)


@register("balanced")
def _build_balanced(config: SamplerConfig, source: Source, seed: int) -> Sampler:
    return Balanced(source, seed)


def build_sampler(
    config: SamplerConfig,
    space: SearchSpace | None = None,
    candidates: Sequence[Architecture] | None = None,
    seed: int = 0,
) -> Sampler:
    """The sampler that `config` names, drawing from what `config.source` says (None: candidates where there are some).

    Raises:
        UserError: an unknown name or source, or nothing to draw from.
    """
    builder = find(config.name)
    check_source(config, candidates is not None)
    made = builder(config, Source.of(space, candidates, config.source), seed)
    if not isinstance(made, Sampler):
        lacking = [name for name in ("archs", "covers_all_parameters", "__call__") if not hasattr(made, name)]
        raise UserError(f"sampler.name: {config.name!r} gives a {type(made).__name__} without {', '.join(lacking)}")
    return made


def find(name: str) -> Builder:
    """The builder called `name`, or NAME of "MODULE:NAME" once that is imported; `UserError` with the nearest one."""
    if ":" in name:
        name = resolve("sampler.name", name, lambda: _BUILDERS, "lightning_tas.samplers.register")
    if name not in _BUILDERS:
        others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in others:
            raise unknown("sampler.name", name, names())
        register(name)(others[name].load())
    return _BUILDERS[name]


def check_source(config: SamplerConfig, selected: bool) -> None:
    """Refuse a source that the sampler cannot use, or that is not there. `selected`: whether a selection ran."""
    if config.name in NEED_CANDIDATES and config.source == "space":
        raise UserError(
            f"sampler.source: 'space' is no list, and {config.name!r} draws from one; valid: candidates, null, or "
            "sampler.name=uniform or sandwich"
        )
    if not selected and (config.name in NEED_CANDIDATES or config.source == "candidates"):
        key, value = ("name", config.name) if config.name in NEED_CANDIDATES else ("source", config.source)
        raise UserError(
            f"sampler.{key}: {value!r} trains the candidates of a selection, so phases needs 'select' before 'supernet'"
        )


def _shape(arch: Architecture) -> tuple[tuple[int, int], ...]:
    """(width, depth) of every stage: what balanced sampling groups by (0 in families without such widths)."""
    return tuple(
        (int(stage.get("embed_dim", arch.get("base_dim", 0) * stage.get("num_heads", 0))), stage.depth)
        for stage in arch.stages
    )
