"""Orders cover what they promise at any world size; pure functions of the epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from lightning_tas.data.sampling import PADDING, EvalOrder, TrainOrder
from lightning_tas.data.splits import held_out, quotas, stratified
from lightning_tas.randomness import numpy_generator

sizes = st.integers(1, 300)
worlds = st.integers(1, 9)
batches = st.integers(1, 40)


def ranks(world_size: int, epoch: int, **kwargs: object) -> list[np.ndarray]:
    return [TrainOrder(rank=r, world_size=world_size, **kwargs).keys(epoch) for r in range(world_size)]  # type: ignore[arg-type]


@given(size=sizes, world_size=worlds, batch_size=batches, epoch=st.integers(0, 3), drop_last=st.booleans())
@settings(max_examples=150, deadline=None)
def test_training_order_covers(size: int, world_size: int, batch_size: int, epoch: int, drop_last: bool) -> None:
    indices = np.arange(size) * 3 + 5
    each = ranks(world_size, epoch, indices=indices, batch_size=batch_size, seed=7, drop_last=drop_last)
    assert len({len(keys) for keys in each}) == 1
    seen = np.concatenate(each)
    assert set(seen[:, 0]) <= {epoch}
    assert len(np.unique(seen, axis=0)) == len(seen), "no key twice, so no augmented image twice"
    if drop_last:
        assert len(np.unique(seen[:, 1])) == len(seen) == size // world_size * world_size
    else:
        assert set(seen[:, 1]) == set(indices)
        assert len(seen) < size + world_size
    for rank in range(world_size):
        order = TrainOrder(indices, batch_size, 7, rank, world_size, drop_last=drop_last)
        parts = list(order.batches(epoch))
        assert len(parts) == len(order)
        expected = each[rank][: len(order) * batch_size] if drop_last else each[rank]
        assert np.array_equal(np.concatenate([expected[:0], *parts]), expected)
        for start in (1, len(order) // 2, len(order)):
            rest = list(order.batches(epoch, start))
            assert all(np.array_equal(a, b) for a, b in zip(rest, parts[start:], strict=True))


def test_global_batches_do_not_depend_on_the_world_size() -> None:
    indices = np.arange(97)
    one = TrainOrder(indices, 12, seed=1)
    for world_size in (2, 3, 4):
        orders = [TrainOrder(indices, 12 // world_size, 1, rank, world_size) for rank in range(world_size)]
        for number, whole in enumerate(one.batches(5)):
            parts = [list(order.batches(5))[number] for order in orders]
            assert set(map(tuple, np.concatenate(parts))) == set(map(tuple, whole))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return TrainOrder(np.arange(50), 10, seed).keys(epoch)[:, 1].tolist()  # type: ignore[no-any-return]

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)
    assert first(0, 0) != first(1, 0)


@given(size=sizes, world_size=worlds, repeats=st.integers(2, 4), epoch=st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_repeated_augmentation(size: int, world_size: int, repeats: int, epoch: int) -> None:
    indices = np.arange(size) * 2
    each = ranks(world_size, epoch, indices=indices, batch_size=4, seed=3, repeats=repeats)
    assert {len(keys) for keys in each} == {max(1, (size if size < 256 else 256) // world_size)}
    seen = np.concatenate(each)
    assert len(np.unique(seen, axis=0)) == len(seen), "copies of an image are augmented differently"
    counts = np.unique(seen[:, 1], return_counts=True)[1]
    if len(seen) <= size * repeats:
        assert counts.max() <= repeats and np.sum(counts < repeats) <= 1, "only the last image is cut short"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [256, 700, 1030])
def test_repeated_augmentation_is_that_of_deit(size: int, world_size: int) -> None:
    permuted = numpy_generator(5, "order", 2).permutation(np.arange(size))
    for rank in range(world_size):
        theirs = RepeatAugSampler(range(size), world_size, rank, shuffle=False, num_repeats=3)
        ours = TrainOrder(np.arange(size), 16, 5, rank, world_size, repeats=3)
        assert ours.keys(2)[:, 1].tolist() == permuted[list(theirs)].tolist()


@given(size=sizes, world_size=worlds, batch_size=batches)
@settings(max_examples=150, deadline=None)
def test_evaluation_counts_each_sample_once(size: int, world_size: int, batch_size: int) -> None:
    indices = np.arange(size) * 2 + 1
    orders = [EvalOrder(indices, batch_size, rank, world_size) for rank in range(world_size)]
    per_rank = [list(order.batches()) for order in orders]
    assert len({tuple(len(b) for b in batches) for batches in per_rank}) == 1, "collectives match"
    assert all(len(b) == len(o) for b, o in zip(per_rank, orders, strict=True))
    index = np.concatenate([b[:, 1] for batches in per_rank for b in batches])
    assert sorted(index[index != PADDING]) == indices.tolist()


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    share=st.floats(0, 0.99),
    leave_one=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_stratified_split(counts: list[int], share: float, leave_one: bool, seed: int) -> None:
    targets = numpy_generator(0, "shuffle").permutation(np.repeat(np.arange(len(counts)), counts))
    total = held_out(share, len(targets))
    part = stratified(targets, total, seed, "p", leave_one)
    assert np.array_equal(part, stratified(targets, total, seed, "p", leave_one))
    assert np.array_equal(np.unique(part), part)
    available = np.asarray(counts) - int(leave_one)
    assert len(part) == min(total, available.sum())
    taken = np.bincount(targets[part], minlength=len(counts))
    assert (taken <= available).all()
    exact = total * np.asarray(counts) / sum(counts)
    if (np.ceil(exact) <= available).all():
        assert (np.abs(taken - exact) < 1).all(), "each class its share"


def test_quotas_prefer_largest_remainders() -> None:
    counts = np.array([5, 3, 2])
    assert quotas(counts, 4, counts).tolist() == [2, 1, 1]  # 2.0, 1.2, 0.8
    assert quotas(counts, 5, np.array([1, 3, 2])).tolist() == [1, 2, 2]


def test_held_out_reads_shares_and_counts() -> None:
    assert [held_out(x, 200) for x in (0, 0.1, 0.333, 1, 50.0)] == [0, 20, 67, 1, 50]
