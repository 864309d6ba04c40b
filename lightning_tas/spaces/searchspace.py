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
from typing import Any, overload

import numpy as np

from lightning_tas.architecture import Architecture, canonical
from lightning_tas.errors import UserError, unknown
from lightning_tas.spaces import moves
from lightning_tas.spaces.coding import Codec
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
        content = {
            "name": str(name),
            "family": str(family),
            "stages": stages,
            "dimensions": tuple(_fit_stages(d, stages) for d in dimensions),
            "predicates": tuple(dict.fromkeys(predicates)),
        }
        for key, value in content.items():
            object.__setattr__(self, key, value)
        self._check_names()
        object.__setattr__(self, "reserve", self._reserve(_mapping(allocated, "allocated")))
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

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self.family, self._layout)

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the encoded form: the network's, then per stage its own and those of its block slots."""
        return self._layout.columns

    @property
    def layout(self) -> Layout:
        """The columns and the tables of allowed combinations, which exact searches and counts walk along."""
        return self._layout

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
        layout, codec = self._layout, self._codec
        for rows in itertools.product(*(t.rows.tolist() for t in layout.tables)):
            skeleton = [-1] * len(layout.columns)
            for table, row in zip(layout.tables, rows, strict=True):
                for c, code in zip(table.variables, row, strict=True):
                    skeleton[c] = code
            pools: list[list[tuple[int, ...]]] = []
            for s, context in enumerate(layout.context):
                tables = layout.block_tables(s, tuple(skeleton[c] for c in context))
                pools += [moves.combinations(tables)] * codec.depth(skeleton, s)
            for blocks in itertools.product(*pools):
                yield codec.assemble(skeleton, blocks)

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
            row = self._codec.row(arch)
            if row is None:
                raise self._outside(i, arch)
            codes[i] = row
        for i in np.flatnonzero(~moves.allowed(self._layout, codes)).tolist():
            raise self._outside(i, archs[i])
        return codes

    def _outside(self, i: int, arch: Architecture) -> UserError:
        return UserError(f"architecture {i} is outside the space {self.name!r}: {self.why_not(arch)}")

    def decode(self, codes: np.ndarray | Sequence[Any]) -> list[Architecture]:
        """The architectures of codes (N, len(columns)) or (len(columns),); `UserError` for codes of no member."""
        array = np.asarray(codes)
        array = array[None] if array.ndim == 1 else array
        if array.ndim != 2 or array.shape[1] != len(self.columns) or not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                f"codes: expected integers of shape (N, {len(self.columns)}), got {array.dtype} {array.shape}"
            )
        for i in np.flatnonzero(~moves.allowed(self._layout, array)):
            raise UserError(f"codes: row {i} is no architecture of the space {self.name!r}: {array[i].tolist()}")
        return [self._codec.build(row) for row in array.tolist()]

    def valid(self, codes: np.ndarray) -> np.ndarray:
        """Which rows of integer `codes` (N, len(columns)) are members: (N,) bool."""
        return moves.allowed(self._layout, codes)

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

    def mutate_codes(self, codes: np.ndarray, seed: int, **options: Any) -> np.ndarray:
        """Like `mutate`, from a member's codes (C,) to codes; they are not checked."""
        return moves.mutate(self._layout, codes, seed, **options)

    def crossover_codes(self, a: np.ndarray, b: np.ndarray, seed: int, **options: Any) -> np.ndarray:
        """Like `crossover`, from two members' codes (C,) to codes; they are not checked."""
        return moves.crossover(self._layout, a, b, seed, **options)

    def redraw_codes(self, codes: np.ndarray, columns: np.ndarray, seed: int) -> np.ndarray:
        """A member's codes (C,) with the choices in some `columns` (C,) bool drawn anew, see `moves.redraw`."""
        return moves.redraw(self._layout, codes, columns, seed)

    def block_choices(self, codes: np.ndarray, stage: int) -> np.ndarray:
        """All blocks (R, block dimensions) that a stage of the member `codes` (C,) allows in any of its slots."""
        return moves.block_choices(self._layout, codes, stage)

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
            dimensions=[Dimension.from_dict(d) for d in _list(data["dimensions"], "dimensions")],
            predicates=[Predicate.from_dict(p) for p in _list(data.get("predicates"), "predicates")],
            stages=data.get("stages", 1),
            allocated=data.get("allocated"),
        )

    @property
    def id(self) -> str:
        """Ten hex characters, equal for equal spaces whatever their names."""
        content = {key: value for key, value in self.to_dict().items() if key != "name"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("utf-8"), digest_size=5).hexdigest()

    def with_choices(
        self, *, name: str | None = None, allocated: Mapping[str, Any] | None = None, **choices: Any
    ) -> SearchSpace:
        """The space with other choices for some dimensions; what is allocated, unless given, grows where it must."""
        for key in choices:
            self.dimension(key)
        dimensions = [
            Dimension(d.name, d.scope, choices.get(d.name, d.choices), d.step, d.zero) for d in self.dimensions
        ]
        bare = SearchSpace(name or self.name, self.family, dimensions, self.predicates, self.stages)
        grown = {key: _greater_of(value, bare.allocated[key]) for key, value in self.reserve}
        grown |= _mapping(allocated, "allocated")
        return SearchSpace(bare.name, self.family, dimensions, self.predicates, self.stages, grown)

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


def _list(value: object, key: str) -> list[Any]:
    if value is not None and (isinstance(value, (str, Mapping)) or not isinstance(value, Iterable)):
        raise UserError(f"{key}: expected a list, got {value!r}")
    return list(value or ())


def _mapping(value: object, key: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{key}: expected a mapping, got {value!r}")
    return dict(value or {})


def _greater_of(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(max(x, y) for x, y in zip(a, b, strict=True))
    return max(a, b)
