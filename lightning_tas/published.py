"""Readers of architectures as data: our own records and the layouts of the published repositories, one or many.

Each layout is known by one key; what is missing or malformed is a `UserError` that names the field.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_tas.architecture import RESERVED, WHOLE, Architecture, Block, Stage, Value, canonical
from lightning_tas.errors import UserError


def read_architecture(data: Mapping[str, Any]) -> Architecture:
    """The architecture that `data` describes, of the family stated or else inferred from the layout."""
    if not isinstance(data, Mapping):
        raise UserError(f"architecture: expected a mapping, got {type(data).__name__}")
    for key, (_, read) in _READERS.items():
        if key in data:
            return read(data)
    if any(key in data for key in _SPACES):
        raise UserError("architecture: this is a search space, without RETRAIN, the network found; give it as space=")
    known = ", ".join(f"{key} ({whose})" for key, (whose, _) in _READERS.items())
    raise UserError(
        f"architecture: no layout is known with the keys {sorted(map(str, data))}; one of {known} is needed"
    )


def read_collection(data: Any, name: str) -> dict[str, Architecture]:
    """Label to architecture of all that a file holds: one architecture (called `name`), a list of them, a mapping of
    names or of bins (PreNAS's ``{"6.0": [...]}``) to one or several, or a result, search or selection of ours.

    An entry may hold the architecture under ``arch``, and its own ``label`` or ``name``.
    """
    if isinstance(data, Mapping):
        entries = next(
            (data[key] for key in ("architectures", "networks", "candidates", "entries") if key in data), None
        )
        if entries is None and (any(key in data for key in (*_READERS, *_SPACES)) or not _holds_mappings(data)):
            return {name: Architecture.from_dict(data.get("arch", data))}
        groups = data if entries is None else {None: entries}
    else:
        groups = {None: data}
    found: dict[str, Architecture] = {}
    for group, members in groups.items():
        place = "the list" if group is None else str(group)
        for i, entry in enumerate(_entries([members] if isinstance(members, Mapping) else members, place)):
            own = entry.get("label", entry.get("name", i if group is None else group))
            label, repeat = str(own), 2
            while label in found:
                label, repeat = f"{own}-{repeat}", repeat + 1
            try:
                found[label] = Architecture.from_dict(entry.get("arch", entry))
            except UserError as error:
                raise UserError(f"{label}: {error}") from None
    return found


def _holds_mappings(data: Mapping[str, Any]) -> bool:
    """Whether every value is a mapping, or a list of them."""
    lists = [value if isinstance(value, list) else [value] for value in data.values()]
    return bool(lists) and all(members and all(isinstance(one, Mapping) for one in members) for members in lists)


def _need(data: Mapping[str, Any], key: str, place: str = "the architecture") -> Any:
    if key not in data:
        raise UserError(f"{key}: missing in {place}, which has {sorted(map(str, data))}")
    return data[key]


def _number(value: object, field: str) -> int | float:
    if isinstance(value, (str, bool)) or not isinstance(value, numbers.Real):
        raise UserError(f"{field}: {value!r} is not a number")
    number = canonical(value, field)
    if isinstance(number, str) or number <= 0:
        raise UserError(f"{field}: {value!r} must be positive")
    return number


def _whole(value: object, field: str) -> int:
    number = _number(value, field)
    if not isinstance(number, int):
        raise UserError(f"{field}: {value!r} must be a whole number")
    return number


def _list(value: object, field: str, length: int, surplus: bool = False) -> list[Any]:
    """A list of `length` entries; with `surplus`, longer lists are cut (released S3-T lists 8 blocks for depth 6)."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise UserError(f"{field}: expected a list of {length} entries, got {value!r}")
    entries = list(value)
    if len(entries) < length or (len(entries) > length and not surplus):
        raise UserError(f"{field}: {len(entries)} entries, but the depth is {length}")
    return entries[:length]


def _one(value: object, field: str, length: int) -> object:
    """A single value, also given as a list of `length` equal ones (AutoFormer writes embed_dim once per layer)."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    entries = _list(value, field, length)
    if any(entry != entries[0] for entry in entries):
        raise UserError(f"{field}: {entries} must be one value for the whole network")
    return entries[0]


def _vit_blocks(heads: object, ratios: object, depth: int) -> list[Block]:
    pairs = zip(_list(heads, "num_heads", depth), _list(ratios, "mlp_ratio", depth), strict=True)
    return [
        Block(num_heads=_whole(h, f"num_heads[{i}]"), mlp_ratio=_number(r, f"mlp_ratio[{i}]"))
        for i, (h, r) in enumerate(pairs)
    ]


def _read_own(data: Mapping[str, Any]) -> Architecture:
    family = _need(data, "family")
    if not isinstance(family, str):
        raise UserError(f"family: {family!r} is not a word")
    stages = []
    for s, stage in enumerate(_entries(data["stages"], "stages")):
        at = f"stages[{s}]"
        blocks = [
            Block(**_values(block, f"{at}.blocks[{b}]."))
            for b, block in enumerate(_entries(_need(stage, "blocks", at), f"{at}.blocks"))
        ]
        stages.append(Stage(blocks, **_values(stage, f"{at}.", skip=("blocks",))))
    return Architecture(family, stages, **_values(data, "", skip=("family", "stages")))


def _values(data: Mapping[str, Any], at: str, skip: tuple[str, ...] = ()) -> dict[str, Value]:
    """The own values of a network, stage or block; `at` is its place, for messages."""
    values: dict[str, Value] = {}
    for key, value in data.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise UserError(f"{at}{key}: a key must be a name")
        if key in skip:
            continue
        if key in RESERVED:
            raise UserError(f"{at}{key}: this name means something else here; no value can have it")
        check = _whole if key in WHOLE else _number if key == "mlp_ratio" else canonical
        values[key] = check(value, f"{at}{key}")
    return values


def _entries(value: object, field: str) -> list[Mapping[str, Any]]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise UserError(f"{field}: expected a list of mappings, got {value!r}")
    entries = list(value)
    if not entries:
        raise UserError(f"{field}: the list is empty")
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise UserError(f"{field}[{i}]: expected a mapping, got {entry!r}")
    return entries


def _read_autoformer(data: Mapping[str, Any]) -> Architecture:
    depth = _whole(data["layer_num"], "layer_num")
    width = _whole(_one(_need(data, "embed_dim"), "embed_dim", depth), "embed_dim")
    blocks = _vit_blocks(_need(data, "num_heads"), _need(data, "mlp_ratio"), depth)
    return Architecture("autoformer", [Stage(blocks, embed_dim=width)])


def _read_autoprox(data: Mapping[str, Any]) -> Architecture:
    depth = _whole(_need(data, "depth"), "depth")
    width = _whole(data["hidden_dim"], "hidden_dim")
    blocks = _vit_blocks(_need(data, "num_heads"), _need(data, "mlp_ratio"), depth)
    return Architecture("autoprox_vit", [Stage(blocks, embed_dim=width)])


def _read_pit(data: Mapping[str, Any]) -> Architecture:
    depths = [_whole(d, f"depth[{i}]") for i, d in enumerate(_plain_list(_need(data, "depth"), "depth"))]
    heads = _list(_need(data, "num_heads"), "num_heads", len(depths))
    ratio = _number(_one(_need(data, "mlp_ratio"), "mlp_ratio", len(depths)), "mlp_ratio")
    stages = [
        Stage([Block()] * d, num_heads=_whole(h, f"num_heads[{i}]"))
        for i, (d, h) in enumerate(zip(depths, heads, strict=True))
    ]
    return Architecture("pit", stages, base_dim=_whole(data["base_dim"], "base_dim"), mlp_ratio=ratio)


def _read_s3(data: Mapping[str, Any]) -> Architecture:
    depths = [_whole(d, f"DEPTHS[{i}]") for i, d in enumerate(_plain_list(data["DEPTHS"], "DEPTHS"))]
    widths = _list(_need(data, "EMBED_DIM"), "EMBED_DIM", len(depths))
    keys = {"NUM_HEADS": _whole, "MLP_RATIO": _number, "WINDOW_SIZE": _whole}
    stages = []
    for s, depth in enumerate(depths):
        columns: dict[str, list[int | float]] = {}
        for key, check in keys.items():
            field = f"{key}[{s}]"
            row = _list(_list(_need(data, key), key, len(depths))[s], field, depth, surplus=True)
            columns[key.lower()] = [check(v, f"{field}[{i}]") for i, v in enumerate(row)]
        blocks = [Block(**{key: column[i] for key, column in columns.items()}) for i in range(depth)]
        stages.append(Stage(blocks, embed_dim=_whole(widths[s], f"EMBED_DIM[{s}]")))
    return Architecture("s3", stages)


def _plain_list(value: object, field: str) -> list[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise UserError(f"{field}: expected a list with one entry per stage, got {value!r}")
    entries = list(value)
    if not entries:
        raise UserError(f"{field}: no stages")
    return entries


def _read_retrain(data: Mapping[str, Any]) -> Architecture:
    """The section of AutoFormer's YAML files for the network found; that of TF-TAS's PiTs has BASE_DIM."""
    section = data["RETRAIN"]
    if not isinstance(section, Mapping):
        raise UserError(f"RETRAIN: expected a mapping, got {section!r}")
    own = {str(key).lower(): value for key, value in section.items()}
    if "base_dim" in own:
        depths = _plain_list(_need(own, "depth", "RETRAIN"), "depth")
        return _read_pit({**own, "base_dim": _one(own["base_dim"], "base_dim", len(depths))})
    return _read_autoformer({**own, "layer_num": _need(own, "depth", "RETRAIN")})


_SPACES = ("SEARCH_SPACE", "SUPERNET")
# In this order: a mapping with `stages` is ours whatever else it holds.
_READERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Architecture]]] = {
    "stages": ("lightning_tas", _read_own),
    "layer_num": ("AutoFormer, PreNAS, TF-TAS", _read_autoformer),
    "RETRAIN": ("their YAML", _read_retrain),
    "hidden_dim": ("Auto-Prox", _read_autoprox),
    "base_dim": ("PiT", _read_pit),
    "DEPTHS": ("S3", _read_s3),
}
