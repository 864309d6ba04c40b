"""Proxies by name, with what a user must know before running one.

A proxy is a factory: called with a `Probe` and its options it says which shared passes it wants to watch and returns a
callable that gives the `Measured` numbers. So all proxies of one network look at the same forward and backward passes.
Rank-combined proxies have no factory but components and a rule for a whole comparison set. Further proxies register by
the decorator or by an entry point of the group "lightning_tas.proxies" (a module to import).

The annotation of an option says what is valid: ``repeat: Annotated[int, least(1)] = 4``. It is checked before any work.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown
from lightning_tas.plugins import resolve

if TYPE_CHECKING:
    from lightning_tas.proxies.probe import Measured, Probe

ENTRY_POINTS = "lightning_tas.proxies"

FloatArray = npt.NDArray[np.float64]
Factory = Callable[..., "Callable[[], Measured]"]
Combine = Callable[[Mapping[str, FloatArray]], FloatArray]
Changes = Callable[[Mapping[str, Any]], Mapping[str, Any]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """What the value of an option must be besides its type: in words that follow the type's, and as a test.

    `choices` are all valid values where they can be listed. The test may also raise a UserError of its own.
    """

    words: str
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()


def least(number: float) -> Rule:
    """The rule of a number that has a least value."""
    return Rule(f"of at least {number:g}", lambda value: bool(value >= number))


def above(number: float) -> Rule:
    """The rule of a number greater than another."""
    return Rule(f"above {number:g}", lambda value: bool(value > number))


def one_of(choices: Iterable[Any]) -> Rule:
    """The rule of a value that is among `choices`."""
    listed = tuple(choices)
    return Rule("", lambda value: value in listed, listed)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


@dataclass(frozen=True)
class Option:
    """What an annotation says of an option: its types (empty: nothing is known, all is valid) and further rules."""

    kinds: tuple[type, ...] = ()
    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> Option:
        """Read a type, a union of types or choices (Literal), with rules or not (Annotated)."""
        rules: tuple[Rule, ...] = ()
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            rules = tuple(rule for rule in more if isinstance(rule, Rule))
        if get_origin(annotation) is Literal:
            return cls(tuple({type(choice) for choice in get_args(annotation)}), (one_of(get_args(annotation)), *rules))
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        return cls(kinds if all(kind in _KINDS for kind in kinds) else (), rules)

    def settled(self, key: str, value: Any) -> Any:
        """`value`, of NumPy's types as a plain one; `UserError` naming `key` where it is not valid."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None and NoneType in self.kinds:
            return None
        if self._fits(value) and all(rule.holds(value) for rule in self.rules):
            return value
        choices = [choice for rule in self.rules for choice in rule.choices]
        if choices:
            raise unknown(key, value, choices)
        types = " or ".join(_KINDS[kind] for kind in self.kinds if kind is not NoneType)
        words = " ".join(
            [types, *(rule.words for rule in self.rules), *(["or null"] if NoneType in self.kinds else [])]
        )
        raise UserError(f"{key}: {value!r} is not valid; valid: {words}")

    def _fits(self, value: Any) -> bool:
        if not self.kinds:
            return True
        if isinstance(value, bool):  # of Python's whole numbers, not of ours
            return bool in self.kinds
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return isinstance(value, self.kinds) or (isinstance(value, int) and float in self.kinds)


@dataclass(frozen=True)
class Needs:
    """What a proxy must be given and what it makes the network do.

    images: how many it needs at least, a number or a function of all its options.
    """

    data: bool = False
    labels: bool = False
    backward: bool = False
    per_sample: bool = False
    images: int | Callable[[Mapping[str, Any]], int] = 1


