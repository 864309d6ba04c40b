"""Options of several proxies together, and what is known of the built-in ones before torch is imported.

Importing the formulas takes seconds, for torch: a misspelt name or option is told from `OUTLINES` alone. They repeat
what the formulas' signatures say; `tests/proxies/test_options.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.registry import Needs, Option, Proxy, Rule, above, least, named
from lightning_tas.spaces import resolve_space

Options = Mapping[str, Mapping[str, Any]]
TABLES = ("snip", "plain", "grad_norm", "synflow", "dss", "snip_norm")
"""Proxies whose scores of inherited gradients are sums over blocks, see `proxies.inherited`."""
COSTS = ("params", "macs")


@dataclass(frozen=True)
class Outline(Proxy):
    """A built-in proxy as far as names and options go."""

    @property
    def parts(self) -> list[Proxy]:
        """See `Proxy`."""
        return [OUTLINES[name] for name in self.combines] or [self]


_COMBINED: dict[str, tuple[str, ...]] = {
    "te_nas": ("te_ntk", "te_regions"),
    "dss_pp": ("dss",),
    "ntsr": ("ntkt", "sept"),
}


def _is_space(name: str) -> bool:
    try:
        resolve_space(name)
    except UserError as error:
        raise UserError(f"space of snip_norm: {str(error).removeprefix('space: ')}") from None
    return True


SpaceName = Annotated[str | None, Rule("that names a space", _is_space)]
_Positive = Annotated[int, least(1)]
_Reduce = (Literal["mean", "sum"], "mean")
_OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    **{name: {} for name in ("params", "macs", "grad_norm", "snip", "plain", "synflow")},
    "grasp": {"temperature": (Annotated[float, above(0)], 1.0)},
    "fisher": {"ref_axis": (bool, False), "broadcast": (bool, False)},
    "jacob_cov": {},
    "naswot": {"redraw": (bool, False)},
    "zen": {"repeat": (_Positive, 4), "alpha": (float, 0.01)},
    **{name: {} for name in ("te_ntk", "te_regions", "te_nas", "ntk_trace", "gradsign")},
    "knas": {"variant": (Literal["exact", "reference"], "exact")},
    "zico": {"batches": (Annotated[int, least(2)], 2)},
    "meco": {"rows": (Literal["tokens", "channels", "min"], "tokens"), "modules": (Literal["layers", "all"], "layers")},
    "length_distortion": {
        "points": (_Positive, 500),
        "repeat": (_Positive, 3),
        "norms": (Literal["identity", "keep"], "identity"),
    },
    "dss": {
        "mode": (Literal["paper", "released"], "paper"),
        "signed": (bool, False),
        "qkv": (Literal["fused", "split"], "fused"),
        "head_weight": (Annotated[float, least(0)], 0),
        "layers": (Literal["paper", "autoprox"], "paper"),
    },
    "dss_pp": {},
    "ntkt": {
        "variant": (Literal["eq13", "mean"], "eq13"),
        "params": (Literal["all", "paper"], "all"),
        "probes": (_Positive, 1),
        "output": (Literal["block", "norm"], "block"),
    },
    "sept": {"width": (Literal["embed", "qkv"], "embed")},
    "ntsr": {},
    "snip_norm": {
        "norm": (Literal["paper", "l1l1"], "paper"),
        "loss": (Literal["logits", "ce"], "logits"),
        "space": (SpaceName, None),
    },
    "auto_prox_a": {"reduce": (Literal["mean", "sum"], "sum"), "layer_reduce": _Reduce},
    "auto_prox_p": {"layer_reduce": _Reduce},
    "auto_prox_released": {"layer_reduce": _Reduce},
}
OUTLINES: dict[str, Proxy] = {
    name: Outline(
        name,
        Needs(),
        higher_is_better=True,
        deterministic=True,
        paper="",
        equation="",
        cost="",
        summary="",
        combines=_COMBINED.get(name, ()),
        options={key: default for key, (_, default) in options.items()},
        checks={key: Option.of(annotation) for key, (annotation, _) in options.items()},
    )
    for name, options in _OPTIONS.items()
}
"""The built-in proxies by name, in the order in which tables list them."""


def check_additive(name: str) -> None:
    """`UserError` with the reason where the scores of a proxy are no sums of tables."""
    one = named(name)
    if one.combines:
        raise UserError(
            f"proxy: {name!r} ranks networks among those beside them, so no network has a score of its own that could "
            f"be summed over its blocks; exact search takes {', '.join(TABLES)}"
        )
    if name not in TABLES:
        raise UserError(
            f"proxy: {name!r} is no sum over blocks under inherited gradients; exact search takes {', '.join(TABLES)}"
        )


def components(wanted: Sequence[Proxy], options: Options) -> tuple[list[Proxy], dict[str, dict[str, Any]]]:
    """The proxies to run, each once, with their options, checked: those of a rank-combined one go to its components.

    A component is scored once for all who want it, so `UserError` where they want it with different options.
    """
    _check_mapping(options)
    known = {one.name: one for wish in wanted for one in (wish, *wish.parts)}
    for name in options:
        if name not in known:
            raise unknown("options", name, known)
    parts: dict[str, Proxy] = {}
    given: dict[str, tuple[str, dict[str, Any]]] = {}  # by part: who wants it first, and how
    for wish in wanted:
        shared = wish.shared(options.get(wish.name, {}))
        for part in wish.parts:
            own, more = part.shared(options.get(part.name, {}))[part.name], shared[part.name]
            now = wish.name, {**own, **more}
            _agree(part, (part.name, {**more, **own}), now)
            _agree(part, given.setdefault(part.name, now), now)
            parts[part.name] = part
    return list(parts.values()), {name: own for name, (_, own) in given.items() if own}


def _check_mapping(options: Any) -> None:
    if not isinstance(options, Mapping) or not all(isinstance(given, Mapping) for given in options.values()):
        raise UserError(
            f"options: {options!r} is not valid; valid: a mapping of mappings, as {{dss: {{mode: released}}}}"
        )


def _agree(part: Proxy, one: tuple[str, dict[str, Any]], two: tuple[str, dict[str, Any]]) -> None:
    """Refuse two wishes (whose, options) for other options of `part`."""
    for key, default in part.options.items():
        left, right = one[1].get(key, default), two[1].get(key, default)
        if left != right:
            raise UserError(
                f"options: {one[0]} and {two[0]} want other options of {part.name}: {key}={left!r} "
                f"and {key}={right!r}; give both the same, or score them apart"
            )
