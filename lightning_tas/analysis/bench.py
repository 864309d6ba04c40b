"""Networks with known accuracies: our JSON, and the `.pth` files of the Auto-Prox release (ViT-Bench-101).

Both hold records `{"arch": {...}, "c100_kd_acc": 76.06, ...}`: as a list, as a mapping of any keys to records, or as
such a collection under "entries". Architectures are in any layout that `Architecture.from_dict` reads. Every number
whose name ends in "acc" or begins with "top1" is an accuracy [%].
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, nearest, unknown
from lightning_tas.launch.files import read_torch
from lightning_tas.reading import parse_json, read_text

KEY = "bench.path"
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
INHERITED = "imagenet_super_acc"
"""Accuracies in an AutoFormer supernet: of another class of networks than the rest of their file."""
ALIGNED_BELOW = 240
"""Widths whose `imagenet_super_acc` belongs to the architecture beside it.

Of the released records those with hidden_dim 240 are all near 71.3 %, four points under narrower ones: mixed up.
"""
DIGITS = 3
"""Decimals of an accuracy in percent: the release prints one count of hits as 82.936 and as 82.9359, which is a tie."""


@dataclass(frozen=True)
class Bench:
    """Networks of one family and their accuracies [%], NaN where unknown.

    `columns` are all that the file has, `accuracies` those to correlate with; `notes` say what was left out and why.
    `complete`: all networks of the file are here.
    """

    archs: tuple[Architecture, ...]
    accuracies: Mapping[str, NDArray[np.float64]]
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True

    @property
    def family(self) -> str:
        """Of all networks."""
        return self.archs[0].family

    def __len__(self) -> int:
        return len(self.archs)


def read_bench(
    path: Path | str, columns: Sequence[str] | None = None, family: str | None = None, limit: int | None = None
) -> Bench:
    """Read a bench file.

    Args:
        path: JSON, or a file of torch (`.pth`), which is read without running any code in it.
        columns: names of the accuracies to keep; None: all that were measured on networks of this class.
        family: read the architectures as this family; None: the one that the file states or implies.
        limit: keep the first so many networks.

    Raises:
        UserError: no such file, another kind of file, a malformed record, families mixed, no such column.
    """
    path = Path(path)
    every = _entries(_load(path), path)
    entries = every[:limit]
    archs = [_architecture(entry, label, family, path) for label, entry in entries]
    families = sorted({arch.family for arch in archs})
    if len(families) > 1:
        raise UserError(f"{KEY}: {str(path)!r} mixes networks of {', '.join(families)}; a bench is of one family")
    found = _columns(entries, path)
    names, notes = tuple(found), list(_gaps(found))
    if INHERITED in found:
        _drop_misaligned(found, archs, notes)
    if columns is not None:
        for name in columns:
            if not isinstance(name, str) or name not in found:
                raise unknown("bench.accuracies", name, found)
        found = {name: found[name] for name in columns}
    elif INHERITED in found and families != ["autoformer"] and len(found) > 1:
        del found[INHERITED]
        notes.append(f"{INHERITED} is of AutoFormer networks: left out, recipe=vit_bench_imagenet scores those")
    found, empty = {k: v for k, v in found.items() if _enough(v)}, [k for k, v in found.items() if not _enough(v)]
    notes += [f"{name} is known of fewer than two networks: left out" for name in empty]
    if not found:
        raise UserError(f"{KEY}: {str(path)!r}: {'; '.join(notes)}; nothing is left to correlate with")
    return Bench(tuple(archs), found, names, tuple(notes), complete=len(entries) == len(every))


def _load(path: Path) -> Any:
    if not path.is_file():
        beside = [str(path.parent / one.name) for one in path.parent.glob("*") if one.is_file()]
        near = nearest(str(path), beside)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{KEY}: {str(path)!r} is not a file; give the JSON or .pth file of a bench{hint}")
    if path.suffix.lower() in TORCH_SUFFIXES:
        try:
            return read_torch(path, _numbers())
        except Exception as error:  # of many kinds: not a zip file, a pickle of other classes, cut off, ...
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
            inner = re.search(r"WeightsUnpickler error: ([^\n]*)", text)
            reason = inner[1].strip() if inner else text.partition("\n")[0]
            raise UserError(f"{KEY}: {str(path)!r} cannot be read with weights_only=True ({reason})") from None
    try:
        return parse_json(read_text(path, KEY), "it")
    except UserError as error:
        raise UserError(f"{KEY}: {str(path)!r} is neither JSON nor a .pth file ({error})") from None


def _numbers() -> list[Any]:
    """What a pickle of NumPy's numbers and arrays names, under the names of NumPy 1 and 2; nothing in it runs code."""
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray  # type: ignore[attr-defined]
    made = [
        (getattr(multiarray, name), f"{module}.multiarray.{name}")
        for name in ("scalar", "_reconstruct")
        for module in ("numpy.core", "numpy._core")
    ]
    return [*made, np.dtype, np.ndarray, *(type(np.dtype(code)) for code in "?bhilqBHILQefd")]


