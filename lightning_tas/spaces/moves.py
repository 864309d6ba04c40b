"""Random and extremal moves on encoded architectures: sample, mutate, cross, nearest. None of them leaves the space.

A move never proposes and rejects: it picks among the allowed rows of each table of the space's layout, those that
agree best with what is to be kept. So every move ends, whatever the predicates. All randomness comes from the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np

from lightning_tas.errors import UserError, unknown
from lightning_tas.randomness import numpy_generator
from lightning_tas.spaces.factors import Table
from lightning_tas.spaces.layout import Layout

Key = Callable[[np.ndarray], np.ndarray]

# Attempts at a child that differs from its parent before fresh samples are tried, as often.
_TRIES = 32


def combinations(tables: list[Table]) -> list[tuple[int, ...]]:
    """All allowed codes of one block, the tables' variables being positions 0..k-1."""
    width = sum(len(t.variables) for t in tables)
    found = []
    for rows in itertools.product(*(t.rows.tolist() for t in tables)):
        codes = [0] * width
        for table, row in zip(tables, rows, strict=True):
            for j, code in zip(table.variables, row, strict=True):
                codes[j] = code
        found.append(tuple(codes))
    return found


def block_choices(layout: Layout, codes: np.ndarray, stage: int) -> np.ndarray:
    """All blocks (R, block dimensions) that `stage` allows under the network's and its own choices in `codes` (C,)."""
    context = tuple(codes[layout.context[stage]].tolist())
    if (stage, context) not in layout.block_choices:
        found = combinations(layout.block_tables(stage, context))
        layout.block_choices[stage, context] = np.array(found, dtype=np.int16).reshape(len(found), len(layout.block))
    return layout.block_choices[stage, context]


def _contexts(layout: Layout, codes: np.ndarray, stage: int) -> Iterator[tuple[np.ndarray, list[Table]]]:
    """Groups of rows of `codes` (row numbers) that share a context in `stage`, with the block tables they share."""
    columns = layout.context[stage]
    if not columns or not len(codes):
        if len(codes):
            yield np.arange(len(codes)), layout.block_tables(stage, ())
        return
    unique, inverse = np.unique(codes[:, columns], axis=0, return_inverse=True)
    for g, context in enumerate(unique):
        members = np.flatnonzero(inverse.reshape(-1) == g)
        yield members, layout.block_tables(stage, tuple(context.tolist()))


def _depths(layout: Layout, codes: np.ndarray, stage: int) -> np.ndarray:
    depths: np.ndarray = layout.depth_choices[stage][codes[:, layout.depth_column[stage]]]
    return depths


def allowed(layout: Layout, codes: np.ndarray) -> np.ndarray:
    """Which rows of integer `codes` (N, C) are architectures of the space: (N,) bool."""
    sizes = np.array([len(column.choices) for column in layout.columns])
    skeleton = layout.skeleton
    ok = np.ones(len(codes), dtype=bool)
    ok &= ((codes[:, skeleton] >= 0) & (codes[:, skeleton] < sizes[skeleton])).all(axis=1)
    rows = np.flatnonzero(ok)
    good = codes[rows]
    fine = np.ones(len(rows), dtype=bool)
    for table in layout.tables:
        fine &= table.contains(good[:, list(table.variables)])
    good, rows = good[fine], rows[fine]
    ok[:] = False
    if not layout.block:
        ok[rows] = True
        return ok
    fine = np.ones(len(rows), dtype=bool)
    for s in range(layout.stages):
        slots = layout.slots(s)
        blocks = good[:, slots].reshape(len(good), layout.max_depth[s], len(layout.block))
        used = np.arange(layout.max_depth[s]) < _depths(layout, good, s)[:, None]
        limit = sizes[slots][: len(layout.block)]
        inside = ((blocks >= 0) & (blocks < limit)).all(axis=2)
        fine &= np.where(used, inside, (blocks == -1).all(axis=2)).all(axis=1)
        for members, tables in _contexts(layout, good, s):
            members = members[fine[members]]
            where, slot = np.nonzero(used[members])
            chosen = blocks[members[where], slot]
            for table in tables:
                bad = ~table.contains(chosen[:, list(table.variables)])
                fine[members[where[bad]]] = False
    ok[rows[fine]] = True
    return ok


