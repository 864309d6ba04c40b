"""What holds for every proxy on every family of networks: no trace, a function of the seed, its formula."""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_tas as tas
from lightning_tas.architecture import Architecture, Block, Stage
from lightning_tas.proxies.roles import find_layers
from lightning_tas.proxies.score import INVALID
from lightning_tas.proxies.scorer import make_probe
from lightning_tas.spaces import Dimension, SearchSpace, isotropic

FORMULAS = importlib.util.spec_from_file_location("proxy_tests_naive", Path(__file__).with_name("naive.py"))
assert FORMULAS is not None and FORMULAS.loader is not None
naive: Any = importlib.util.module_from_spec(FORMULAS)
FORMULAS.loader.exec_module(naive)

FAMILIES = ("autoformer", "autoprox_vit", "pit")
NAMES = tuple(tas.proxies())
PAIRS = [(name, family) for name in NAMES for family in FAMILIES]
BATCH = 4
SURROUNDINGS = ("no_grad", "autocast", "inference_mode")
# Every image has a region of its own on these networks, whatever the images: the count is the batch size.
SATURATED = {"te_regions"}
# Proxies with a part for every block. A part of the first ones is their formula over the layers of the block alone, and
# their value also holds what lies outside of blocks.
OF_LAYERS = {"grad_norm", "snip", "plain", "synflow", "fisher", "gradsign", "knas", "zico", "meco"}
ADDING_UP = {"dss", "snip_norm", "auto_prox_a", "auto_prox_p", "auto_prox_released"}
IN_PARTS = OF_LAYERS | ADDING_UP | {"grasp", "ntk_trace", "ntkt"}
# Compares with the supernet's largest network, which a network alone does not know.
RELATIVE = {"snip_norm"}


def space(family: str) -> SearchSpace:
    """Widths, hidden widths and 10 classes that coincide in places: only roles tell layers apart."""
    if family != "pit":
        return isotropic("tiny", family, embed_dim=[20, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])
    dimensions = [
        Dimension("base_dim", "network", (5, 8), step=1),
        Dimension("mlp_ratio", "network", (1, 2), step=1),
        Dimension("num_heads", "stage", ((1, 2), (2,), (4,))),
        Dimension("depth", "stage", (1, 2), step=1),
    ]
    return SearchSpace("tiny", family, dimensions, stages=3)


def middle(family: str) -> Architecture:
    """Neither the smallest nor the largest."""
    if family != "pit":
        return Architecture.vit(20, [2, 1], [1, 2], family=family)
    stages = [Stage([Block()] * depth, num_heads=heads) for depth, heads in ((2, 1), (1, 2), (1, 4))]
    return Architecture(family, stages, base_dim=5, mlp_ratio=1)


@functools.cache
def supernet(family: str) -> Any:
    """A supernet with every parameter random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = tas.supernet(space(family), num_classes=10, img_size=32, in_chans=1, patch_size=16)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return net


@functools.cache
def alone(family: str) -> nn.Module:
    """The stand-alone network of `middle`."""
    network: nn.Module = supernet(family).subnet(middle(family))
    return network


@functools.cache
def suite(family: str) -> tas.Scores:
    """All proxies at once, on two networks: rank-combined ones need company."""
    return tas.score_many(NAMES, supernet(family), [middle(family), space(family).largest()], batch_size=BATCH)


@functools.cache
def cases(family: str) -> list[Any]:
    """The networks of `suite` for the formulas, with the same batch."""
    net, largest = supernet(family), space(family).largest()
    found = []
    for arch in (middle(family), largest):
        probe = make_probe(net, arch, 0, batch_size=BATCH)
        found.append(naive.Case(net.subnet(arch), net.subnet(largest), probe.images, probe.labels, seed=0))
    return found


def score(name: str, net: nn.Module, seed: int = 0, **options: Any) -> tas.Score:
    return tas.score_one(name, net, seed=seed, batch_size=BATCH, **options)


def forbidden(*_: Any) -> None:
    raise AssertionError("a hook of the caller ran")


@contextmanager
def lively(net: nn.Module) -> Iterator[None]:
    """The network in the middle of a training: gradients, frozen parts, mixed modes, somebody's hooks."""
    handles = []
    for i, module in enumerate(net.modules()):
        module.train(i % 3 > 0)
        if i % 4 == 1:
            handles += [module.register_forward_hook(forbidden), module.register_full_backward_hook(forbidden)]
    for i, parameter in enumerate(net.parameters()):
        parameter.requires_grad_(i % 5 != 1)
        parameter.grad = torch.full_like(parameter, 0.5) if i % 2 else None
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        net.eval().requires_grad_(True).zero_grad()


