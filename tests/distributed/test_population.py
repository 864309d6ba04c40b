"""A population shared by 1, 2 and 4 processes: the same numbers, the same winner; nobody waits for one that failed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.evaluator import evaluate
from lightning_tas.population import Population

sys.path.insert(0, str(Path(__file__).parent))  # here and in the processes that import this file
import small

IMAGES = 203


def images(net: Any) -> list[Any]:
    """Labelled by the largest network, so that the others differ in how often they agree."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(IMAGES, 1, 8, 8, generator=generator)
    with torch.no_grad():
        targets = net.eval()(inputs, net.space.largest()).argmax(1)
    return list(zip(inputs.split(40), targets.split(40), strict=True))


def measured() -> dict[str, Any]:
    """What every rank must find, whatever the number of processes."""
    net = small.make_net()
    archs = list(net.space.enumerate())
    loader = images(net)
    population = Population(net, loader)
    found: dict[str, Any] = {"accuracies": population.accuracies(archs), "few": population.accuracies(archs[:1])}
    found["raced"] = [population.race(part, top=3, error=0.3) for part in (archs[:25], archs[10:])]
    found["state"] = repr(population.state_dict()["race"])
    found["images"] = population.work.images
    found["alone"] = population.work.blocks_alone
    # The first rank has no room: no rank keeps anything, or they would wait for each other.
    narrow = Population(net, loader, keep_bytes=0 if os.environ.get("RANK", "0") == "0" else None)
    found["narrow"] = narrow.accuracies(archs[:5])
    assert not narrow.images.kept
    return found


def failing() -> str:
    """The last rank's network breaks."""
    net = small.make_net()
    if os.environ["RANK"] == "1":
        net.norm.forward = lambda x: 1 / 0
    try:
        Population(net, images(small.make_net())).race(list(net.space.enumerate()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def everything() -> tuple[dict[str, Any], str]:
    """Starting processes takes a while."""
    return measured(), failing()


@pytest.mark.slow
def test_same_numbers_and_winner_on_1_2_and_4_processes(processes: Any) -> None:
    alone = measured()
    net = small.make_net()
    archs = list(net.space.enumerate())
    assert alone["accuracies"] == evaluate(net, archs, images(net))
    assert sum(one.dropped for part in alone["raced"] for one in part) > 5
    two, four = processes.run(everything, 2, timeout=250), processes.run(measured, 4, timeout=250)
    for found in (*(found for found, _ in two), *four):
        assert found == alone
    assert "ZeroDivisionError" in two[1][1] and two[0][1].startswith("RuntimeError: process 1: division by zero")