def sample(layout: Layout, seed: int, n: int) -> np.ndarray:
    """`n` random rows (n, C); the first rows do not depend on `n`."""
    if n < 0:
        raise UserError(f"sample: n must not be negative, got {n}")
    draws = len(layout.tables) + sum(depth * len(layout.block) for depth in layout.max_depth)
    # One row of uniforms per architecture, filled row by row: a longer sample starts with the shorter one.
    uniform = numpy_generator(seed, "space.sample").random((n, draws))
    codes = np.full((n, len(layout.columns)), -1, dtype=np.int16)
    for t, table in enumerate(layout.tables):
        codes[:, list(table.variables)] = table.rows[_pick(uniform[:, t], len(table.rows))]
    used = len(layout.tables)
    for s in range(layout.stages):
        width = layout.max_depth[s] * len(layout.block)
        block = uniform[:, used : used + width].reshape(n, layout.max_depth[s], len(layout.block))
        used += width
        if not layout.block:
            continue
        filled = np.full(block.shape, -1, dtype=np.int16)
        for members, tables in _contexts(layout, codes, s):
            for t, table in enumerate(tables):
                picked = table.rows[_pick(block[members, :, t], len(table.rows))]  # (members, slots, variables)
                for j, variable in enumerate(table.variables):
                    filled[members, :, variable] = picked[..., j]
        filled[np.arange(layout.max_depth[s]) >= _depths(layout, codes, s)[:, None]] = -1
        codes[:, layout.slots(s)] = filled.reshape(n, width)
    return codes


def stratified(layout: Layout, seed: int, n: int, key: Key, pool: int = 32) -> np.ndarray:
    """`n` random rows (n, C) spread over the range of ``key(codes) -> (N,)``, e.g. parameter counts.

    Independent choices make sums pile up in the middle of their range. So `pool` x n rows are drawn, their range is cut
    into n equal intervals, and these are visited in turn, each giving one row a round while it has any.
    """
    codes = sample(layout, seed, n * pool)
    values = np.asarray(key(codes), dtype=np.float64)
    if values.shape != (len(codes),) or not np.isfinite(values).all():
        raise UserError(f"stratify: expected {len(codes)} finite numbers, got an array of shape {values.shape}")
    return codes[spread(values, n)] if n else codes


def spread(values: np.ndarray, n: int) -> np.ndarray:
    """Which `n` > 0 of finite `values` (N,) spread over their range, by the intervals of `stratified`: indices (n,)."""
    width = max((values.max() - values.min()) / n, np.finfo(np.float64).tiny)
    stratum = np.minimum(((values - values.min()) / width).astype(np.int64), n - 1)
    order = np.argsort(stratum, kind="stable")
    first = np.searchsorted(stratum[order], stratum[order])
    turn = np.arange(len(values)) - first  # the how-manieth of its interval each row is
    chosen: np.ndarray = order[np.lexsort((stratum[order], turn))[:n]]
    return chosen


def _pick(uniform: np.ndarray, count: int) -> np.ndarray:
    return np.minimum((uniform * count).astype(np.int64), count - 1)


def nearest(layout: Layout, fraction: float) -> np.ndarray:
    """The member (C,) nearest to the point at `fraction` (0 smallest, 1 largest) of every list of choices."""
    codes = np.full(len(layout.columns), -1, dtype=np.int16)
    for table in layout.tables:
        codes[list(table.variables)] = _nearest_row(table, fraction)
    for s in range(layout.stages):
        tables = layout.block_tables(s, tuple(codes[layout.context[s]].tolist()))
        block = np.zeros(len(layout.block), dtype=np.int16)
        for table in tables:
            block[list(table.variables)] = _nearest_row(table, fraction)
        depth = int(_depths(layout, codes[None], s)[0])
        start = layout.block_start[s]
        codes[start : start + depth * len(block)] = np.tile(block, depth)
    return codes


