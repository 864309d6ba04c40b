"""Distribute head counts or MLP ratios over the layers of every isomer class at once.

An isomer class fixes how much is to be distributed, not where: either the *sum* of the choices over the layers (the
paper's definition) or the *count* of layers that take each choice (the released code). Inside a class the score is a
sum over layers, so its best member is found exactly by a dynamic programme over layers x what has been spent; one
forward pass serves every class of every depth, because depth L is the state after L layers.

Shapes: E embedding widths, L layers, C choices (ascending), K classes. Gains are (E, L, C): the score that a layer
contributes with each choice. Allocations are int8 (E, K, L): the index of the choice of every layer.

Rules: ``dp`` is the optimum; ``greedy`` is Algorithm 1 of the PreNAS paper (give the next unit to the layer with the
largest gain; optimal for two choices, or when no layer's gains increase); ``released`` is the published code (from the
largest choice down, the best layers that are still free; counts only).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tas.errors import UserError, unknown

FloatArray = npt.NDArray[np.float64]
ChoiceArray = npt.NDArray[np.int8]
StateArray = npt.NDArray[np.int64]

RULES = ("dp", "greedy", "released")
CLASSES = ("sums", "counts")
MAX_STATES = 4_000_000


def units(values: Sequence[float]) -> tuple[int, ...]:
    """The choices as whole numbers above the smallest, in their greatest common step: (3, 3.5, 4) -> (0, 1, 2)."""
    exact = [Fraction(str(v)) for v in values]
    scale = math.lcm(*(v.denominator for v in exact))
    offsets = [int((v - exact[0]) * scale) for v in exact]
    step = math.gcd(*offsets) or 1
    return tuple(o // step for o in offsets)


@dataclass(frozen=True)
class States:
    """What a partial allocation has spent, as one integer: choice c adds `shift[c]`; there are `number` states."""

    shift: tuple[int, ...]
    number: int

    @classmethod
    def build(cls, values: Sequence[float], layers: int, classes: str) -> States:
        """The states of `classes` ("sums" or "counts") for choices `values` over at most `layers` layers."""
        if classes == "sums":
            shift = units(values)
            return cls(shift, layers * shift[-1] + 1)
        # Counts of all choices but the smallest, as digits to the base layers + 1.
        base = layers + 1
        number = base ** (len(values) - 1)
        if number > MAX_STATES:
            raise UserError(
                f"classes: 'counts' of {len(values)} choices over {layers} layers are {number:,} states, "
                f"more than {MAX_STATES:,}; use classes='sums'"
            )
        return cls((0, *(base ** (c - 1) for c in range(1, len(values)))), number)


def count_vectors(layers: int, choices: int, skip_unused_middle: bool = False) -> StateArray:
    """(K, C): every way to write `layers` as a sum of C counts; optionally only those whose middle counts are >= 1.

    The released loop draws strictly increasing split points, so it never visits a class in which a choice between the
    smallest and the largest is unused.
    """
    rows = np.zeros((1, 0), dtype=np.int64)
    for _ in range(choices - 1):
        left = layers - rows.sum(axis=1)
        rows = np.concatenate(
            [
                np.column_stack([np.repeat(row[None], room + 1, 0), np.arange(room + 1)])
                for row, room in zip(rows, left, strict=True)
            ]
        )
    rows = np.column_stack([rows, layers - rows.sum(axis=1)])
    if skip_unused_middle:
        rows = rows[(rows[:, 1:-1] >= 1).all(axis=1)]
    return rows


def check_rule(values: Sequence[float], rule: str, classes: str) -> None:
    """UserError when `rule` is unknown or cannot distribute the choices `values` within `classes`."""
    if rule not in RULES:
        raise unknown("allocation", rule, RULES)
    if classes not in CLASSES:
        raise unknown("classes", classes, CLASSES)
    if len(values) < 3:
        return  # one step only: sums and counts are the same
    if rule == "released" and classes == "sums":
        raise UserError("allocation: 'released' distributes counts of choices; use classes='counts'")
    even = len({b - a for a, b in pairwise(units(values))}) == 1
    if rule == "greedy" and (classes == "counts" or not even):
        raise UserError(
            "allocation: 'greedy' distributes a sum in equal steps; it needs classes='sums' and evenly spaced "
            f"choices, got classes={classes!r} and {list(values)}; use 'dp'"
        )


class Allocator:
    """Allocations of one dimension (heads or MLP ratios) for all depths, see the module for shapes and rules."""

    def __init__(
        self,
        gains: FloatArray,
        values: Sequence[float],
        rule: str = "dp",
        classes: str = "sums",
        skip_unused_middle: bool = False,
    ) -> None:
        self.gains = np.ascontiguousarray(gains, dtype=np.float64)
        self.values = tuple(values)
        self.rule, self.classes, self.skip_unused_middle = rule, classes, skip_unused_middle
        self.layers = gains.shape[1]
        check_rule(self.values, rule, classes)
        self.states = States.build(values, self.layers, classes)
        self._decisions = self._forward() if rule == "dp" else None

    def allocate(self, depth: int) -> ChoiceArray:
        """The chosen allocation of every class of networks with `depth` layers: int8 (E, K, depth)."""
        if not 1 <= depth <= self.layers:
            raise ValueError(f"depth {depth} is not in 1..{self.layers}")
        if self.rule == "released":
            return self._released(depth)
        if self.rule == "greedy":
            return self._greedy(depth)
        return self._backtrack(self.class_states(depth), depth)

    def class_states(self, depth: int) -> StateArray:
        """The states (K,) that are classes of `depth` layers."""
        shift = np.asarray(self.states.shift, dtype=np.int64)
        if self.classes == "counts":
            return count_vectors(depth, len(self.values), self.skip_unused_middle) @ shift
        reachable = np.zeros(self.states.number, dtype=bool)
        reachable[0] = True
        for _ in range(depth):
            reachable = np.logical_or.reduce([_shifted(reachable[None], s, False)[0] for s in self.states.shift])
        return np.flatnonzero(reachable)

    def _forward(self) -> npt.NDArray[np.int8]:
        """(L, E, S): the choice of layer l on the best way to state s after layers 0..l."""
        embeds = self.gains.shape[0]
        best = np.full((embeds, self.states.number), -np.inf)
        best[:, 0] = 0.0
        decisions = np.empty((self.layers, embeds, self.states.number), dtype=np.int8)
        for layer in range(self.layers):
            options = np.stack(
                [
                    _shifted(best, shift, -np.inf) + self.gains[:, layer, c, None]
                    for c, shift in enumerate(self.states.shift)
                ]
            )  # (C, E, S)
            decisions[layer] = options.argmax(axis=0)
            best = options.max(axis=0)
        return decisions

    def _backtrack(self, states: StateArray, depth: int) -> ChoiceArray:
        assert self._decisions is not None
        embeds = self.gains.shape[0]
        shift = np.asarray(self.states.shift, dtype=np.int64)
        at = np.broadcast_to(states, (embeds, len(states))).copy()
        rows = np.arange(embeds)[:, None]
        out = np.empty((embeds, len(states), depth), dtype=np.int8)
        for layer in reversed(range(depth)):
            out[:, :, layer] = self._decisions[layer][rows, at]
            at -= shift[out[:, :, layer]]
        assert not at.any(), "a class was not reachable"
        return out

    def _greedy(self, depth: int) -> ChoiceArray:
        """Algorithm 1; the classes of one depth are the successive states of one greedy run."""
        gains = self.gains[:, :depth]
        embeds, _, choices = gains.shape
        steps = np.concatenate([np.diff(gains, axis=2), np.full((embeds, depth, 1), -np.inf)], axis=2)
        current = np.zeros((embeds, depth), dtype=np.int8)
        out = [current.copy()]
        rows = np.arange(embeds)
        for _ in range(depth * (choices - 1)):
            step = np.take_along_axis(steps, current[:, :, None].astype(np.intp), axis=2)[:, :, 0]
            current[rows, step.argmax(axis=1)] += 1
            out.append(current.copy())
        return np.stack(out, axis=1)

    def _released(self, depth: int) -> ChoiceArray:
        """Per choice from the largest down: the layers that are still free and whose step to that choice scores best.

        Published code ranks by the scores at the largest embedding width, whatever the width of the candidate.
        """
        steps = np.diff(self.gains[-1, :depth], axis=1)  # (depth, C - 1)
        counts = count_vectors(depth, len(self.values), self.skip_unused_middle)
        chosen = np.zeros((len(counts), depth), dtype=np.int8)
        for c in range(len(self.values) - 1, 0, -1):
            score = np.where(chosen > 0, -np.inf, steps[:, c - 1])
            order = np.argsort(-score, axis=1, kind="stable")
            rank = np.argsort(order, axis=1, kind="stable")
            chosen[(rank < counts[:, c, None]) & (chosen == 0)] = c
        return np.broadcast_to(chosen, (self.gains.shape[0], *chosen.shape)).copy()


def _shifted(array: npt.NDArray[Any], shift: int, fill: float | bool) -> npt.NDArray[Any]:
    """`array` (..., S) moved `shift` places up its last axis, `fill` coming in."""
    if shift == 0:
        return array
    out = np.full_like(array, fill)
    if shift < array.shape[-1]:
        out[..., shift:] = array[..., :-shift]
    return out
