"""What an architecture is: an immutable value, a family and stages of blocks.

A plain ViT is the one-stage case, windowed or pooled networks have several stages. Values live at the scope that they
belong to: a block's heads in the block, a stage's width in the stage, a network's resolution at the top (`extras`).
Numbers are canonical (4 and 4.0 are one value), so equality, hash, `id` and JSON agree. `Architecture.from_dict` also
reads the layouts of the published repositories, see `published`.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, NoReturn, Self

from lightning_tas.errors import UserError

Value = int | float | str

# Counts and widths, which must be whole numbers whatever the family.
WHOLE = frozenset(
    {"depth", "embed_dim", "hidden_dim", "base_dim", "d_model", "d_embed", "d_inner", "intermediate", "num_heads"}
    | {"n_head", "window_size", "kernel_size", "width", "resolution", "patch_size", "sr_ratio"}
)


# Names that mean something else on blocks, stages or architectures, so that no value can have them.
RESERVED = frozenset(
    {"self", "family", "stages", "blocks", "extras", "id", "depths", "per_block", "vit"}
    | {"get", "keys", "items", "to_dict", "from_dict"}
)


def canonical(value: object, field: str = "value") -> Value:
    """The one form of a number or word: whole numbers are `int`, others `float`; NumPy scalars become Python's."""
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            raise UserError(f"{field}: {value!r} is not a finite number")
        return int(number) if number.is_integer() else number
    raise UserError(f"{field}: {value!r} is not a number or a word")


class _Frozen:
    """An immutable record with attribute and item access: what blocks, stages and architectures have in common."""

    __slots__ = ("_hash", "_values")
    _values: dict[str, Value]
    _hash: int

    def _freeze(self, values: Mapping[str, object], *parts: object) -> None:
        ordered = {key: canonical(values[key], key) for key in sorted(values)}
        object.__setattr__(self, "_values", ordered)
        object.__setattr__(self, "_hash", hash((type(self).__name__, parts, tuple(ordered.items()))))

    def __getattr__(self, key: str) -> Any:
        # Only reached when no slot or method has the name. Private names must fail plainly (copy, pickle probe them).
        if not key.startswith("_") and key in self._values:
            return self._values[key]
        raise AttributeError(f"{type(self).__name__} has no {key!r}")

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The own value of `key` at this scope, or `default`."""
        return self._values.get(key, default)

    def keys(self) -> KeysView[str]:
        """Names of the own values, sorted."""
        return self._values.keys()

    def items(self) -> ItemsView[str, Value]:
        """The own values with their names, sorted by name."""
        return self._values.items()

    def __setattr__(self, key: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; build a new one")

    def __delattr__(self, key: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; build a new one")

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Block(_Frozen):
    """One block's own choices, e.g. ``Block(num_heads=3, mlp_ratio=4)``."""

    __slots__ = ()

    def __init__(self, **values: object) -> None:
        self._freeze(values)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Block) and self._values == other._values

    __hash__ = _Frozen.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_block, (self._values,)

    def __repr__(self) -> str:
        return f"Block({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"

    def to_dict(self) -> dict[str, Value]:
        """A new plain dict of the own values."""
        return dict(self._values)


class Stage(_Frozen):
    """Blocks that share the stage's own choices, e.g. ``Stage(blocks, embed_dim=192)``."""

    __slots__ = ("blocks",)
    blocks: tuple[Block, ...]

    def __init__(self, blocks: Iterable[Block], **values: object) -> None:
        object.__setattr__(self, "blocks", tuple(blocks))
        self._freeze(values, self.blocks)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Stage) and self._values == other._values and self.blocks == other.blocks

    __hash__ = _Frozen.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_stage, (self.blocks, self._values)

    def __repr__(self) -> str:
        own = "".join(f", {k}={v!r}" for k, v in self._values.items())
        return f"Stage({list(self.blocks)!r}{own})"

    def to_dict(self) -> dict[str, Any]:
        """A new plain dict: own values, then ``blocks``."""
        return {**self._values, "blocks": [block.to_dict() for block in self.blocks]}