def _nearest_row(table: Table, fraction: float) -> np.ndarray:
    goal = np.floor(fraction * (np.array(table.sizes) - 1))
    row: np.ndarray = table.rows[np.abs(table.rows - goal).sum(axis=1).argmin()]
    return row


def mutate(
    layout: Layout,
    parent: np.ndarray,
    seed: int,
    network_prob: float = 0.4,
    stage_prob: float = 0.4,
    block_prob: float = 0.2,
    probs: Mapping[str, float] | None = None,
    unit: Literal["gene", "block"] = "gene",
) -> np.ndarray:
    """A mutant (C,) of `parent` that differs from it unless the space holds nothing else within reach.

    Each choice is redrawn with the probability of its scope, or of its dimension in `probs`. With ``unit="gene"`` a
    block's choices are redrawn one by one (AutoFormer: .4 embed and depth, .2 heads and MLP), with ``unit="block"`` all
    together (S3: .2 depth and embed, .4 block). A deeper stage gets random blocks at its end, a shallower one is cut.
    What predicates forbid after that is moved to the nearest allowed choices.
    """
    scopes = {"network": network_prob, "stage": stage_prob, "block": block_prob}
    rates = {c.name: scopes["network" if c.stage is None else "stage"] for c in layout.columns if c.block is None}
    rates |= {d.name: block_prob for d in layout.block}
    for name, value in (probs or {}).items():
        if name not in rates:
            raise unknown("mutate.probs", name, rates)
        rates[name] = value
    for name, value in rates.items():
        if not 0 <= value <= 1:
            raise UserError(f"mutate: the probability of {name} must be in [0, 1], got {value}")
    _check_unit(unit)
    for attempt in range(_TRIES):
        child = _mutant(layout, parent, rates, unit, numpy_generator(seed, "space.mutate", attempt))
        if not np.array_equal(child, parent):
            return child
    others = sample(layout, seed, _TRIES)
    different = np.flatnonzero((others != parent).any(axis=1))
    return others[different[0]] if len(different) else parent.copy()


def _mutant(
    layout: Layout, parent: np.ndarray, rates: Mapping[str, float], unit: str, rng: np.random.Generator
) -> np.ndarray:
    chance = np.array([rates[d.name] for d in layout.block])
    genes = len(chance) if unit == "gene" else 1

    def keep(columns: list[int]) -> np.ndarray:
        return rng.random(len(columns)) >= [rates[layout.columns[c].name] for c in columns]

    return _redrawn(layout, parent, keep, lambda stage, depth: rng.random((depth, genes)) >= chance, rng)


def redraw(layout: Layout, parent: np.ndarray, columns: np.ndarray, seed: int) -> np.ndarray:
    """`parent` (C,) with the choices in `columns` (C,) bool redrawn; it may come out as it was.

    A deeper stage gets random blocks at its end, a shallower one is cut. What predicates forbid after that is moved to
    the nearest allowed choices.
    """

    def keep_blocks(stage: int, depth: int) -> np.ndarray:
        return ~columns[layout.slots(stage)].reshape(layout.max_depth[stage], len(layout.block))[:depth]

    rng = numpy_generator(seed, "space.redraw")
    return _redrawn(layout, parent, lambda skeleton: ~columns[skeleton], keep_blocks, rng)


