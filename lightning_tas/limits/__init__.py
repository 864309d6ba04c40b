"""Limits on what a network may cost, and the part of a space that lies within them.

`Limits` is the value: a lower and an upper bound, both inclusive and either open, for any of parameters,
multiply-accumulates, latency and activations. `Region` is a space under limits.
"""

from lightning_tas.limits.bounds import SUFFIXES, UNITS, Bounds, Limits, span
from lightning_tas.limits.region import Additive, Quantity, Region, Scaled

__all__ = ["SUFFIXES", "UNITS", "Additive", "Bounds", "Limits", "Quantity", "Region", "Scaled", "span"]