def facts(net: nn.Module) -> list[Any]:
    """Everything about a network and about the process that a score must not change."""
    found: list[Any] = [(k, v.clone().numpy().tobytes()) for k, v in net.state_dict().items()]
    for name, parameter in net.named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.numpy().tobytes()
        found.append((name, id(parameter), parameter.requires_grad, gradient, parameter.grad_fn))
    for name, module in net.named_modules():
        hooks = [len(getattr(module, key)) for key in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        found.append((name, module.training, hooks, sorted(vars(module))))
    found += [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()]
    found += [torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()]
    found += [torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()]
    found += [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32]
    return found


def reseed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def surroundings(kind: str) -> Iterator[None]:
    """What a caller may be in."""
    managers: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with managers[kind]():
        yield


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_every_proxy_on_every_family(name: str, family: str) -> None:
    proxy, net, arch = tas.proxies()[name], supernet(family), middle(family)
    reseed(1)
    with lively(net):
        before = facts(net)
        first = tas.score_one(name, net, arch, seed=0, batch_size=BATCH)
        assert facts(net) == before

    if family in proxy.unsupported:
        assert not first.valid and first.value == INVALID and first.reason == proxy.unsupported[family]
        return
    assert first.valid and np.isfinite(first.value), first.reason
    assert len(first.parts) == (arch.depth if name in IN_PARTS else 0) and np.isfinite(first.parts).all()
    if name in IN_PARTS:
        assert len(set(first.parts)) == arch.depth, "each block's own"
    if name in ADDING_UP:
        assert sum(first.parts) == pytest.approx(first.value, rel=1e-12)

    if name in naive.ALONE:
        options, tolerance = naive.OPTIONS.get(name, {}), naive.TOLERANCES.get(name, naive.FLOAT32)
        found = tas.score_one(name, net, arch, seed=0, batch_size=BATCH, **options) if options else first
        assert found.value == pytest.approx(naive.ALONE[name](cases(family)[0]), rel=tolerance)
    else:
        # DSS++ tells equal sums of ranks apart by less than their steps of 1/2.
        ranks = np.floor(2 * suite(family).value(name)) / 2
        assert ranks.tolist() == naive.ranked(name, cases(family))

    given = {"net": net, "arch": arch} if name in RELATIVE else {"net": alone(family)}
    for i, kind in enumerate(("no_grad", "inference_mode", "autocast")):
        reseed(2 + i)
        with surroundings(kind):
            assert score(name, **given).value == first.value, kind

    if proxy.combines:
        return
    together = suite(family)
    assert together.value(name)[0] == first.value, "a proxy must not depend on its company"
    assert {key: together.extras(name, key)[0] for key in first.extras} == dict(first.extras)
    # Another seed is another batch, and where a proxy draws for itself also another score of the same batch.
    other = score(name, **given, seed=1)
    fixed = proxy.deterministic and not proxy.needs.data
    assert (other.value == first.value) == (fixed or name in SATURATED)
    images, labels = torch.randn(BATCH, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(BATCH)
    one, two = (score(name, **given, seed=seed, images=images, labels=labels).value for seed in (0, 1))
    assert (one == two) == proxy.deterministic


def within(case: Any, *paths: str) -> Any:
    """`case`, of whose layers only those count that lie in one of the modules `paths`."""
    found = copy.copy(case)
    found.paths = {name: m for name, m in case.paths.items() if name.startswith(paths)}
    found.weights = [m.weight for m in found.paths.values()]
    return found


@pytest.mark.parametrize(("name", "family"), [(name, family) for name in sorted(OF_LAYERS) for family in FAMILIES])
def test_parts_are_the_formula_over_a_block(name: str, family: str) -> None:
    options, tolerance = naive.OPTIONS.get(name, {}), naive.TOLERANCES.get(name, naive.FLOAT32)
    found = tas.score_one(name, supernet(family), middle(family), seed=0, batch_size=BATCH, **options)
    whole = cases(family)[0]
    blocks = [within(whole, f"{block}.") for block in whole.blocks()]
    # Terms that cancel leave the error of their sizes.
    sizes = [naive.snip(block) if name == "plain" else 1e-6 for block in blocks]
    for part, block, size in zip(found.parts, blocks, sizes, strict=True):
        assert part == pytest.approx(naive.ALONE[name](block), rel=tolerance, abs=naive.FLOAT32 * size)
    inside = {path for block in blocks for path in block.paths}
    outside = within(whole, *(path for path in whole.paths if path not in inside))
    assert outside.paths.keys() >= {"patch_embed.proj", "head"} and outside.paths.keys().isdisjoint(inside)
    rest, size = naive.ALONE[name](outside), naive.snip(whole) if name == "plain" else 1e-6
    assert found.value - sum(found.parts) == pytest.approx(rest, rel=tolerance, abs=naive.FLOAT32 * size)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_what_is_no_sum_over_layers(family: str) -> None:
    """A root is shared out as what is under it; a part of GraSP has the whole network's gradient in its H g."""
    whole, (net, arch) = cases(family)[0], (supernet(family), middle(family))
    blocks = [within(whole, f"{block}.") for block in whole.blocks()]
    found = score("ntk_trace", net, arch=arch)
    for part, block in zip(found.parts, blocks, strict=True):
        assert part == pytest.approx(naive.ntk_trace(block) ** 2 / found.value, rel=naive.FLOAT32)
    for name in ("grasp", "ntkt"):
        found = score(name, net, arch=arch)
        assert sum(found.parts) != pytest.approx(found.value, rel=1e-3), "the patch embedding counts too"
    assert min(found.parts) > 0 and sum(found.parts) < found.value


@pytest.mark.parametrize("family", FAMILIES)
def test_regions_are_counted_where_images_share_them(family: str) -> None:
    """With one unit of the first block near its threshold a code is a bit for each token, and some are alike."""
    net, (first, *others) = copy.deepcopy(alone(family)), list(cases(family)[0].blocks())
    with torch.no_grad():
        for block in others:
            net.get_submodule(f"{block}.mlp.fc1").bias.fill_(1e4)  # type: ignore[operator, union-attr]
        net.get_submodule(f"{first}.mlp.fc1").bias[1:] = 1e4  # type: ignore[index]
    probe = make_probe(net, None, 0, batch_size=64)
    found = tas.score_one("te_regions", net, batch_size=64)
    case = naive.Case(net, net, probe.images, probe.labels, seed=0)
    assert found.value == naive.te_regions(case) and 3 < found.value < 64


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_in_float32_whatever_the_network_and_the_defaults_are(family: str) -> None:
    archs = [middle(family), space(family).largest()]
    expected, double = suite(family), copy.deepcopy(supernet(family)).double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = tas.score_many(NAMES, double, archs, batch_size=BATCH)
    finally:
        torch.set_default_dtype(default)
    for name in NAMES:
        assert found.value(name).tolist() == expected.value(name).tolist(), name
    assert {parameter.dtype for parameter in double.parameters()} == {torch.float64}


@pytest.mark.parametrize("family", FAMILIES)
def test_combined_proxies_rank_a_set(family: str) -> None:
    for name in (name for name in NAMES if tas.proxies()[name].combines):
        values = suite(family).value(name)
        assert np.isfinite(values).all() and len(values) == 2
        assert set(tas.proxies()[name].combines) <= set(NAMES)


# What each flaw leaves alone: proxies that do not look where it is.
FLAWS: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "no gradient passes the head": (
        lambda net: net.head.weight.zero_(),
        {"params", "macs", "naswot", "zen", "te_regions", "meco", "length_distortion", "ntkt", "sept", "ntsr"}
        | {"auto_prox_p"},
    ),
    "no gradient passes a block's MLP": (
        lambda net: net.blocks[1].mlp.fc2.weight.zero_(),
        {"params", "macs", "naswot", "zen", "te_regions", "meco", "length_distortion", "sept", "jacob_cov"}
        | {"auto_prox_p"},
    ),
    "a weight is not a number": (
        lambda net: net.blocks[1].mlp.fc1.weight[0, 0].fill_(torch.nan),
        {"params", "macs", "zen", "sept"},
    ),
    "a weight is infinite": (
        lambda net: net.blocks[0].mlp.fc1.weight[0, 0].fill_(torch.inf),
        {"params", "macs", "zen", "sept"},
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_makes_scores_invalid_alone_as_in_company(flaw: str) -> None:
    """Never a silent zero or NaN, never an exception, and nobody suffers from what only others look at."""
    net = copy.deepcopy(alone("autoformer"))
    spoil, untouched = FLAWS[flaw]
    with torch.no_grad():
        spoil(net)
    together = tas.score_many(NAMES, net, [middle("autoformer")], batch_size=BATCH)
    for name in NAMES:
        own = score(name, net)
        assert own.valid == (name in untouched), f"{name}: {own.value}, {own.reason}"
        assert own.valid or (own.value == INVALID and own.reason)
        assert (together.value(name)[0], together.reason(name)[0]) == (own.value, own.reason), name


def test_few_pairs_are_unsupported_and_say_why() -> None:
    listed = [(name, family, reason) for name in NAMES for family, reason in tas.proxies()[name].unsupported.items()]
    assert len(listed) <= 5 and all(len(reason) > 10 for *_, reason in listed)
    assert {family for _, family, _ in listed} <= set(FAMILIES)


def test_needs_are_declared() -> None:
    """Labels matter exactly where a proxy says so."""
    images = torch.randn(BATCH, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in NAMES:
        proxy = tas.proxies()[name]
        if proxy.combines:
            continue
        values = {score(name, alone("autoformer"), images=images, labels=torch.full((BATCH,), i)).value for i in (0, 7)}
        assert (len(values) > 1) == proxy.needs.labels, name
        if proxy.needs.labels:
            assert proxy.needs.data, name
        assert proxy.paper and proxy.equation and proxy.cost and proxy.summary, name


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_do_not_follow_shapes(family: str) -> None:
    """Every weight matrix square and of one size: the layers are the same as where all shapes differ."""
    if family == "pit":
        stages = [Stage([Block()], num_heads=1) for _ in range(3)]
        arch, classes = Architecture(family, stages, base_dim=8, mlp_ratio=1), 8
    else:
        arch, classes = Architecture.vit(64, [1], [1], family=family), 64
    equal = tas.network(arch, num_classes=classes, img_size=32, in_chans=1, patch_size=16)
    roles = {layer.name: (layer.role, layer.block) for layer in find_layers(equal)}
    expected = {"head": ("head", None), "patch_embed.proj": ("patch_embed", -1)}
    for i, prefix in enumerate(["stages.0.", "stages.1.", "stages.2."] if family == "pit" else [""]):
        block = f"{prefix}blocks.0."
        expected |= {f"{block}attn.{k}": (k, i) for k in ("qkv", "proj")}
        expected |= {f"{block}mlp.{k}": (k, i) for k in ("fc1", "fc2")}
    if family == "pit":
        expected |= {f"pools.{s}.{k}": (f"pool_{k}", -1) for s in (0, 1) for k in ("conv", "fc")}
    assert {name: role for name, role in roles.items() if role[0] != "norm"} == expected