class Architecture(_Frozen):
    """A network as a value: ``Architecture("autoformer", [Stage(...)])``; further keywords are per-network values.

    `family` is part of equality and `id`: it carries the rules that are not choices (head dim, relative position).
    """

    __slots__ = ("family", "stages")
    family: str
    stages: tuple[Stage, ...]

    def __init__(self, family: str, stages: Iterable[Stage], **extras: object) -> None:
        object.__setattr__(self, "family", str(family))
        object.__setattr__(self, "stages", tuple(stages))
        self._freeze(extras, self.family, self.stages)

    @classmethod
    def vit(
        cls, embed_dim: int, num_heads: Sequence[object], mlp_ratio: Sequence[object], family: str = "autoformer"
    ) -> Architecture:
        """An isotropic ViT of ``len(num_heads)`` blocks; `UserError` when the two lists differ in length."""
        if len(num_heads) != len(mlp_ratio):
            raise UserError(f"num_heads has {len(num_heads)} entries but mlp_ratio has {len(mlp_ratio)}")
        blocks = [Block(num_heads=h, mlp_ratio=r) for h, r in zip(num_heads, mlp_ratio, strict=True)]
        return cls(family, [Stage(blocks, embed_dim=embed_dim)])

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order of execution."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def depth(self) -> int:
        """Number of blocks of the network."""
        return sum(stage.depth for stage in self.stages)

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks per stage."""
        return tuple(stage.depth for stage in self.stages)

    @property
    def extras(self) -> dict[str, Value]:
        """The per-network values, e.g. PiT's ``base_dim`` (a copy)."""
        return dict(self._values)

    @property
    def embed_dim(self) -> Any:
        """The width of a one-stage network; `UserError` when stages have widths of their own or none is set."""
        if len(self.stages) != 1:
            raise UserError(f"embed_dim: a {self.family} network of {len(self.stages)} stages has one per stage")
        return self._lookup("embed_dim", self.stages[0], None)

    @property
    def num_heads(self) -> tuple[Any, ...]:
        """Heads of every block, in order."""
        return self.per_block("num_heads")

    @property
    def mlp_ratio(self) -> tuple[Any, ...]:
        """MLP ratio of every block, in order."""
        return self.per_block("mlp_ratio")

    def per_block(self, key: str) -> tuple[Any, ...]:
        """`key` as every block sees it: its own value, else its stage's, else the network's."""
        return tuple(self._lookup(key, stage, block) for stage in self.stages for block in stage.blocks)

    def _lookup(self, key: str, stage: Stage, block: Block | None) -> Value:
        for scope in (block, stage, self):
            if scope is not None and key in scope:
                value: Value = scope[key]
                return value
        raise UserError(f"{key}: this {self.family} architecture has no such value")

    @property
    def id(self) -> str:
        """Ten hex characters, equal for equal architectures in every process: for file names and logs."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("utf-8"), digest_size=5).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form: ``{"family", "stages": [{..., "blocks": [...]}], ...per-network values}``."""
        return {"family": self.family, **self._values, "stages": [stage.to_dict() for stage in self.stages]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], family: str | None = None) -> Architecture:
        """Read `to_dict`'s form or a published layout; `family` overrules the one stated or inferred.

        Layouts, told apart by their keys: AutoFormer, PreNAS and TF-TAS ``layer_num``; Auto-Prox ``hidden_dim``;
        PiT ``base_dim``; S3 ``DEPTHS``. `UserError` names the field that is missing or malformed.
        """
        # The readers build architectures, so they come after this class and cannot be imported above it.
        from lightning_tas.published import read_architecture

        arch = read_architecture(data)
        return cls(family or str(data.get("family", arch.family)), arch.stages, **arch.extras)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Architecture)
            and self._hash == other._hash
            and self.family == other.family
            and self._values == other._values
            and self.stages == other.stages
        )

    __hash__ = _Frozen.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_architecture, (self.family, self.stages, self._values)

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError("an Architecture is not iterable; use .stages or .blocks")

    def __repr__(self) -> str:
        own = "".join(f", {k}={v!r}" for k, v in self._values.items())
        return f"Architecture({self.family!r}, {list(self.stages)!r}{own})"


def _make_block(values: Mapping[str, object]) -> Block:
    return Block(**values)


def _make_stage(blocks: tuple[Block, ...], values: Mapping[str, object]) -> Stage:
    return Stage(blocks, **values)


def _make_architecture(family: str, stages: tuple[Stage, ...], values: Mapping[str, object]) -> Architecture:
    return Architecture(family, stages, **values)
