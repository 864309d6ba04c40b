"""The engine under the proxies: layers by role, per-sample gradients, shared passes, validity, registration."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies import registry
from lightning_tas.proxies.initialise import METHODS, fresh
from lightning_tas.proxies.passes import Pass, Watcher, sample_gradients
from lightning_tas.proxies.probe import Measured, Probe, gaussian_batch, quiet
from lightning_tas.proxies.registry import Needs, chosen, proxies, register
from lightning_tas.proxies.roles import Layer, block_names, find_layers
from lightning_tas.proxies.scorer import combined, make_probe, score_network, score_one

ARCH = Architecture.vit(24, [1, 2], [1, 2.5])
BUILD = {"num_classes": 24, "img_size": 16, "patch_size": 8}


def network(seed: int = 0) -> nn.Module:
    """A small network in which no parameter has a special value."""
    net: nn.Module = tas.network(ARCH, **BUILD)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.1)
    return net


# --- roles ------------------------------------------------------------------------------------------------------------


def test_roles_do_not_follow_shapes() -> None:
    """Width 24, an MLP ratio of 1 and 24 classes: every matrix of a block is 24 wide, and so is the head."""
    layers = find_layers(network())
    assert [(layer.name, layer.role, layer.block) for layer in layers if layer.role != "norm"] == [
        ("patch_embed.proj", "patch_embed", -1),
        *[
            (f"blocks.{i}.{name}", role, i)
            for i in (0, 1)
            for name, role in (("attn.qkv", "qkv"), ("attn.proj", "proj"), ("mlp.fc1", "fc1"), ("mlp.fc2", "fc2"))
        ],
        ("head", "head", None),
    ]
    assert sum(layer.role == "norm" for layer in layers) == 5
    assert block_names(network()) == ["blocks.0", "blocks.1"]


def test_timms_own_networks_have_roles_and_scores() -> None:
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2)
    assert {layer.role for layer in find_layers(net)} == {*("patch_embed", "qkv", "proj", "fc1", "fc2", "head", "norm")}
    images, labels = gaussian_batch(0, 4, 3, (32, 32), 5)
    score = score_one("snip", net, images=images, labels=labels)
    assert score.valid and len(score.parts) == 2 and score.value > sum(score.parts) > 0
    with pytest.raises(UserError, match=r"img_size"):
        score_one("snip", net)


def test_an_unknown_layer_is_refused_and_can_be_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = nn.Linear(4, 4)

    with pytest.raises(UserError, match=r"'mixer'.*layer_roles"):
        find_layers(Odd())

    class Named(Odd):
        def layer_roles(self) -> dict[str, str]:
            return {"mixer": "fc1"}

    assert [layer.role for layer in find_layers(Named())] == ["fc1"]


# --- per-sample gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(5, 7), (3, 5)),
        (nn.Linear(5, 7), (3, 4, 5)),
        (nn.Linear(5, 7), (3, 2, 4, 5)),
        (nn.Conv2d(3, 6, 4, stride=2), (3, 3, 9, 10)),
        (nn.Conv2d(4, 12, 3, stride=2, padding=1, groups=4), (3, 4, 7, 6)),
        (nn.Conv2d(4, 6, (3, 2), padding=1, dilation=2, groups=2), (3, 4, 8, 7)),
    ],
)
def test_gradients_of_single_samples(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = module.double()
    y = module(x)
    grad = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = sample_gradients(module, x, grad)
    assert isinstance(module.weight, Tensor)
    for i in range(len(x)):
        (naive,) = torch.autograd.grad(module(x[i : i + 1]), module.weight, grad[i : i + 1])
        torch.testing.assert_close(found[i], naive, rtol=1e-12, atol=1e-12)


class Collect(Watcher):
    """Keeps everything that a pass shows."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.grads: dict[Layer, Tensor] = {}
        self.inputs: dict[Layer, Tensor] = {}

    def forward(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        self.order.append(f"forward {layer.name}")
        self.inputs[layer] = x

    def backward(self, layer: Layer, x: Tensor, y: Tensor, grad_y: Tensor) -> None:
        self.order.append(f"backward {layer.name}")
        assert torch.equal(x, self.inputs[layer]) and y.shape == grad_y.shape

    def samples(self, layer: Layer, grads: Tensor) -> None:
        self.grads[layer] = grads


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_watched_pass_shows_every_layer(with_gradients: bool) -> None:
    net = network()
    with quiet():
        probe = make_probe(net, None, 0, batch_size=3)
        seen = Collect()
        probe.loss.watch(seen)
        if with_gradients:
            probe.loss.want_gradients()
        probe.loss.run()
    names = [layer.name for layer in probe.weighted]
    assert seen.order == [f"forward {n}" for n in names] + [f"backward {n}" for n in reversed(names)]
    net.eval()
    loss = nn.functional.cross_entropy(net(probe.images), probe.labels)
    naive = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
    for layer in probe.weighted:
        torch.testing.assert_close(seen.grads[layer].sum(0), naive[layer.weight], rtol=1e-4, atol=1e-7)
        for i in range(3):
            one = nn.functional.cross_entropy(net(probe.images[i : i + 1]), probe.labels[i : i + 1]) / 3
            (expected,) = torch.autograd.grad(one, net.get_parameter(layer.weight))
            torch.testing.assert_close(seen.grads[layer][i], expected, rtol=1e-4, atol=1e-7)
    if with_gradients:
        assert set(probe.loss.gradients) == set(naive)
        for name, gradient in probe.loss.gradients.items():
            torch.testing.assert_close(gradient, naive[name], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(probe.loss.output, net(probe.images).detach())


def test_a_pass_runs_once_and_is_not_watched_too_late(registered: None) -> None:
    runs: list[int] = []

    def make(name: str) -> None:
        @register(name, paper="-", equation="-", cost="-", needs=Needs(data=True))
        def counting(probe: Probe) -> Callable[[], Measured]:
            class Count(Watcher):
                roles = frozenset({"head"})

                def forward(self, layer: Layer, x: Tensor, y: Tensor) -> None:
                    runs.append(1)

            probe.loss.watch(Count())
            return lambda: Measured(probe.loss.output.sum())

    make("one")
    make("two")
    with quiet():
        probe = make_probe(network(), None, 0, batch_size=2)
        scores = score_network(chosen(["one", "two", "snip"]), probe)
        assert len(runs) == 2, "one forward, seen by both"
        assert scores["one"].value == scores["two"].value
        with pytest.raises(AssertionError):
            probe.loss.watch(Watcher())


# --- validity ---------------------------------------------------------------------------------------------------------


def test_a_score_is_never_nan() -> None:
    net = network()
    with torch.no_grad():
        net.get_parameter("blocks.1.mlp.fc1.weight")[0, 0] = math.nan
    score = score_one("snip", net)
    assert (score.valid, score.value) == (False, -math.inf)
    assert "not finite" in score.reason


def test_a_zero_because_no_gradient_arrives_is_no_score() -> None:
    net = network()
    with torch.no_grad():
        net.get_parameter("head.weight").zero_()
    for name in ("snip", "plain", "grad_norm"):
        score = score_one(name, net)
        assert not score.valid and "no gradient reaches layer patch_embed.proj" in score.reason


class Signs(Watcher):
    """Sees gradients of single images."""

    def samples(self, layer: Layer, grads: Tensor) -> None:
        pass


def test_gradients_that_are_not_finite_are_told_from_none() -> None:
    """Of a finite objective: the root has no derivative at 0. Signs and comparisons would hide it."""
    with quiet():
        probe = make_probe(network(), None, 0, batch_size=2)
        one = Pass(probe, lambda y: (0 * y.sum()).sqrt(), probe.images)
        one.want_gradients(["head.weight"])
        signs = Signs()
        one.watch(signs)
        assert one.flaw_for(["head.weight"], []) == "the gradient of layer head is not finite"
        assert one.flaw_for([], [signs]) == "the gradient of layer patch_embed.proj is not finite"
        assert one.flaw_for([], []) is None


def test_unsupported_pairs_say_why(registered: None) -> None:
    @register("picky", paper="-", equation="-", cost="-", unsupported={"autoformer": "it is blind"}, function=True)
    def picky(probe: Probe) -> Measured:
        raise AssertionError

    assert score_one("picky", network()).reason == "it is blind"


def test_lower_is_better_is_turned_round(registered: None) -> None:
    @register("low", paper="-", equation="-", cost="-", higher_is_better=False, function=True)
    def low(probe: Probe) -> Measured:
        return Measured(torch.tensor(3.0), torch.tensor([1.0, 2.0]), {"raw": 3.0})

    score = score_one("low", network())
    assert (score.value, score.parts, dict(score.extras)) == (-3.0, (-1.0, -2.0), {"raw": 3.0})


def test_invalid_components_take_no_part_in_ranks(registered: None) -> None:
    @register("double", paper="-", equation="-", cost="-", combines=("snip",))
    def double(raw: dict[str, Tensor]) -> Tensor:
        return raw["snip.value"].argsort().argsort() + 1.0

    rows = [{"snip": tas.Score(value)} for value in (5.0, 1.0, 3.0)]
    rows.insert(1, {"snip": tas.Score.invalid("broken")})
    scores = combined(registry.proxy("double"), rows)
    assert [score.value for score in scores] == [3.0, -math.inf, 1.0, 2.0]
    assert scores[1].reason == "snip: broken"
    assert score_one("double", network()).value == 1.0


# --- what a user may ask for ------------------------------------------------------------------------------------------


def test_mistakes_name_what_is_valid() -> None:
    net = network()
    space = {"embed_dim": [16, 24], "depth": [1, 2], "num_heads": [1, 2], "mlp_ratio": [1, 2]}
    supernet = tas.supernet(space, **BUILD)
    images = torch.zeros(2, 3, 16, 16)
    mistakes = {
        r"'snipp'.*Did you mean 'snip'": lambda: score_one("snipp", net),
        r"option of proxy 'snip'.*'temperature'": lambda: score_one("snip", net, temperature=2),
        r"init.*'xavier'.*inherited": lambda: score_one("snip", net, init="xavier"),
        r"arch: a supernet": lambda: score_one("snip", supernet),
        r"arch: give": lambda: score_one("snip", None),
        r"is not the architecture of the network": lambda: score_one("snip", net, supernet.space.smallest()),
        r"labels.*0 to 23": lambda: score_one("snip", net, images=images, labels=torch.tensor([0, 24])),
        r"labels: shape": lambda: score_one("snip", net, images=images, labels=torch.tensor([0])),
        r"images: shape": lambda: score_one("snip", net, images=images[0]),
        r"batch_size": lambda: score_one("snip", net, batch_size=0),
        r"build": lambda: score_one("snip", net, build={"num_classes": 3}),
        r"proxies: none": lambda: chosen([]),
        r"registered already": lambda: register("snip", paper="", equation="", cost="")(lambda probe: None),
    }
    for message, attempt in mistakes.items():
        with pytest.raises(UserError, match=message):
            attempt()


def test_every_proxy_describes_itself() -> None:
    for name, one in proxies().items():
        assert one.name == name and one.paper and one.equation and one.cost and one.summary and one.layers
        assert one.dtype in ("float32", "float64")
        assert (one.factory is None) == bool(one.combines)
        assert all(part in proxies() for part in one.combines)
    assert sum(len(one.unsupported) for one in proxies().values()) <= 5


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_draw_weights_from_the_seed(method: str) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (fresh(ARCH, seed, method, BUILD) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for layer in find_layers(first):
        mine, same, different = (net.get_parameter(layer.weight) for net in (first, again, other))
        assert torch.equal(mine, same)
        if layer.role == "norm":
            assert bool((mine == 1).all())
        else:
            assert not torch.equal(mine, different)
            biased = bool((layer.module.bias != 0).any())  # type: ignore[operator, union-attr]
            assert biased == (method == "normal")
    weight = first.get_parameter("blocks.1.mlp.fc2.weight").detach()  # 24 x 60
    scale = {"xavier": (2 / (24 + 60)) ** 0.5, "kaiming": (2 / 60) ** 0.5, "trunc": 0.02, "normal": 1.0}
    deviation = scale.get(method.split("_")[0], 12**-0.5)  # "uniform": from 0 to 1
    assert weight.std() == pytest.approx(deviation, rel=0.1)
    assert weight.mean() == pytest.approx(0.5 if method == "uniform" else 0.0, abs=0.1 * deviation)
    middle = weight.mean() if method == "uniform" else 0.0
    assert ((weight - middle).abs().max() < 2 * deviation) == ("uniform" in method), "how far tails go"


def test_a_supernet_lends_its_weights_or_only_its_shape() -> None:
    space = {"embed_dim": [16, 24], "depth": [1, 2], "num_heads": [1, 2], "mlp_ratio": [1, 2]}
    supernet = tas.supernet(space, **BUILD)
    arch = supernet.space.sample(seed=1)
    kept = {name: value.clone() for name, value in supernet.state_dict().items()}
    inherited = score_one("snip", supernet, arch)
    assert inherited.value == score_one("snip", supernet.subnet(arch)).value
    drawn = score_one("snip", supernet, arch, init="default")
    assert drawn.value not in (inherited.value, score_one("snip", supernet, arch, init="default", seed=1).value)
    assert all(torch.equal(value, kept[name]) for name, value in supernet.state_dict().items())


def test_the_batch_is_balanced_and_of_the_seed() -> None:
    images, labels = gaussian_batch(0, 10, 2, (3, 5), 4)
    assert images.shape == (10, 2, 3, 5) and sorted(labels.tolist()[:8]) == [0, 0, 1, 1, 2, 2, 3, 3]
    again, other = (gaussian_batch(seed, 10, 2, (3, 5), 4)[0] for seed in (0, 1))
    assert torch.equal(images, again) and not torch.equal(images, other)


@pytest.mark.slow
def test_proxies_are_listed_in_a_fixed_order(registered: None) -> None:
    """Baselines first, whatever was imported first; what others register comes last."""

    @register("foreign", paper="-", equation="-", cost="-", function=True)
    def foreign(probe: Probe) -> Measured:
        return Measured(0.0)

    names = list(proxies())
    assert names[:5] == ["params", "macs", "grad_norm", "snip", "plain"] and names[-1] == "foreign"
    assert names.index("dss") + 1 == names.index("dss_pp")
    code = "import lightning_tas.proxies.ntsr, lightning_tas as tas; print(*tas.proxies())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == names[:-1]


def test_drawing_weights_leaves_the_generators_of_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a score with fresh weights must not seed what training draws from."""

    def seeded(_: int) -> None:
        raise AssertionError("the generators of all GPUs were seeded")

    net = network()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    before = torch.get_rng_state()
    for method in ("default", *METHODS):
        assert score_one("dss", net, init=method).valid
    assert torch.equal(torch.get_rng_state(), before)
