"""Public names: importing any module shadows none of them, and the core stays free of the shell's libraries."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import lightning_tas as tas

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("lightning", "pytorch_lightning", "hydra", "omegaconf", "wandb", "deepspeed")
CORE = (
    "architecture", "spaces", "supernets", "costs", "proxies", "search", "samplers", "evaluator", "additive", "limits",
    "latency", "activations", "population", "racing", "search.exact", "search.scorers", "search.strategy",
)  # fmt: skip
CALLABLE = {"proxies"}
"""Packages that are also the public function of their name."""


def every_module() -> list[str]:
    names = []
    for top, prefix in (("lightning_tas", "lightning_tas."), ("callbacks", "lightning_tas.callbacks.")):
        for module in pkgutil.walk_packages([str(ROOT / top)], prefix):
            names.append(module.name)
    return [name for name in names if not name.endswith("__main__")]


def test_every_module_imports_and_no_public_name_is_shadowed() -> None:
    for name in every_module():
        importlib.import_module(name)
    for name in tas.__all__:
        value = getattr(tas, name)
        shadows = isinstance(value, types.ModuleType) and name not in CALLABLE
        assert not shadows, f"the module lightning_tas.{name} shadows the public {name}"
        if name != "__version__":
            assert callable(value) and inspect.getdoc(value), f"{name} needs a docstring"


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {name.removeprefix("lightning_tas.") for name in every_module()}
    assert modules & set(tas.__all__) == CALLABLE
    assert list(tas.proxies()) == list(tas.proxies.proxies())
    assert set(tas._HOME) <= set(tas.__all__) <= set(dir(tas))


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'spice'"):
        _ = tas.spice


@pytest.mark.slow
def test_the_core_works_without_the_shell() -> None:
    """None of Lightning, Hydra, W&B, DeepSpeed is needed (timm tries W&B on its own account, and does without)."""
    imports = "\n".join(f"import lightning_tas.{name}" for name in CORE)  # the traceback names the one that fails
    code = f"import sys; sys.modules.update(dict.fromkeys({SHELL!r}))\n{imports}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
