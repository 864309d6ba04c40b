"""Which architectures exist: dimensions and predicates as values, and the published spaces by name."""

from lightning_tas.spaces.autoformer import (
    autoformer_base,
    autoformer_base_paper,
    autoformer_small,
    autoformer_tiny,
)
from lightning_tas.spaces.autoprox import autoprox_autoformer
from lightning_tas.spaces.dimension import Column, Dimension
from lightning_tas.spaces.pit import autoprox_pit, pit_s, pit_ti, pit_xs
from lightning_tas.spaces.plain import isotropic
from lightning_tas.spaces.predicates import Predicate, register_predicate
from lightning_tas.spaces.registry import register, resolve_space, space_names
from lightning_tas.spaces.searchspace import SearchSpace

#: The public name of `resolve_space`, as ``tas.space``.
space = resolve_space

__all__ = [
    "Column",
    "Dimension",
    "Predicate",
    "SearchSpace",
    "autoformer_base",
    "autoformer_base_paper",
    "autoformer_small",
    "autoformer_tiny",
    "autoprox_autoformer",
    "autoprox_pit",
    "isotropic",
    "pit_s",
    "pit_ti",
    "pit_xs",
    "register",
    "register_predicate",
    "resolve_space",
    "space",
    "space_names",
]
