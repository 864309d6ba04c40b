"""Populations are measured as one network after the other is; races find the best; any number of processes agrees."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.evaluator import PADDING, evaluate
from lightning_tas.population import Population
from lightning_tas.spaces import SearchSpace, isotropic, pit_ti

SPACES = {
    "autoformer": isotropic("mini", embed_dim=[16, 32], depth=[1, 2, 3], num_heads=[1, 2], mlp_ratio=[1, 2]),
    "pit": pit_ti().with_choices(base_dim=[8, 16], mlp_ratio=[1, 2], num_heads=[1, 2], depth=[1, 2]),
}
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def make_net(family: str) -> Any:
    torch.manual_seed(0)
    space: SearchSpace = SPACES[family]
    net = tas.supernet(space, num_classes=4, img_size=16, in_chans=1, patch_size=8)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval()


def make_data(net: Any, images: int, batch: int, padding: int = 0) -> Batches:
    """Targets that the widest network finds for most images, so that networks differ; the last batch is odd."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(images, 1, 16, 16, generator=generator)
    with torch.no_grad():
        y = net(x, net.space.largest()).argmax(dim=1)
    wrong = torch.rand(images, generator=generator) < 0.2
    y[wrong] = torch.randint(0, 4, (int(wrong.sum()),), generator=generator)
    if padding:
        y[-padding:] = PADDING
    return list(zip(x.split(batch), y.split(batch), strict=True))


def draw(net: Any, n: int) -> list[Architecture]:
    return list(dict.fromkeys(net.space.sample(seed=0, n=n)))


@pytest.mark.parametrize("family", SPACES)
@pytest.mark.parametrize(("images", "batch", "padding"), [(50, 16, 0), (7, 3, 2), (1, 8, 0)])
def test_without_racing_it_is_one_network_after_the_other(family: str, images: int, batch: int, padding: int) -> None:
    """The same numbers, bit for bit, also of networks that are the beginning of others, and of ones given twice."""
    net = make_net(family)
    data = make_data(net, images, batch, padding)
    archs = draw(net, 12)
    archs += [archs[3], net.space.smallest(), net.space.largest()]
    want = [evaluate(net, [arch], data)[0] for arch in archs]
    before = copy.deepcopy(net.state_dict())
    for keep in (None, 0):  # kept, and read again for every call
        population = Population(net, data, keep_bytes=keep)
        assert population.accuracies(archs) == want
        assert population.accuracies(archs[::-1]) == want[::-1]
        assert population.work.blocks < population.work.blocks_alone
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    net.train()
    Population(net, data).accuracies(archs[:1])
    assert net.training


def test_only_some_images() -> None:
    net = make_net("autoformer")
    data = make_data(net, 50, 16)
    found = Population(net, data, max_images=20, seed=3).accuracies(draw(net, 3))
    assert {one.samples for one in found} == {20}
    assert Population(net, data, max_images=20, seed=3).accuracies(draw(net, 3)) == found
    assert Population(net, data, max_images=1000).accuracies(draw(net, 3))[0].samples == 50


@pytest.mark.parametrize("max_images", [None, 1, 2, 3])
def test_races_of_few_images(max_images: int | None) -> None:
    net = make_net("autoformer")
    population = Population(net, make_data(net, 5, 2), max_images=max_images)
    raced = population.race(draw(net, 6), top=1)
    assert not any(one.dropped for one in raced) and {one.images for one in raced} == {max_images or 5}


@pytest.mark.parametrize("family", SPACES)
def test_races_find_the_best(family: str) -> None:
    """Whoever saw all images has the accuracy of full evaluation; whoever was given up ranks below the best."""
    net = make_net(family)
    data = make_data(net, 600, 100)
    archs = draw(net, 60)
    full = Population(net, data).accuracies(archs)
    population = Population(net, data)
    raced = [one for part in (archs[:25], archs[25:]) for one in population.race(part, top=3)]
    dropped = [one.dropped for one in raced]
    assert any(dropped) and population.work.images < 600 * len(archs)
    for one, whole in zip(raced, full, strict=True):
        if not one.dropped:
            assert one.top1 == whole.top1 and one.images == 600
        else:
            assert one.images < 600
    best = max(whole.top1 for whole in full)
    assert max(one.top1 for one in raced if not one.dropped) == best


def test_a_race_continues_from_its_state() -> None:
    net = make_net("autoformer")
    data, archs = make_data(net, 600, 100), draw(net, 60)
    whole = Population(net, data)
    first, second = whole.race(archs[:30], top=3), whole.race(archs[30:], top=3)
    part = Population(net, data)
    assert part.race(archs[:30], top=3) == first
    state = part.state_dict()
    other = Population(net, data)
    other.load_state_dict(state)
    assert other.race(archs[30:], top=3) == second
    assert other.work == whole.work


def test_refusals() -> None:
    net = make_net("autoformer")
    with pytest.raises(UserError, match="no architectures"):
        Population(net, make_data(net, 4, 2)).accuracies([])
    with pytest.raises(UserError, match=r"no images|no samples"):
        Population(net, []).accuracies(draw(net, 1))
    with pytest.raises(UserError, match="embed_dim"):
        Population(net, make_data(net, 4, 2)).accuracies([Architecture.vit(64, [1], [2])])


def measured(keep: int | None) -> list[Any]:
    """What one process of several finds."""
    net = make_net("autoformer")
    data, archs = make_data(net, 300, 64), draw(net, 40)
    population = Population(net, data, keep_bytes=keep)
    return [
        population.accuracies(archs),
        population.race(archs[:20], top=3),
        population.race(archs[20:], top=3),
        # What cannot be read in any order is not raced.
        population.state_dict()["race"]["ids"] if keep is None else None,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, 0])
def test_one_two_and_four_processes_agree(processes: Any, keep: int | None, tmp_path: Path) -> None:
    want = measured(keep)
    for world in (2, 4):
        for found in processes.run(f"{__file__}:measured", world, keep, timeout=200):
            assert found == want, world
