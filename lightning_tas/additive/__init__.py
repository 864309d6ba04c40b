"""Exact optimisation and counting over sums of tables: every network of a space at once, without enumerating them."""

from lightning_tas.additive.members import Members, TooMany, count, ranges, sample
from lightning_tas.additive.paths import Conditional, Paths
from lightning_tas.additive.problem import Problem, Solution
from lightning_tas.additive.solve import best, feasible, front
from lightning_tas.additive.terms import Term, Total

__all__ = [
    "Conditional",
    "Members",
    "Paths",
    "Problem",
    "Solution",
    "Term",
    "TooMany",
    "Total",
    "best",
    "count",
    "feasible",
    "front",
    "ranges",
    "sample",
]
