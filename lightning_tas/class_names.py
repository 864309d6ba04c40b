"""Names of classes, compared wherever weights meet data: class 2 of one folder may be class 4 of another."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lightning_tas.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

POLICIES = ("compare", "ignore")
_SHOWN = 3


class OtherClasses(UserError):
    """The weights were trained on other classes than those of the data."""


def class_order(theirs: Sequence[str] | None, ours: Sequence[str] | None, what: str) -> list[int] | None:
    """Where the classes `ours` of the data are among those of the weights, `theirs`; None: in the same places.

    Names that are not known (None) are taken to be in the same order. what: the weights, as the warning that says that
    classes were mapped calls them.

    Raises:
        OtherClasses: names that only one of the two has; the message has no key in front.
    """
    if theirs is None or ours is None or list(theirs) == list(ours):
        return None
    if set(theirs) != set(ours) or len(theirs) != len(ours) or len(set(ours)) != len(ours):
        pairs = zip_longest(theirs, ours, fillvalue="(none)")
        differing = [f"class {i} is {old!r} there, {new!r} here" for i, (old, new) in enumerate(pairs) if old != new]
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise OtherClasses(
            f"{what} were trained on other classes than the data have: {'; '.join(differing[:_SHOWN])}{more}. "
            "data.class_names=ignore takes classes by their numbers"
        )
    place = {name: i for i, name in enumerate(theirs)}
    order = [place[name] for name in ours]
    moved = next(i for i, j in enumerate(order) if i != j)
    warnings.warn(
        f"{what} have the same classes in another order (class {moved} of the data, {ours[moved]!r}, is class "
        f"{order[moved]} there): they are mapped by name",
        stacklevel=3,
    )
    return order


def check_continued(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a training on other classes, or in another order, than it began with.

    Args:
        before, now: `name` of the data set and `class_names`, as in the checkpoint and as they are.
    """
    theirs, ours = before["class_names"], now["class_names"]
    if theirs == ours:
        return
    if sorted(theirs) == sorted(ours):
        number = next(i for i, (old, new) in enumerate(zip(theirs, ours, strict=True)) if old != new)
        raise UserError(
            f"resume: the checkpoint was trained on the same classes in another order: class {number} was "
            f"{theirs[number]!r} and is {ours[number]!r} now; train.from_checkpoint=CHECKPOINT begins a training with "
            "its weights, which are mapped by name"
        )
    raise UserError(
        f"resume: the checkpoint was trained on {len(theirs)} classes of data.name={before['name']} "
        f"({', '.join(theirs[:_SHOWN])}, ...); now data.name={now['name']} has {len(ours)} "
        f"({', '.join(ours[:_SHOWN])}, ...); data.class_names=ignore takes classes by their numbers"
    )


def reordered(state: Mapping[str, Tensor], order: Sequence[int] | None) -> dict[str, Tensor]:
    """The state dict with the rows of its head in this order; rows past the last named class stay where they are."""
    if order is None:
        return dict(state)
    heads = {name: value for name, value in state.items() if name in ("head.weight", "head.bias")}
    rows = [*order, *range(len(order), len(next(iter(heads.values()), ())))]
    return {**state, **{name: value[rows] for name, value in heads.items()}}
