"""Latency: bookkeeping under a clock that only moves when a piece of a network runs, and one real tiny network."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import lightning_tas as tas
from lightning_tas import Architecture, UserError, latency
from lightning_tas.latency import Latency, LatencyTable, measure
from lightning_tas.pieces import Pieces
from lightning_tas.spaces import Dimension, SearchSpace, isotropic

TINY: dict[str, Any] = {"img_size": 16, "patch_size": 8, "num_classes": 3}


def vit() -> SearchSpace:
    return isotropic("vit", embed_dim=(8, 16), depth=(1, 3, 4), num_heads=(1, 2), mlp_ratio=(1, 2))


def pit() -> SearchSpace:
    dimensions = [
        Dimension("base_dim", "network", (4, 8)),
        Dimension("mlp_ratio", "network", (1, 2)),
        Dimension("num_heads", "stage", ((1, 2), (2, 4))),
        Dimension("depth", "stage", ((1, 2), (2, 3))),
    ]
    return SearchSpace("pit", "pit", dimensions, stages=2)


def meta(space: SearchSpace, **options: Any) -> Any:
    with torch.device("meta"):
        return tas.supernet(space, **{**TINY, **options})


@pytest.mark.parametrize("space", [vit(), pit()], ids=["vit", "pit"])
def test_table_adds_up_exactly_what_pieces_take(clock: Any, space: SearchSpace) -> None:
    net = meta(space)
    table = LatencyTable.build(net, repeats=4, calibrate=2, check=3)
    assert table.scale == 1.0 and table.errors == (0.0, 0.0, 0.0)
    codes = space.sample_codes(4, 6)
    direct = [measure(net, arch, repeats=1).median_ms for arch in space.decode(codes)]
    np.testing.assert_allclose(table(codes), direct, rtol=1e-12)
    assert len(set(direct)) > 3
    parts = Pieces(space)
    by_hand = [sum(table.pieces[key] for key in parts.keys(row)) for row in codes]
    assert table.total(codes).tolist() == by_hand


def test_examples_show_every_piece_of_every_member() -> None:
    for space in (vit(), pit()):
        parts = Pieces(space)
        every = {key for row in space.encode(space.enumerate()) for key in parts.keys(row)}
        for deep in (True, False):
            examples = parts.examples(deep)
            assert {key for row in examples for key in parts.keys(row)} == every
            assert space.valid(np.stack(examples)).all() and len(examples) < 12


def test_everything_has_its_turn_in_every_round(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built in turns: a machine that is busy for less than half of the rounds changes nothing."""
    turns: list[Architecture] = []
    build = latency._Bench.network

    def network(self: Any, arch: Any) -> Any:
        turns.append(arch)
        clock.slow = 9 if len(turns) <= 2 * 8 else 1  # 2 examples and 6 others: two of five rounds
        return build(self, arch)

    monkeypatch.setattr(latency._Bench, "network", network)
    seen = []
    table = LatencyTable.build(
        meta(vit()), repeats=10, calibrate=2, check=4, progress=lambda done, all: seen.append((done, all))
    )
    assert table.errors == (0.0,) * 4 and table.scale == 1.0 and table.samples == 10
    round_ = len(turns) // 5
    assert round_ == 2 + 6 and turns == turns[:round_] * 5
    assert seen == [(i, 40) for i in range(41)] and 8 * latency.rounds(10) == 40
    assert clock.waits == 40 * 3  # after every pass, measured or not, and never inside of one


