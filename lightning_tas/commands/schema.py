"""Which keys exist and what types they take: what one key and its value tell, in messages that one can act on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_tas.commands import per_phase
from lightning_tas.commands.config import Config
from lightning_tas.errors import UserError, nearest


@cache
def all_keys() -> dict[str, str]:
    """Every key that has a value, dotted, and its annotation: `{"seed": "int", "data.root": "str | None", ...}`."""
    return dict(_keys(Config(), ""))


@cache
def groups() -> tuple[str, ...]:
    """The keys that hold other keys: `data`, `model`, ..."""
    return tuple(dict.fromkeys(key.rpartition(".")[0] for key in all_keys() if "." in key))


def _keys(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from _keys(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", str(item.type)


def check(key: str, value: Any, origin: str | None = None) -> None:
    """Refuse a key that does not exist and a value of the wrong type.

    Args:
        key: dotted; also a group (`data`, with a mapping), inside a free-form value (`space.depth`), or of one phase
            (`per_phase.retrain.train.lr`, or any part of that with a mapping).
        origin: the file that holds the key, for the message; None for the command line.
    """
    _check(key, value, f"{origin}: " if origin else "")


def _check(key: str, value: Any, before: str) -> None:
    """`before`: what the message has in front of the key: its file, its phase."""
    label, inner = per_phase.split(key) if per_phase.is_per_phase(key) else ("", "")
    if per_phase.is_per_phase(key) and not inner:
        if label:
            per_phase.check_label(label, f"{before}{key}")
        if value is not None:
            _check_group(key, value, before, ["train.lr", "data.img_size"] if label else per_phase.PHASES)
        return
    if label:
        check_key(key, before)
    if inner in groups():  # with its label: what a phase cannot have is no key of it, however deep it is written
        _check_group(key, value, before, _below(inner))
        return
    if label:
        before, key = f"{before}{per_phase.KEY}.{label}.", inner
    if key in groups():
        _check_group(key, value, before, _below(key))
        return
    check_key(key, before)
    if key not in all_keys() or (isinstance(value, str) and "${" in value):
        return  # inside `space`, whose reader checks it; or an interpolation, whose type shows when it is resolved
    try:
        OmegaConf.update(_trial(), key, value, merge=False)
    except (OmegaConfBaseException, ValueError, TypeError):
        raise UserError(f"{before}{key}: {value!r} is not valid; valid: {_expected(key)}") from None


def _check_group(key: str, value: Any, before: str, valid: Iterable[str]) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{before}{key}: {value!r} is not valid, it is a group of keys; valid: {', '.join(valid)}")
    for name, inner in value.items():
        _check(f"{key}.{name}", inner, before)


def check_key(key: str, before: str = "", top: Sequence[str] = ()) -> None:
    """Refuse a key that does not exist, with the keys beside it (at the `top` these) and the nearest one."""
    if key in all_keys() or key in groups():
        return
    label, inner = per_phase.split(key) if per_phase.is_per_phase(key) else ("", "")
    if label:
        per_phase.check_label(label, f"{before}{per_phase.KEY}.{label}")
        if inner:
            check_key(inner, f"{before}{per_phase.KEY}.{label}.", per_phase.SECTIONS[per_phase.kind(label)])
            per_phase.check_inner(label, inner, f"{before}{key}")
        return
    parts = key.split(".")
    if any(all_keys().get(".".join(parts[:i])) == "Any" for i in range(1, len(parts))):
        return
    # A key typed without its group ("batch_size") is as common as a misspelt one.
    same = [known for known in all_keys() if known.rpartition(".")[2] == parts[-1]]
    match = same[0] if same else nearest(key, all_keys())
    parent = next((p for i in range(len(parts) - 1, 0, -1) if (p := ".".join(parts[:i])) in groups()), "")
    text = f"{before}{key}: no such key; valid: {', '.join(_below(parent) if parent or not top else top)}"
    raise UserError(f"{text}. Did you mean {match!r}?" if match else text)


@cache
def _trial() -> DictConfig:
    """A configuration to try values on, one for all: making it takes longer than all checks together."""
    return OmegaConf.structured(Config)  # type: ignore[no-any-return]


def first_line(error: Exception) -> str:
    """The first line of a library's message."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def _below(group: str) -> list[str]:
    """Keys and groups directly under `group`; "" is the top."""
    if group:
        return [key for key in all_keys() if key.rpartition(".")[0] == group]
    return list(dict.fromkeys(key if "." not in key else f"{key.partition('.')[0]}.*" for key in all_keys()))


def _expected(key: str) -> str:
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "text",
        "list[float]": "a list of numbers, as [0.9,0.999]",
        "list[str]": "a list of names, as [select,supernet]",
    }
    annotation = all_keys()[key]
    return words[annotation.removesuffix(" | None")] + (" or null" if annotation.endswith(" | None") else "")
