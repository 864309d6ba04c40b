"""`SearchSpace`: which architectures exist, as an immutable value of dimensions and predicates.

Membership, exact size, lazy enumeration, the encoded form (integer arrays) and the way to and from JSON are here;
random moves are in `moves`, the tables behind it all in `layout`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast, overload

import numpy as np

from lightning_tas.architecture import Architecture, Block, Stage, Value, canonical
from lightning_tas.errors import UserError, unknown
from lightning_tas.spaces import moves
from lightning_tas.spaces.dimension import Column, Dimension
from lightning_tas.spaces.layout import Layout
from lightning_tas.spaces.membership import why_not
from lightning_tas.spaces.predicates import Predicate


@dataclass(frozen=True)
class SearchSpace:
    """The architectures of one family that dimensions span and predicates allow; impossible spaces are refused.

    `allocated` is what a supernet of this space allocates per dimension (a tuple over stages when there are several);
    what is not given is the greatest choice. `name` is a label and no part of equality or `id`.
    """

    name: str = field(compare=False)
    family: str
    dimensions: tuple[Dimension, ...]
    predicates: tuple[Predicate, ...] = ()
    stages: int = 1
    reserve: tuple[tuple[str, Any], ...] = ()

    def __init__(
        self,
        name: str,
        family: str,
        dimensions: Iterable[Dimension],
        predicates: Iterable[Predicate] = (),
        stages: int = 1,
        allocated: Mapping[str, Any] | None = None,
    ) -> None:
        set_field = lambda key, value: object.__setattr__(self, key, value)  # noqa: E731
        set_field("name", str(name))
        set_field("family", str(family))
        set_field("stages", stages)
        set_field("dimensions", tuple(_fit_stages(d, stages) for d in dimensions))
        set_field("predicates", tuple(dict.fromkeys(predicates)))
        self._check_names()
        set_field("reserve", self._reserve(allocated or {}))
        self._layout.check(self.name)

    def _check_names(self) -> None:
        names = [d.name for d in self.dimensions]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"space {self.name!r}: dimension {name!r} is defined twice")
        if not isinstance(self.stages, int) or self.stages < 1:
            raise UserError(f"space {self.name!r}: stages must be a positive count, got {self.stages!r}")
        depth = self._by_name.get("depth")
        if depth is None or depth.scope != "stage":
            raise UserError(f"space {self.name!r}: a stage dimension 'depth' is needed (one choice if it is fixed)")
        for p in self.predicates:
            for arg in p.names:
                if arg not in self._by_name:
                    raise unknown(f"predicate {p.name}", arg, names)
                if p.rule.path and self._by_name[arg].scope == "block":
                    raise UserError(f"predicate {p.name}: {arg} is chosen per block; path rules look at stages")

    def _reserve(self, allocated: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        for key in allocated:
            if key not in self._by_name:
                raise unknown("allocated", key, self._by_name)
        items = []
        for d in self.dimensions:
            places = [None] if d.scope == "network" else list(range(self.stages))
            greatest = [d.at(s)[-1] for s in places]
            given = allocated.get(d.name, greatest)
            values = list(given) if isinstance(given, (list, tuple)) else [given] * len(places)
            if len(values) != len(places):
                raise UserError(f"allocated.{d.name}: {len(values)} values for {len(places)} stages")
            values = [canonical(v, f"allocated.{d.name}") for v in values]
            for value, least in zip(values, greatest, strict=True):
                if value < least:
                    raise UserError(f"allocated.{d.name}: {value} cannot hold the choice {least}")
            items.append((d.name, values[0] if len(values) == 1 else tuple(values)))
        return tuple(items)

    @cached_property
    def _by_name(self) -> dict[str, Dimension]:
        return {d.name: d for d in self.dimensions}

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.dimensions, self.predicates, self.stages)

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the encoded form, see `encode`."""
        return self._layout.columns

    @property
    def allocated(self) -> dict[str, Any]:
        """What a supernet allocates per dimension; values are tuples over stages when there are several stages."""
        return dict(self.reserve)

    def dimension(self, name: str) -> Dimension:
        """The dimension called `name`; `UserError` if there is none."""
        if name not in self._by_name:
            raise unknown(f"dimension of space {self.name!r}", name, self._by_name)
        return self._by_name[name]

    def choices(self, name: str, stage: int = 0) -> tuple[Any, ...]:
        """The ascending choices of a dimension in a stage."""
        d = self.dimension(name)
        if not 0 <= stage < self.stages:
            raise unknown("stage", stage, range(self.stages))
        return d.at(None if d.scope == "network" else stage)

    def size(self) -> int:
        """The exact number of architectures."""
        return self._layout.size()

    def smallest(self) -> Architecture:
        """The architecture of the smallest choices (the nearest allowed to it under predicates)."""
        return self.decode(moves.nearest(self._layout, 0.0))[0]

    def middle(self) -> Architecture:
        """The architecture of the middle choices (the lower of two middles)."""
        return self.decode(moves.nearest(self._layout, 0.5))[0]

    def largest(self) -> Architecture:
        """The architecture of the greatest choices (the nearest allowed to it under predicates)."""
        return self.decode(moves.nearest(self._layout, 1.0))[0]

    def enumerate(self) -> Iterator[Architecture]:
        """Every architecture once, lazily, in a fixed order."""
        layout = self._layout
        for rows in itertools.product(*(t.rows for t in layout.tables)):
            codes = np.full((1, len(self.columns)), -1, dtype=np.int16)
            for table, row in zip(layout.tables, rows, strict=True):
                codes[0, list(table.variables)] = row
            pools: list[list[tuple[int, ...]]] = []
            for s in range(self.stages):
                tables = layout.block_tables(s, tuple(codes[0, layout.context[s]].tolist()))
                pools += [moves.combinations(tables)] * self._depth(codes[0], s)
            skeleton = codes[0].tolist()
            for blocks in itertools.product(*pools):
                yield self._build(skeleton, blocks)

    def __iter__(self) -> Iterator[Architecture]:
        return self.enumerate()

    # --- membership ---------------------------------------------------------------------------------------------------

    def __contains__(self, arch: object) -> bool:
        return isinstance(arch, Architecture) and self.why_not(arch) is None

    def why_not(self, arch: Architecture) -> str | None:
        """Why `arch` is outside the space, with the numbers; None for a member."""
        return why_not(self, arch)

    # --- the encoded form ---------------------------------------------------------------------------------------------

    def encode(self, archs: Architecture | Iterable[Architecture]) -> np.ndarray:
        """Choice indices (N, len(columns)) int16, -1 in block slots beyond the depth; `UserError` for a non-member."""
        archs = [archs] if isinstance(archs, Architecture) else list(archs)
        codes = np.full((len(archs), len(self.columns)), -1, dtype=np.int16)
        for i, arch in enumerate(archs):
            if not isinstance(arch, Architecture):
                raise UserError(f"encode: architecture {i} is a {type(arch).__name__}, not an Architecture")
            row = self._row(arch)
            if row is None:
                raise UserError(f"architecture {i} is outside the space {self.name!r}: {self.why_not(arch)}")
            codes[i] = row
        for i in np.flatnonzero(~moves.allowed(self._layout, codes))[:1]:
            raise UserError(f"architecture {i} is outside the space {self.name!r}: {self.why_not(archs[i])}")
        return codes

    def _row(self, arch: Architecture) -> list[int] | None:
        """Codes of one architecture by dictionary look-up; None when it does not fit the dimensions."""
        layout = self._layout
        if arch.family != self.family or len(arch.stages) != self.stages or len(arch.keys()) != len(layout.network):
            return None
        index, block_codes = self._index, self._block_codes
        try:
            row = [index[d.name, None][arch[d.name]] for d in layout.network]
            for s, stage in enumerate(arch.stages):
                if len(stage.keys()) != len(layout.stage) - 1:
                    return None
                for d in layout.stage:
                    row.append(index[d.name, s][stage.depth if d.name == "depth" else stage[d.name]])
                known = block_codes[s]
                for block in stage.blocks:
                    if block not in known:
                        if len(block.keys()) != len(layout.block):
                            return None
                        known[block] = [index[d.name, s][block[d.name]] for d in layout.block]
                    row += known[block]
                row += [-1] * ((layout.max_depth[s] - stage.depth) * len(layout.block))
        except KeyError:
            return None
        return row

    @cached_property
    def _index(self) -> dict[tuple[str, int | None], dict[Value, int]]:
        places: dict[tuple[str, int | None], dict[Value, int]] = {}
        for d in self.dimensions:
            for s in [None] if d.scope == "network" else range(self.stages):
                places[d.name, s] = {value: i for i, value in enumerate(d.at(s))}
        return places

    @cached_property
    def _block_codes(self) -> list[dict[Block, list[int]]]:
        return [{} for _ in range(self.stages)]

    def decode(self, codes: np.ndarray | Sequence[Any]) -> list[Architecture]:
        """The architectures of codes (N, len(columns)) or (len(columns),); `UserError` for codes of no member."""
        array = np.asarray(codes)
        array = array[None] if array.ndim == 1 else array
        if array.ndim != 2 or array.shape[1] != len(self.columns) or not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                f"codes: expected integers of shape (N, {len(self.columns)}), got {array.dtype} {array.shape}"
            )
        for i in np.flatnonzero(~moves.allowed(self._layout, array))[:1]:
            raise UserError(f"codes: row {i} is no architecture of the space {self.name!r}: {array[i].tolist()}")
        width = len(self._layout.block)
        archs = []
        for row in array.tolist():
            blocks = []
            for s in range(self.stages):
                start = self._layout.block_start[s]
                for slot in range(self._depth(row, s)):
                    blocks.append(tuple(row[start + slot * width : start + (slot + 1) * width]))
            archs.append(self._build(row, blocks))
        return archs

    def valid(self, codes: np.ndarray) -> np.ndarray:
        """Which rows of integer `codes` (N, len(columns)) are members: (N,) bool."""
        return moves.allowed(self._layout, codes)

    def _depth(self, row: Sequence[int] | np.ndarray, stage: int) -> int:
        return int(self._layout.depth_choices[stage][row[self._layout.depth_column[stage]]])

    def _build(self, skeleton: Sequence[int], blocks: Sequence[tuple[int, ...]]) -> Architecture:
        layout = self._layout
        columns = layout.columns
        stages, done = [], 0
        for s in range(self.stages):
            first = layout.block_start[s] - len(layout.stage)
            own = {columns[c].name: columns[c].choices[skeleton[c]] for c in range(first, layout.block_start[s])}
            depth = own.pop("depth")
            stages.append(Stage([self._block(s, codes) for codes in blocks[done : done + depth]], **own))
            done += depth
        extras = {columns[c].name: columns[c].choices[skeleton[c]] for c in range(len(layout.network))}
        return Architecture(self.family, stages, **extras)

    def _block(self, stage: int, codes: tuple[int, ...]) -> Block:
        cache = self._blocks
        if (stage, codes) not in cache:
            dims = self._layout.block
            cache[stage, codes] = Block(**{d.name: d.at(stage)[i] for d, i in zip(dims, codes, strict=True)})
        return cache[stage, codes]

    @cached_property
    def _blocks(self) -> dict[tuple[int, tuple[int, ...]], Block]:
        return {}

    # --- random moves: functions of the seed --------------------------------------------------------------------------

    @overload
    def sample(self, seed: int = 0) -> Architecture: ...

    @overload
    def sample(self, seed: int = 0, *, n: int, stratify: moves.Key | None = None) -> list[Architecture]: ...

    @overload
    def sample(self, seed: int, n: int, stratify: moves.Key | None = None) -> list[Architecture]: ...

    def sample(
        self, seed: int = 0, n: int | None = None, stratify: moves.Key | None = None
    ) -> Architecture | list[Architecture]:
        """A random architecture, or a list of `n`, whose first ones are the same for every `n`.

        Every free choice is uniform (depth first, then each block), under predicates uniform over what they allow.
        With `stratify`, a function of codes such as their parameter counts, the `n` spread over its range instead.
        """
        if n is None:
            return self.decode(self.sample_codes(seed, 1))[0]
        return self.decode(self.sample_codes(seed, n, stratify))

    def sample_codes(self, seed: int, n: int, stratify: moves.Key | None = None) -> np.ndarray:
        """Like `sample`, in encoded form (n, len(columns))."""
        if stratify is None:
            return moves.sample(self._layout, seed, n)
        return moves.stratified(self._layout, seed, n, stratify)

    def mutate(self, arch: Architecture, seed: int = 0, **options: Any) -> Architecture:
        """A random neighbour inside the space, different from `arch` unless it is alone; see `moves.mutate`."""
        return self.decode(moves.mutate(self._layout, self.encode(arch)[0], seed, **options))[0]

    def crossover(self, a: Architecture, b: Architecture, seed: int = 0, **options: Any) -> Architecture:
        """A child of two members, inside the space, also of different depths; see `moves.crossover`."""
        pair = self.encode([a, b])
        return self.decode(moves.crossover(self._layout, pair[0], pair[1], seed, **options))[0]

    # --- as data ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by `from_dict`."""
        return {
            "name": self.name,
            "family": self.family,
            "stages": self.stages,
            "dimensions": [d.to_dict() for d in self.dimensions],
            "predicates": [p.to_dict() for p in self.predicates],
            "allocated": {k: list(v) if isinstance(v, tuple) else v for k, v in self.reserve},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchSpace:
        """Read `to_dict`'s form; `UserError` names what is wrong."""
        keys = ("name", "family", "dimensions", "predicates", "stages", "allocated")
        for key in data:
            if key not in keys:
                raise unknown("space", key, keys)
        for key in ("family", "dimensions"):
            if key not in data:
                raise UserError(f"space: {key} is missing; got {sorted(map(str, data))}")
        return cls(
            name=data.get("name", "unnamed"),
            family=data["family"],
            dimensions=[Dimension.from_dict(d) for d in data["dimensions"]],
            predicates=[Predicate.from_dict(p) for p in data.get("predicates") or ()],
            stages=data.get("stages", 1),
            allocated=data.get("allocated"),
        )

    @property
    def id(self) -> str:
        """Ten hex characters, equal for equal spaces whatever their names."""
        content = {key: value for key, value in self.to_dict().items() if key != "name"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("utf-8"), digest_size=5).hexdigest()

    def with_choices(self, **choices: Any) -> SearchSpace:
        """The space with other choices for some dimensions; what is allocated grows where it must."""
        for key in choices:
            self.dimension(key)
        dimensions = [
            Dimension(d.name, d.scope, choices.get(d.name, d.choices), d.step, d.zero) for d in self.dimensions
        ]
        wider = SearchSpace(self.name, self.family, dimensions, self.predicates, self.stages)
        allocated = {name: _greater_of(value, wider.allocated[name]) for name, value in self.reserve}
        return SearchSpace(self.name, self.family, dimensions, self.predicates, self.stages, allocated)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Only the content: caches are rebuilt where it is unpickled.
        return SearchSpace.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        parts = ", ".join(f"{d.name}={list(d.choices)}" for d in self.dimensions)
        return f"SearchSpace({self.name!r}, {self.family!r}, {parts})"


def _fit_stages(d: Dimension, stages: int) -> Dimension:
    if not isinstance(d, Dimension):
        raise UserError(f"dimensions: expected Dimension values, got {d!r}")
    if not d.per_stage:
        return d
    if len(d.choices) != stages:
        raise UserError(f"{d.name}: {len(d.choices)} lists of choices for {stages} stages")
    # Equal lists are one list, so that both spellings are one value.
    return Dimension(d.name, d.scope, d.choices[0], d.step, d.zero) if len(set(d.choices)) == 1 else d


def _greater_of(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(max(x, y) for x, y in zip(a, cast(tuple[Any, ...], b), strict=True))
    return max(a, b)
