"""What is to be maximised over a space, within which bounds; and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.additive.labels import check_bounds
from lightning_tas.additive.terms import FloatArray, Total
from lightning_tas.spaces import SearchSpace


@dataclass(frozen=True)
class Problem:
    """Maximise `score` over `space` with every cost within its bounds.

    costs: whole numbers, by name. bounds: (least, greatest) by name of a cost, both inclusive, infinite or not given
    where open. `UserError` for unknown names and inverted bounds.
    """

    space: SearchSpace
    score: Total
    costs: Mapping[str, Total] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self.bounds, self.costs)


@dataclass(frozen=True)
class Solution:
    """Networks, best first (of a front: ascending by costs), and what is proven about them.

    codes (n, K), score (n,) and costs (n,) each by name are of the networks found: none where nothing is within the
    bounds. optimal: nothing better exists: no member within the bounds scores higher than these (or, of a front, is
    dominated by none of them). bound: no member within the bounds scores above it; of a front: by so much at most can a
    member exceed the score of one found that costs no more. Both are true but for float64's rounding.
    labels: partial networks that were told apart, in all steps. seconds: what it took.
    """

    codes: npt.NDArray[np.int16]
    score: FloatArray
    costs: Mapping[str, npt.NDArray[np.int64]]
    optimal: bool
    bound: float
    labels: int
    seconds: float
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.codes)
