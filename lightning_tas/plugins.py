"""Code of users, named as MODULE:NAME: imported only where the command line asks for it, used only where registered.

Recipes and run folders are passed on, and importing a module runs it. So what a file names is imported only if the
command line names it too, or says ``trust=true``. A caller from Python has chosen what runs, and is not asked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_tas.errors import UserError, nearest


@dataclass
class _Asked:
    """What the command line in hand asks for."""

    trust: bool = False
    names: set[str] = field(default_factory=set)
    origin: str = "a file"
    used: bool = False  # whether anything was imported by its name


_asked: _Asked | None = None  # None: called from Python


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Inside, nothing is imported by name but what `allow` says."""
    global _asked
    before, _asked = _asked, _Asked()
    try:
        yield
    finally:
        _asked = before


def allow(settings: Mapping[str, Any], origin: str) -> None:
    """Take in the settings of a command line, by key; `origin`: the file that the other settings come from."""
    if _asked is None:
        return
    _asked.origin = origin or _asked.origin
    _asked.trust = _asked.trust or settings.get("trust") is True
    left = list(settings.values())
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, str):
            _asked.names.add(one)


def trust_argument() -> str:
    """`" trust=true"` where a command that repeats this one from its files would need it, else nothing."""
    return " trust=true" if _asked is not None and _asked.used else ""


def check_asked(key: str, name: str) -> None:
    """Refuse the MODULE:NAME of a file that the command line does not ask for, before anything of it runs.

    Raises:
        UserError: says which code it is, and how to allow it.
    """
    if _asked is None or _asked.trust or name in _asked.names:
        return
    module = name.partition(":")[0]
    raise UserError(
        f"{key}: {name!r} is code that {_asked.origin} names: module {module!r}{_where(module)} would be imported and "
        "run; if you trust it, say trust=true on the command line, or name it there"
    )


def resolve(key: str, name: str, registered: Callable[[], Mapping[str, object]], decorator: str) -> str:
    """Import MODULE of ``name="MODULE:NAME"``; return the name under which its NAME is registered.

    NAME is a registered object's own name in the module, or the name that it is registered by.

    Args:
        key: what the user gave it as, for messages.
        registered: gives all objects of the kind by their registered names, asked once the module is imported.
        decorator: what registers one, for messages.

    Raises:
        UserError: see `check_asked`; the module cannot be imported; what is named is not registered.
    """
    check_asked(key, name)
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the code of a user raises: a script ends itself
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UserError(f"{key}: {name!r} cannot be imported: {kind}{error}") from error
    if _asked is not None:
        _asked.used = True
    known = dict(registered())
    made = getattr(imported, attribute, None)
    own = [one for one, object in known.items() if object is made or _belongs(object, module)]
    for one in own:
        if known[one] is made or one == attribute:
            return one
    match = nearest(attribute, own or known)
    raise UserError(
        f"{key}: {name!r} is not registered; decorate it with {decorator}(NAME); registered in {module!r}: "
        f"{', '.join(own) or '(none)'}" + (f". Did you mean {match!r}?" if match else "")
    )


def _belongs(made: object, module: str) -> bool:
    """Whether an object was made in a module, or in one inside it."""
    return f"{getattr(made, '__module__', '')}.".startswith(f"{module}.")


def _where(module: str) -> str:
    """Where a module lies, as far as that is told without importing the packages around it."""
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError, AttributeError):
        return ""
    return f" ({found.origin})" if found is not None and found.origin is not None else ""
