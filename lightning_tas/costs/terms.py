"""Parameters and multiply-accumulates of a space's networks as sums of tables, for exact searches and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tas.additive.derive import derive_terms
from lightning_tas.additive.terms import Total
from lightning_tas.costs import formula
from lightning_tas.costs.options import CostOptions

if TYPE_CHECKING:
    from lightning_tas.spaces import SearchSpace


def cost_terms(space: SearchSpace, options: CostOptions | None = None) -> dict[str, Total]:
    """ "params" and "macs" of `space` as exact sums of tables, equal to ``cost(codes, space)`` under `options`.

    options: as `cost_options` makes them of a network or of keywords; the defaults by default. `UserError` for a
    family without a formula, and for one whose costs are no sum over blocks and neighbouring stages.
    """
    chosen = options or CostOptions()
    many = formula(space.family).many
    return {
        "params": derive_terms(space, lambda codes: many(space, codes, chosen).params, "params"),
        "macs": derive_terms(space, lambda codes: many(space, codes, chosen).macs, "macs"),
    }