def test_first_pass_of_a_network_is_not_measured(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build = latency._Bench.network

    def network(self: Any, arch: Any) -> Any:
        made = build(self, arch)
        cold = [True]

        def start(*_: Any) -> None:
            clock.now += 10**9 if cold.pop() else 0
            cold.append(False)

        made.register_forward_pre_hook(start)
        return made

    monkeypatch.setattr(latency._Bench, "network", network)
    assert LatencyTable.build(meta(vit()), repeats=2, calibrate=1, check=2).errors == (0.0, 0.0)
    assert measure(meta(vit()), vit().largest(), warmup=1, repeats=3).max_ms < 1
    assert measure(meta(vit()), vit().largest(), warmup=0, repeats=3).max_ms > 1000


def test_scale_and_error_are_those_of_whole_networks(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole passes are slower than their pieces by a quarter, and by more the deeper they are."""
    net, space = meta(vit()), vit()
    time = latency._Bench.time

    def slower(self: Any, made: Any, images: Any) -> int:
        return round(time(self, made, images) * (1.25 + 0.01 * len(made.blocks)))

    monkeypatch.setattr(latency._Bench, "time", slower)
    table = LatencyTable.build(net, repeats=2, calibrate=3, check=4, seed=6)
    depths = [arch.depth for arch in space.sample(6, n=7)]
    factors = 1.25 + 0.01 * np.array(depths)
    assert table.scale == pytest.approx(np.median(factors[:3]), rel=1e-4)
    np.testing.assert_allclose(table.errors, np.median(factors[:3]) / factors[3:] - 1, atol=1e-4)
    assert table.max_error == max(abs(e) for e in table.errors) > 0
    assert f"at most {table.max_error:.1%}" in str(table) and "batch size 1" in str(table)


def test_table_survives_json(clock: Any) -> None:
    table = LatencyTable.build(meta(pit()), repeats=2, calibrate=1, check=2, batch_size=2, threads=1)
    again = LatencyTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again.to_dict() == table.to_dict() and again.space == table.space
    codes = pit().sample_codes(0, 50)
    assert (again(codes) == table(codes)).all() and (again.total(codes) == table.total(codes)).all()
    assert again.pieces == table.pieces and again.conditions == table.conditions
    assert (table(codes) == table.estimate(codes)).all()


def test_quartiles_are_of_the_passes(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5, 1, 2, 3, 4])
    monkeypatch.setattr(latency._Bench, "time", lambda *_: next(times) * 10**6)
    found = measure(meta(vit()), vit().smallest(), warmup=0, repeats=5, batch_size=7, threads=1)
    assert (found.min_ms, found.low_ms, found.median_ms, found.high_ms, found.max_ms) == (1, 2, 3, 4, 5)
    assert (found.repeats, found.batch_size, found.threads, found.device, found.amp_dtype) == (5, 7, 1, "cpu", "")


@pytest.mark.parametrize("kind", ["supernet", "options", "alone", "amp"])
def test_a_real_network_is_measured_and_nothing_else_changes(kind: str) -> None:
    space = vit()
    net = tas.supernet(space, **TINY).train()
    arch: Architecture | None = space.sample(1)
    given: Any = {"supernet": net, "amp": net, "options": TINY, "alone": net.subnet(arch)}[kind]
    arch = None if kind == "alone" else arch
    state, threads, grad = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    amp = torch.bfloat16 if kind == "amp" else None
    found = measure(given, arch, batch_size=2, warmup=1, repeats=4, threads=threads + 1, amp_dtype=amp)
    assert isinstance(found, Latency)
    assert 0 < found.min_ms <= found.low_ms <= found.median_ms <= found.high_ms <= found.max_ms
    assert found.threads == threads + 1 and found.amp_dtype == ("bfloat16" if amp else "")
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads
    assert torch.is_grad_enabled() == grad and net.training
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert json.loads(json.dumps(found.to_dict()))["batch_size"] == 2


def test_a_real_table_has_a_positive_time_for_every_piece() -> None:
    net = tas.supernet(vit(), **TINY)
    table = LatencyTable.build(net, repeats=2, calibrate=1, check=1)
    assert all(ns > 0 for ns in table.pieces.values()) and np.isfinite(table.errors).all()
    assert (table(vit().sample_codes(0, 9)) > 0).all() and net.training
    assert torch.get_num_threads() == table.conditions.threads


@pytest.mark.parametrize("key", ["batch_size", "repeats", "threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_that_are_none_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^latency.{key}: {value} is not valid"):
        measure(TINY, vit().smallest(), **{key: value})


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(UserError, match=r"latency.device: 'mps' is not valid; valid: cpu, cuda"):
        measure(TINY, vit().smallest(), device="mps")
    with pytest.raises(UserError, match="exceeds what supernet 'vit' allocates"):
        measure(tas.supernet(vit(), **TINY), Architecture.vit(32, [1], [1]))
    with pytest.raises(UserError, match=r"^latency.repeats: 0"):
        LatencyTable.build(meta(vit()), repeats=0)