@dataclass(frozen=True)
class Proxy:
    """A registered proxy and its metadata.

    higher_is_better: of the formula as published (scores are flipped where it is False). deterministic: no randomness
    besides the network's weights and the batch. cost: in forward and backward passes. combines: names of the proxies
    whose raw quantities (`Score.extras`, as "proxy.quantity") a rank-combined one ranks. unsupported: family of
    architectures to the reason why the proxy says nothing there. light: it looks at one image or none and changes
    nothing of the process, not even for a while, so networks may be scored by it side by side in threads. changes: what
    options make of all this (fields of `Needs`, or `deterministic`), see `under`. layers: what of the network it looks
    at, by roles (`roles.find_layers`). dtype: what passes run in; sums are in float64.
    """

    name: str
    needs: Needs
    higher_is_better: bool
    deterministic: bool
    paper: str
    equation: str
    cost: str
    summary: str
    combines: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    light: bool = False
    changes: Changes | None = field(default=None, repr=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    factory: Factory | None = field(default=None, repr=False, compare=False)
    combine: Combine | None = field(default=None, repr=False, compare=False)
    checks: Mapping[str, Option] = field(default_factory=dict, repr=False, compare=False)
    layers: str = "weight matrices"
    dtype: str = "float32"

    @property
    def parts(self) -> list[Proxy]:
        """The proxies to run for this one: its components, or itself."""
        return [proxy(name) for name in self.combines] or [self]

    def under(self, options: Mapping[str, Any]) -> Proxy:
        """This proxy with the metadata that hold under `options`; those not given have their defaults."""
        if self.changes is None:
            return self
        changed = dict(self.changes({**self.options, **options}))
        deterministic = bool(changed.pop("deterministic", self.deterministic))
        return replace(self, needs=replace(self.needs, **changed), deterministic=deterministic)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """`UserError` for an option that this proxy does not have, or a value that cannot be meant."""
        self.shared(options)

    def shared(self, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """`options`, checked, by proxy to run: those of a rank-combined one go to every component that has them."""
        valid = sorted({key for part in self.parts for key in part.options})
        for key in options:
            if key not in valid:
                raise unknown(f"option of proxy {self.name!r}", key, valid)
        return {part.name: part._settled(options) for part in self.parts}

    def _settled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in options.items() if key in self.options}
        return {key: self.checks[key].settled(f"{key} of {self.name}", value) for key, value in own.items()}

    def check_images(self, number: int, options: Mapping[str, Any], key: str) -> None:
        """`UserError` naming `key` where a batch of so many images cannot do, whatever the network is."""
        wanted = self.needs.images
        enough = wanted if isinstance(wanted, int) else wanted({**self.options, **options})
        if number < enough:
            given = "".join(f" with {name}={value!r}" for name, value in options.items())
            raise UserError(
                f"{key}: proxy {self.name!r}{given} needs at least {enough} images, and its batch has {number}"
            )

    def make(self, probe: Probe, **options: Any) -> Callable[[], Measured]:
        """Announce what must be watched; the result gives the numbers."""
        assert self.factory is not None, f"{self.name} is combined from {self.combines}"
        own = self.shared(options)[self.name]
        self.check_images(len(probe.images), own, "images")
        return self.factory(probe, **own)


_PROXIES: dict[str, Proxy] = {}
# One file per idea, in the order in which tables list them.
_MODULES = [
    *("params_macs", "grad_norm", "snip", "plain", "synflow", "grasp", "fisher", "jacob_cov", "naswot", "zen"),
    *("te_nas", "ntk_trace", "gradsign", "knas", "zico", "meco", "length_distortion", "dss", "dss_pp", "ntkt"),
    *("sept", "ntsr", "snip_norm", "auto_prox"),
]


def register(
    name: str,
    *,
    needs: Needs | None = None,
    higher_is_better: bool = True,
    deterministic: bool = True,
    paper: str,
    equation: str,
    cost: str,
    combines: Sequence[str] = (),
    unsupported: Mapping[str, str] | None = None,
    function: bool = False,
    light: bool = False,
    changes: Changes | None = None,
    layers: str = "weight matrices",
    dtype: str = "float32",
) -> Callable[[F], F]:
    """Decorator of a factory, of a plain ``function(probe, **options)``, or (with `combines`) of a `Combine` rule."""

    def add(made: F) -> F:
        if name in _PROXIES:
            raise UserError(f"proxy: {name!r} is registered already")
        signature = inspect.signature(made).parameters.values()
        options = {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}
        annotations = _annotations(made)
        checks = {name: Option.of(annotations.get(name, Any)) for name in options}
        factory: Factory | None = None
        if not combines:
            factory = functools.partial(functools.partial, made) if function else made
        _PROXIES[name] = Proxy(
            name,
            needs or Needs(),
            higher_is_better,
            deterministic,
            paper,
            equation,
            cost,
            (inspect.getdoc(made) or "").split("\n")[0],
            tuple(combines),
            dict(unsupported or {}),
            light,
            changes,
            options,
            factory,
            made if combines else None,
            checks,
            layers,
            dtype,
        )
        return made

    return add


def _annotations(made: Callable[..., Any]) -> dict[str, Any]:
    """Annotations by parameter; names that only type checkers know stand for anything."""
    if not inspect.isfunction(made):  # a class or a partial: nothing is known of its options
        return {}
    known = {**vars(builtins), **made.__globals__}
    return get_type_hints(made, localns=defaultdict(lambda: Any, known), include_extras=True)


@functools.cache
def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"lightning_tas.proxies.{module}")
    for point in entry_points(group=ENTRY_POINTS):
        point.load()