def _redrawn(
    layout: Layout,
    parent: np.ndarray,
    keep_of: Callable[[list[int]], np.ndarray],
    keep_blocks: Callable[[int, int], np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    """`parent` with what is not kept redrawn: `keep_of` skeleton columns, `keep_blocks` (depth, choices) of a stage."""
    child = parent.copy()
    for table in layout.tables:
        columns = list(table.variables)
        keep = keep_of(columns)
        if not keep.all():  # only the parent's own row agrees with all of itself
            child[columns] = _agreeing(table.rows, parent[None, columns][None], keep[None], rng)[0]
    for s in range(layout.stages if layout.block else 0):
        old, new = (int(_depths(layout, codes[None], s)[0]) for codes in (parent, child))
        slots = child[layout.slots(s)].reshape(layout.max_depth[s], len(layout.block))
        kept = keep_blocks(s, new)
        kept[old:] = False
        for table in layout.block_tables(s, tuple(child[layout.context[s]].tolist())):
            js = list(table.variables)
            slots[:new, js] = _agreeing(table.rows, slots[:new, None, js], kept[:, js], rng)
        slots[new:] = -1
        child[layout.slots(s)] = slots.reshape(-1)
    return child


def crossover(
    layout: Layout, a: np.ndarray, b: np.ndarray, seed: int, unit: Literal["gene", "block"] = "gene"
) -> np.ndarray:
    """A child (C,) that takes every choice from one of its parents, also when their depths differ.

    ``unit="gene"``: each choice from either (AutoFormer); ``unit="block"``: a stage's own choices from one parent and
    whole blocks from one parent (S3). A block that only one parent has comes from that one. Where predicates forbid
    what was drawn, the nearest mixture is taken; only blocks that fit in no mixture get new choices.
    """
    _check_unit(unit)
    rng = numpy_generator(seed, "space.crossover")
    child = np.full_like(a, -1)
    pair = np.stack([a, b])
    donor = rng.integers(0, 2, size=layout.stages)
    for table in layout.tables:
        columns = list(table.variables)
        options = pair[:, columns]
        mixtures = table.rows[(table.rows[:, None] == options).any(axis=1).all(axis=1)]  # both parents are among them
        if unit == "block":
            stages = [layout.columns[c].stage for c in columns]
            picks = [int(rng.integers(0, 2)) if s is None else int(donor[s]) for s in stages]
            options = options[picks, range(len(columns))][None]
        child[columns] = _agreeing(mixtures, options[None], np.ones((1, len(columns)), dtype=bool), rng)[0]
    for s in range(layout.stages):
        depth = int(_depths(layout, child[None], s)[0])
        blocks = pair[:, layout.slots(s)].reshape(2, layout.max_depth[s], len(layout.block))
        options = blocks[:, :depth].transpose(1, 0, 2)  # (depth, parents, choices), -1 where a parent has no block
        if unit == "block":
            either = np.arange(depth) < _depths(layout, pair, s).min()
            deeper = int(_depths(layout, pair, s).argmax())
            chosen = np.where(either, rng.integers(0, 2, size=depth), deeper)
            options = options[np.arange(depth), chosen][:, None]
        slots = np.full(blocks.shape[1:], -1, dtype=a.dtype)
        for table in layout.block_tables(s, tuple(child[layout.context[s]].tolist())):
            js = list(table.variables)
            slots[:depth, js] = _agreeing(table.rows, options[:, :, js], np.ones((depth, len(js)), dtype=bool), rng)
        child[layout.slots(s)] = slots.reshape(-1)
    return child


def _agreeing(rows: np.ndarray, options: np.ndarray, keep: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """For each of S slots a random one (S, k) of the `rows` (R, k) that agree best with the slot's options.

    `options` (S, M, k) are M proposals per slot; a row's agreement is the number of kept positions, `keep` (S, k), at
    which it equals some proposal.
    """
    equal = np.zeros((len(options), *rows.shape), dtype=bool)
    for m in range(options.shape[1]):
        equal |= rows == options[:, m, None]
    agreement = (equal & keep[:, None]).sum(axis=2)
    # Noise below one breaks ties, uniformly.
    picked: np.ndarray = rows[(agreement + rng.random(agreement.shape)).argmax(axis=1)]
    return picked


def _check_unit(unit: str) -> None:
    if unit not in ("gene", "block"):
        raise unknown("unit", unit, ("gene", "block"))
