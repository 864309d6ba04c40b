"""Proxies by name, with what a user must know before running one.

A proxy is a factory: called with a `Probe` and its options it says which shared passes it wants to watch and returns a
callable that gives the `Measured` numbers. So all proxies of one network look at the same forward and backward passes.
Rank-combined proxies have no factory but components and a rule for a whole comparison set. Further proxies register by
the decorator or by an entry point of the group "lightning_tas.proxies" (a module to import).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown

if TYPE_CHECKING:
    from lightning_tas.proxies.probe import Measured, Probe

FloatArray = npt.NDArray[np.float64]
Factory = Callable[..., "Callable[[], Measured]"]
Combine = Callable[[Mapping[str, FloatArray]], FloatArray]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Needs:
    """What a proxy must be given and what it makes the network do."""

    data: bool = False
    labels: bool = False
    backward: bool = False
    per_sample: bool = False


@dataclass(frozen=True)
class Proxy:
    """A registered proxy and its metadata.

    higher_is_better: of the formula as published (scores are flipped where it is False). deterministic: no randomness
    besides the network's weights and the batch. cost: in forward and backward passes. combines: names of the proxies
    whose raw quantities (`Score.extras`, as "proxy.quantity") a rank-combined one ranks. unsupported: family of
    architectures to the reason why the proxy says nothing there. light: it looks at one image or none and changes
    nothing of the process, not even for a while, so networks may be scored by it side by side in threads.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    factory: Factory | None = field(default=None, repr=False, compare=False)
    combine: Combine | None = field(default=None, repr=False, compare=False)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """`UserError` for an option that this proxy does not have."""
        for key in options:
            if key not in self.options:
                raise unknown(f"option of proxy {self.name!r}", key, sorted(self.options))

    def make(self, probe: Probe, **options: Any) -> Callable[[], Measured]:
        """Announce what must be watched; the result gives the numbers."""
        assert self.factory is not None, f"{self.name} is combined from {self.combines}"
        self.check_options(options)
        return self.factory(probe, **options)


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
) -> Callable[[F], F]:
    """Decorator of a factory, of a plain ``function(probe, **options)``, or (with `combines`) of a `Combine` rule."""

    def add(made: F) -> F:
        if name in _PROXIES:
            raise UserError(f"proxy: {name!r} is registered already")
        signature = inspect.signature(made).parameters.values()
        options = {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}
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
            options,
            factory,
            made if combines else None,
        )
        return made

    return add


@functools.cache
def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"lightning_tas.proxies.{module}")
    for point in entry_points(group="lightning_tas.proxies"):
        point.load()


def proxies() -> dict[str, Proxy]:
    """All proxies by name, with their metadata, in the order in which tables list them."""
    _load()

    def place(one: Proxy) -> int:
        made = one.combine or one.factory
        while isinstance(made, functools.partial):
            made = made.args[0]
        module = str(getattr(made, "__module__", None)).rpartition(".")[2]
        return _MODULES.index(module) if module in _MODULES else len(_MODULES)

    # Modules import one another, so the order of registration says nothing.
    return {one.name: one for one in sorted(_PROXIES.values(), key=place)}


def proxy(name: str) -> Proxy:
    """The proxy called `name`; `UserError` with the nearest one if there is none."""
    known = proxies()
    if name not in known:
        raise unknown("proxy", name, known)
    return known[name]


def chosen(names: str | Sequence[str]) -> list[Proxy]:
    """The proxies that `names` means: "all", one name, or several; each once, in the order given."""
    if names == "all":
        return list(proxies().values())
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise UserError(f"proxies: none are named; valid: all, {', '.join(proxies())}")
    return [proxy(name) for name in dict.fromkeys(listed)]
