"""`score_many` gives one plain pass's scores, whatever the order of networks, their shares and the interruptions."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.proxies.stream import part_of
from lightning_tas.spaces import isotropic

NAMES = ["params", "snip", "synflow", "dss", "dss_pp"]
OWN = NAMES[:-1]
SPACE = isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])
ALL = list(SPACE.enumerate())
GIVEN: dict[str, Any] = {
    "images": torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)),
    "labels": torch.arange(3),
}


@functools.cache
def supernet() -> Any:
    """With every parameter random."""
    with torch.random.fork_rng(devices=[]):
        net = tas.supernet(SPACE, num_classes=4, img_size=8, in_chans=1, patch_size=4)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + 0.1)
    return net


@functools.cache
def plainly() -> dict[Architecture, dict[str, Any]]:
    """Every network's numbers by one pass over the whole space, in its order, on one process and without a file."""
    scores = tas.score_many(NAMES, supernet(), ALL, **GIVEN)
    assert all(len(set(scores.value(name).tolist())) > len(ALL) / 2 for name in OWN)
    return {arch: numbers(scores, i) for i, arch in enumerate(ALL)}


def numbers(scores: tas.Scores, place: int) -> dict[str, Any]:
    """What is known of one network but for its times and its rank in its company."""
    found: dict[str, Any] = {name: scores.value(name)[place] for name in OWN}
    found |= {key: scores.extras("dss", key)[place] for key in ("diversity", "saliency")}
    return found | {"costs": (scores.params[place], scores.macs[place]), "valid": scores.valid("snip")[place]}


def ranks(archs: Sequence[Architecture]) -> list[float]:
    """DSS++ of a set, but for its steps of less than 1/2 between equal sums: average ranks of both halves."""
    halves = [np.array([plainly()[arch][key] for arch in archs]) for key in ("diversity", "saliency")]
    return sum((h[:, None] > h).sum(1) + ((h[:, None] == h).sum(1) + 1) / 2 for h in halves).tolist()  # type: ignore[union-attr]


def check(scores: tas.Scores, archs: Sequence[Architecture]) -> None:
    assert scores.archs == list(archs)
    assert [numbers(scores, i) for i in range(len(archs))] == [plainly()[arch] for arch in archs]
    if len(archs) > 1:
        assert (np.floor(2 * scores.value("dss_pp")) / 2).tolist() == ranks(archs)


class Stopped(Exception):
    """Somebody ended the scoring."""


def stopping(archs: Sequence[Architecture], after: int) -> Iterator[Architecture]:
    yield from archs[:after]
    raise Stopped


# Examples are small already, and a failing one would be made smaller for minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
# Networks may come twice.
NETWORKS = st.lists(st.sampled_from(ALL), min_size=1, max_size=5)
STOPS = st.tuples(st.integers(0, 5), st.just(0) | st.integers(1, 400))


@pytest.mark.slow
@settings(max_examples=6, deadline=None, phases=PHASES)
@given(NETWORKS, st.integers(1, 4), st.data())
def test_shares_are_the_places_of_one_pass(archs: list[Architecture], world: int, data: st.DataObject) -> None:
    net, reordered = supernet(), data.draw(st.permutations(archs))
    check(tas.score_many(NAMES, net, reordered, **GIVEN), reordered)
    for rank in data.draw(st.permutations(range(world))):
        check(tas.score_many(NAMES, net, archs, shard=(rank, world), **GIVEN), archs[rank::world])


@pytest.mark.slow
@settings(max_examples=12, deadline=None, phases=PHASES)
@given(NETWORKS, st.integers(1, 3), st.data())
def test_stopped_anywhere_and_continued_is_one_pass(archs: list[Architecture], world: int, data: st.DataObject) -> None:
    """Shares begin in any order, each may be stopped at any network and lose any number of bytes, and some never end.

    What is not done then is left to the call that joins them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.csv"

        def score(shard: tuple[int, int] | None, networks: Any) -> tas.Scores:
            return tas.score_many(NAMES, supernet(), networks, path=path, shard=shard, **GIVEN)

        for rank in data.draw(st.permutations(range(world))):
            shard = (rank, world) if world > 1 else None
            after, torn = data.draw(STOPS)
            with contextlib.suppress(Stopped):
                score(shard, stopping(archs, after))
            file = part_of(path, f"{rank}of{world}") if world > 1 else path
            if file.exists():
                kept = file.read_bytes()[: max(0, file.stat().st_size - torn)]
                file.write_bytes(kept)
                event("rows kept" if kept.count(b"\n") > 1 else "none kept")
            if data.draw(st.booleans()):
                check(score(shard, archs), archs[rank::world])
        check(score(None, archs), archs)
        assert [found.name for found in Path(folder).glob("*.csv")] == ["scores.csv"]