def proxies() -> dict[str, Proxy]:
    """All proxies by name, with their metadata, in the order in which tables list them."""
    _load()
    functions = _functions()

    def place(one: Proxy) -> int:
        module = str(getattr(functions[one.name], "__module__", None)).rpartition(".")[2]
        return _MODULES.index(module) if module in _MODULES else len(_MODULES)

    # Modules import one another, so the order of registration says nothing.
    return {one.name: one for one in sorted(_PROXIES.values(), key=place)}


def _functions() -> dict[str, Any]:
    """What was decorated, by the names of the proxies."""
    _load()
    found = {}
    for name, one in _PROXIES.items():
        made: Any = one.combine or one.factory
        while isinstance(made, functools.partial):
            made = made.args[0]
        found[name] = made
    return found


def proxy(name: str) -> Proxy:
    """The proxy called `name`, or that of "MODULE:NAME", see `plugins.resolve`; `UserError` with the nearest one."""
    if isinstance(name, str) and ":" in name:
        name = resolve("proxy", name, _functions, "lightning_tas.proxies.register")
    known = proxies()
    if not isinstance(name, str) or name not in known:
        raise unknown("proxy", name, known)
    return known[name]


def known_names() -> list[str]:
    """Names of all proxies, as far as they are known without importing torch."""
    from lightning_tas.proxies.options import OUTLINES

    return list(dict.fromkeys([*OUTLINES, *_PROXIES]))


def named(name: str) -> Proxy:
    """`proxy(name)` as far as names and options go: built-in ones without formulas, which need torch."""
    from lightning_tas.proxies.options import OUTLINES

    if not isinstance(name, str):
        raise unknown("proxy", name, known_names())
    for known in (_PROXIES, OUTLINES):
        if name in known:
            return known[name]
    if ":" in name or entry_points(group=ENTRY_POINTS):
        return proxy(name)
    raise unknown("proxy", name, known_names())


def chosen(names: str | Sequence[str], find: Callable[[str], Proxy] = proxy) -> list[Proxy]:
    """The proxies that `names` means: "all", one name, or several; each once, in the order given.

    find: `proxy`, or `named` where formulas are not needed.
    """
    if isinstance(names, str) and names == "all":
        return [find(name) for name in (proxies() if find is proxy else known_names())]
    valid = f"valid: all, a name (an own one as MODULE:NAME), or a list of names: {', '.join(known_names())}"
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise UserError(f"proxies: {names!r} is not valid; {valid}")
    listed = [find(name) for name in ([names] if isinstance(names, str) else names)]
    if not listed:
        raise UserError(f"proxies: none are named; {valid}")
    return list({one.name: one for one in listed}.values())