def _entries(content: Any, path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """(label for messages, record) of every network."""
    if isinstance(content, Mapping) and "entries" in content:
        content = content["entries"]
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, Mapping):
        pairs = content.items()
    elif isinstance(content, Sequence) and not isinstance(content, str):
        pairs = enumerate(content)
    found = [(str(label), record) for label, record in pairs]
    if not found:
        raise UserError(
            f'{KEY}: {str(path)!r} holds no networks; valid: {{"entries": [{{"arch": ..., "x_acc": ...}}]}}'
        )
    for label, record in found:
        if not isinstance(record, Mapping) or not isinstance(record.get("arch"), Mapping):
            raise UserError(f"{KEY}: {str(path)!r}: entry {label} has no 'arch' with an architecture")
    return found


def _architecture(entry: Mapping[str, Any], label: str, family: str | None, path: Path) -> Architecture:
    try:
        return Architecture.from_dict(_plain(entry["arch"]), family=family)
    except (UserError, RuntimeError) as error:  # RuntimeError: a tensor without numbers in it
        raise UserError(f"{KEY}: {str(path)!r}: entry {label}: {error}") from None


def _plain(value: Any) -> Any:
    """Tensors as lists and numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _columns(pairs: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> dict[str, NDArray[np.float64]]:
    entries = [entry for _, entry in pairs]
    names = dict.fromkeys(
        key for entry in entries for key in entry if str(key).endswith("acc") or str(key).startswith("top1")
    )
    found = {
        str(name): np.array([_number(entry.get(name), name, label, path) for label, entry in pairs]) for name in names
    }
    for name in found:
        if not name.isprintable():
            raise UserError(f"{KEY}: {str(path)!r}: the accuracy {name!r} has a name that cannot be written")
    if not found:
        keys = ", ".join(str(key) for key in entries[0])
        raise UserError(f"{KEY}: {str(path)!r} has no accuracies (names that end in acc); its records have {keys}")
    return found


def _number(value: Any, name: Any, label: str, path: Path) -> float:
    if value is None:
        return math.nan
    found: float | None = None
    try:
        number = _plain(value)
        if isinstance(number, numbers.Real) and not isinstance(number, bool):
            found = float(number)
    except (OverflowError, RuntimeError):  # an integer of hundreds of digits; a tensor without numbers in it
        pass
    if found is None:
        raise UserError(f"{KEY}: {str(path)!r}: entry {label}: {name} {str(value)[:40]!r} is not a number")
    return round(found, DIGITS) if math.isfinite(found) else math.nan


def _drop_misaligned(found: dict[str, NDArray[np.float64]], archs: Sequence[Architecture], notes: list[str]) -> None:
    wide = np.array([len(arch.stages) == 1 and arch.embed_dim >= ALIGNED_BELOW for arch in archs])
    if wide.any():
        found[INHERITED] = np.where(wide, math.nan, found[INHERITED])
        notes.append(
            f"{INHERITED} of the {int(wide.sum())} networks with hidden_dim {ALIGNED_BELOW} or more does not belong to "
            "them in the release: left out"
        )


def _gaps(found: Mapping[str, NDArray[np.float64]]) -> Iterator[str]:
    """What there is to say of networks whose accuracy is not known."""
    for name, column in found.items():
        missing = int(np.isnan(column).sum())
        if missing:
            yield f"{name} is unknown for {missing} of {len(column)} networks, which its correlations leave out"


def _enough(values: NDArray[np.float64]) -> bool:
    return int(np.isfinite(values).sum()) >= 2
