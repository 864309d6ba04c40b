"""Populations against evaluating one network after the other; what is shared, kept, read again and left behind."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas import image_set, spaces
from lightning_tas.data import DataConfig, TASDataModule
from lightning_tas.errors import UserError
from lightning_tas.evaluator import evaluate
from lightning_tas.forward_tree import ForwardTree, path_of
from lightning_tas.population import Population
from lightning_tas.proxies.shards import Share
from lightning_tas.supernets.elastic_network import Step

SIZE = (9, 15)  # so that images begin at odd places in memory


def vit_space() -> Any:
    return spaces.isotropic("small", embed_dim=[24, 40], depth=[2, 3], num_heads=[1, 2], mlp_ratio=[1, 1.5])


def pit_space() -> Any:
    return spaces.SearchSpace(
        "small",
        "pit",
        [
            spaces.Dimension("base_dim", "network", (6, 8)),
            spaces.Dimension("mlp_ratio", "network", (1, 1.5)),
            spaces.Dimension("num_heads", "stage", (1, 2, 4)),
            spaces.Dimension("depth", "stage", (1, 2)),
        ],
        [spaces.Predicate("divides_next", ("num_heads",))],
        stages=2,
    )


SPACES = {"autoformer": vit_space, "pit": pit_space}


def make_net(family: str = "autoformer", classes: int = 7, **options: Any) -> Any:
    """With all parameters random."""
    torch.manual_seed(0)
    given = {"num_classes": classes, "img_size": SIZE, "in_chans": 1, "patch_size": 3, **options}
    net = tas.supernet(SPACES[family](), **given)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net


def batches(sizes: tuple[int, ...] = (7, 7, 5), classes: int = 7, padding: bool = True) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(n, 1, *SIZE, generator=generator), torch.randint(classes, (n,), generator=generator))
        for n in sizes
    ]
    if padding:
        made[0][1][3] = made[-1][1][-1] = -1
        made[-1][0][-1] = float("nan")
    return made


def networks(net: Any, n: int = 12) -> list[Any]:
    return list(net.space.sample(seed=3, n=n))


def digits(seed: int = 0, **config: Any) -> TASDataModule:
    plain = {"crop": "pad", "auto_augment": None, "color_jitter": 0.0, "reprob": 0.0, "img_size": list(SIZE)}
    return TASDataModule(DataConfig(name="digits", batch_size=32, eval_batch_size=50, **{**plain, **config}), seed)


@pytest.mark.parametrize("family", SPACES)
@pytest.mark.parametrize("keep_bytes", [None, 0, 4000])
def test_equals_evaluating_one_by_one(family: str, keep_bytes: int | None) -> None:
    net, loader = make_net(family), batches()
    archs = networks(net)
    archs = [*archs, archs[2], archs[0]]
    population = Population(net, loader, keep_bytes=keep_bytes)
    found = population.accuracies(archs)
    assert found == [evaluate(net, [arch], loader)[0] for arch in archs]
    assert len({one.loss for one in found}) > 5 and {one.samples for one in found} == {17}
    assert population.images.kept == (keep_bytes is None)
    assert population.accuracies(archs[:1]) == found[:1]


def test_autocast_and_few_classes_whose_logits_tie() -> None:
    net, loader = make_net(classes=3), batches((20, 20), 3, padding=False)
    archs = networks(net, 6)
    population = Population(net, loader, amp_dtype=torch.bfloat16)
    found = population.accuracies(archs)
    assert found == evaluate(net, archs, loader, amp_dtype=torch.bfloat16)
    assert (population.hits(archs).mean(axis=1) * 100).tolist() == pytest.approx([one.top1 for one in found])


def test_layouts_and_loaders_that_do_not_know_their_length() -> None:
    net = make_net(in_chans=3)
    loader = [(torch.randn(n, 3, *SIZE).to(memory_format=torch.channels_last), torch.arange(n) % 7) for n in (5, 6, 9)]

    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(loader)

    population = Population(net, Unsized())
    assert population.accuracies(networks(net)) == evaluate(net, networks(net), loader)
    (first, _), *_ = population.images.batches()
    assert population.images.kept and first.is_contiguous(memory_format=torch.channels_last)


def test_racing_equals_full_evaluation_and_goes_on_from_its_state() -> None:
    net = make_net(classes=2)
    loader = batches((40, 40, 21), 2, padding=False)
    archs = list(dict.fromkeys(net.space.sample(seed=5, n=40)))
    teacher = net.space.largest()
    with torch.no_grad():
        loader = [(x, net.eval()(x, teacher).argmax(1)) for x, _ in loader]  # some agree with it, others do not
    full = {a: one for a, one in zip(archs, evaluate(net, archs, loader), strict=True)}
    population, other = Population(net, loader), Population(net, loader)
    found = population.race(archs, top=3, error=0.5)
    assert [one.dropped for one in found].count(True) > 2
    complete = {a: one for a, one in zip(archs, found, strict=True) if not one.dropped}
    assert all(one.top1 == pytest.approx(full[a].top1) and one.images == 101 for a, one in complete.items())
    ranked = sorted(archs, key=lambda a: (-full[a].top1, a.id))[:3]
    assert population.state_dict()["race"]["ids"] == [a.id for a in ranked]
    assert population.work.images == sum(one.images for one in found)

    again = other.race(archs[:20], top=3, error=0.5)
    resumed = Population(net, loader)
    resumed.load_state_dict(other.state_dict())
    assert again == found[:20]
    assert resumed.race(archs[20:], top=3, error=0.5) == other.race(archs[20:], top=3, error=0.5)
    assert repr(resumed.state_dict()) == repr(other.state_dict())

    before = population.work.images
    assert population.race([ranked[1], ranked[1]], top=3, error=0.5) == [complete[ranked[1]]] * 2
    assert population.work.images == before  # known already
    population.race([ranked[1]], top=3, error=0.5, seed=1)  # another order: afresh
    assert population.work.images == before + 101
    population.forget()
    assert population.state_dict()["race"] is None


def test_images_that_do_not_fit_are_read_in_the_order_of_the_race() -> None:
    net = make_net(classes=10)
    archs = networks(net, 12)
    kept, read = (Population(net, digits().search_loader(), keep_bytes=room) for room in (None, 0))
    for part in (archs[:2], archs[2:]):  # the first are what the others race against
        found = kept.race(part, top=2, error=0.9)
        assert found == read.race(part, top=2, error=0.9)
    assert any(one.dropped for one in found)
    assert kept.images.kept and not read.images.kept
    assert np.array_equal(kept.hits(archs), read.hits(archs))
    # Any other loader has but its own order: all networks see all images.
    plain = Population(net, list(digits().search_loader()), keep_bytes=0)
    assert {(one.images, one.dropped) for one in plain.race(archs)} == {(144, False)}
    with pytest.raises(UserError, match="do not fit"):
        plain.hits(archs)


@pytest.mark.parametrize("images", [1, 2, 3, 5])
def test_races_of_few_images(images: int) -> None:
    net = make_net()
    raced = Population(net, batches((2, 2, 1), padding=False), max_images=images).race(networks(net, 6), top=1)
    assert not any(one.dropped for one in raced) and {one.images for one in raced} == {images}


def test_some_of_the_images() -> None:
    net = make_net(classes=10)
    archs = networks(net, 3)
    whole = Population(net, digits().search_loader()).hits(archs)
    rows = Population(net, digits().search_loader(), max_images=60)
    other = Population(net, list(digits().search_loader()), max_images=60)
    low = Population(net, list(digits().search_loader()), max_images=60, keep_bytes=0)
    chosen = np.sort(image_set.numpy_generator(0, "image-subset").permutation(144)[:60])
    assert np.array_equal(rows.hits(archs), whole[:, chosen]) and np.array_equal(other.hits(archs), whole[:, chosen])
    for population in (rows, other, low):
        assert [one.samples for one in population.accuracies(archs)] == [60] * 3
        assert [one.top1 for one in population.accuracies(archs)] == pytest.approx(100 * whole[:, chosen].mean(axis=1))
    many = Population(net, digits().search_loader(), max_images=1000)
    assert many.accuracies(archs) == evaluate(net, archs, digits().search_loader())
    padded = Population(net, batches(), max_images=10).accuracies(archs)
    assert [one.samples for one in padded] == [10] * 3 and all(one.loss == one.loss for one in padded)


def test_the_search_loader_is_the_held_out_split_and_never_the_test_set() -> None:
    module = digits()
    held = [*module.search_loader()]
    for one, other in zip(held, module.val_dataloader(), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    module.trainer = type("Trainer", (), {"global_rank": 1, "world_size": 3, "train_dataloader": None})()
    assert (
        sum(len(y) for _, y in module.search_loader()) == 144 and sum(len(y) for _, y in module.val_dataloader()) == 48
    )
    rows = np.array([140, 3, 77])
    (images, targets), = module.search_loader().in_order(rows)  # fmt: skip
    everything = [torch.cat(parts) for parts in zip(*held, strict=True)]
    assert torch.equal(images, everything[0][rows]) and torch.equal(targets, everything[1][rows])
    with pytest.raises(UserError, match=r"data\.search_val: 0 holds no images out"):
        digits(search_val=0).search_loader()


def test_nothing_is_left_behind() -> None:
    net, loader = make_net(drop_path_rate=0.3, drop_rate=0.2), batches()
    net.blocks[0].eval()
    modes = [module.training for module in net.modules()]
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    weights = copy.deepcopy(net.state_dict())
    population = Population(net, loader)
    population.accuracies(networks(net))
    population.race(networks(net))
    assert all(torch.equal(weights[key], value) for key, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]  # type: ignore[index]
    assert all(parameter.grad is None for parameter in net.parameters()) and torch.is_grad_enabled()


def test_networks_that_do_not_say_their_steps() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIZE[0] * SIZE[1], 7)

        def forward(self, images: Tensor, arch: Any) -> Tensor:
            return self.layer(images.flatten(1)) * arch.embed_dim  # type: ignore[no-any-return]

    net = Plain()
    archs = [tas.Architecture.vit(width, [1], [1]) for width in (1, 2, 3)]
    population = Population(net, batches(padding=False))
    assert population.accuracies(archs) == evaluate(net, archs, batches(padding=False))
    assert population.work.blocks == 0


@pytest.mark.parametrize("family", SPACES)
def test_every_common_beginning_is_computed_once(family: str) -> None:
    net = make_net(family).eval()
    archs = list(dict.fromkeys(networks(net, 30)))
    runs: list[tuple[Any, ...]] = []

    def counted(arch: Any) -> list[Step]:
        steps = path_of(net, arch)
        keys = tuple(step.key for step in steps)
        return [
            Step(step.key, lambda x, step=step, path=keys[: i + 1]: (runs.append(path), step.run(x))[1])  # type: ignore[misc]
            for i, step in enumerate(steps)
        ]

    tree = ForwardTree(net, {arch: counted(arch) for arch in archs})
    x = batches(padding=False)[0][0]
    with torch.no_grad():
        found = dict(tree.run(x, tree.order))
        assert all(torch.equal(found[i], net(x, arch)) for i, arch in enumerate(archs))
    paths = [tuple(step.key for step in path_of(net, arch)) for arch in archs]
    beginnings = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    assert len(runs) == len(beginnings) == sum(tree.new_steps(tree.order)) and set(runs) == beginnings
    assert tree.blocks(tree.order) == sum(len(path) > 1 for path in beginnings)
    assert tree.blocks_alone(tree.order) == sum(len(path) - 1 for path in paths) > tree.blocks(tree.order)
    for world in (1, 2, 3, 5, 40):
        parts = [tree.part(Share(rank, world, talks=False)) for rank in range(world)]
        assert [i for part in parts for i in part] == tree.order
        if world <= 3:
            macs = [sum(tas.cost(archs[i], net).macs for i in part) for part in parts]
            assert max(macs) < 2 * min(macs)


def test_a_chain_holds_one_activation() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = [0]

    def step(name: str) -> Step:
        def run(x: Tensor) -> Tensor:
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            made = x + 1
            alive.append(weakref.ref(made))
            return made

        return Step(name, run)

    class Head:
        finish = staticmethod(lambda x: x)
        forward_head = staticmethod(lambda x: x)

    names = ["abcdef", "abcxyz"]
    archs = [tas.Architecture.vit(width, [1], [1]) for width in (1, 2)]
    tree = ForwardTree(Head(), {arch: [step(n) for n in name] for arch, name in zip(archs, names, strict=True)})
    found = [int(y) for _, y in tree.run(torch.zeros(()), tree.order)]
    assert found == [6, 6] and len(alive) == 9 and most[0] == 2  # a step's input, and one more below the branching


def test_refusals() -> None:
    net = make_net()
    population = Population(net, batches())
    with pytest.raises(UserError, match="no architectures"):
        population.accuracies([])
    assert population.race([]) == []
    padding = [(torch.zeros(2, 1, *SIZE), torch.tensor([-1, -1]))]
    for loader in ([], padding):
        with pytest.raises(UserError, match="no images"):
            Population(net, loader).race(networks(net))
    with pytest.raises(UserError, match="max_images: 0"):
        Population(net, batches(), max_images=0)
    with pytest.raises(UserError, match="embed_dim: 400"):
        population.accuracies([tas.Architecture.vit(400, [1, 1], [1, 1])])
    population.race(networks(net))
    resumed = Population(net, batches((4, 4)))
    resumed.load_state_dict(population.state_dict())
    with pytest.raises(UserError, match="resume: racing saw 17 images before, now there are 6"):
        resumed.race(networks(net))


def test_free_memory() -> None:
    free = image_set.free_bytes(torch.device("cpu"))
    assert 2**20 < free < 2**50 and image_set.free_bytes(torch.device("cpu"), 4) < free / 2
