"""The selection against naive ones that slice, enumerate and sort."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

import lightning_tas as tas
from lightning_tas import Architecture
from lightning_tas.costs import CostOptions, cost_options
from lightning_tas.errors import UserError
from lightning_tas.proxies.saliency import Saliency, gaussian_images, gradient_pass
from lightning_tas.proxies.slices import Tables, build_tables
from lightning_tas.search import Candidate, SelectConfig, Selection, select_with
from lightning_tas.search.isomers import elect
from lightning_tas.search.preferred import MODES, space_axes
from lightning_tas.spaces import isotropic
from lightning_tas.spaces.predicates import Predicate

SPACE = isotropic(
    "toy",
    embed_dim=[24, 40],
    depth=[2, 3],
    num_heads=[1, 2, 3],
    mlp_ratio=[0.8, 1, 2.5],
    allocated={"embed_dim": 48, "num_heads": 3, "depth": 4, "mlp_ratio": 3},
)
ENDS = (SPACE.smallest(), SPACE.largest())
OPTIONS: list[dict[str, Any]] = [
    {},
    {"relative_position": False, "qkv_bias": False, "abs_pos": False},
    {"img_size": (32, 48), "pool": "token", "in_chans": 1, "bias_rule": "autoformer"},
    {"pre_norm": False, "scale": True, "num_classes": 0},
]


def network(**options: Any) -> Any:
    net = tas.supernet(SPACE, **{"img_size": 32, "patch_size": 16, "num_classes": 50, **options}).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return net


def saliency_of(net: Any) -> Saliency:
    images = gaussian_images(0, 3, net.options["in_chans"], net.img_size)
    return gradient_pass(net, net.space.largest(), images)


class Naive:
    """Scores by slicing: a supernet whose parameters are |g * w| gives, as its sub-network's state, the summands."""

    def __init__(self, net: Any, saliency: Saliency, released: bool) -> None:
        self.net = tas.supernet(net.space, **net.options).double()
        self.saliency, self.released = saliency, released
        with torch.no_grad():
            for name, parameter in self.net.requires_grad_(False).named_parameters():
                weight, grad = saliency.get(name, (parameter, torch.zeros_like(parameter)))
                parameter.copy_((weight.double() * grad.double()).abs())
        self.widest = max(net.space.choices("embed_dim"))

    def state(self, arch: Architecture) -> dict[str, torch.Tensor]:
        return self.net.subnet_state(arch)

    def snip(self, arch: Architecture) -> float:
        total = 0.0
        for name, value in self.state(arch).items():
            if self.released and (name in ("cls_token", "pos_embed") or "rel_pos" in name):
                continue
            value = value[: arch.embed_dim] if self.released and name == "head.bias" else value
            total += float(value.sum())
        return total

    def normalised(self, arch: Architecture, norm: str) -> float:
        if norm == "none":
            return self.snip(arch)
        state = self.state(arch)
        score = 0.0
        for layer in range(arch.depth):
            mine = f"blocks.{layer}."
            if norm == "paper":
                whole = sum(p.sum() for name, p in self.net.named_parameters() if name.startswith(mine))
                score += float(sum(v.sum() for name, v in state.items() if name.startswith(mine)) / whole)
            else:
                for part in ("attn.qkv", "mlp.fc1", "mlp.fc2"):
                    name = f"{mine}{part}.weight"
                    cut = slice(self.widest)
                    w, g = (t[cut] if part == "mlp.fc2" else t[:, cut] for t in self.saliency[name])
                    score += float(state[name].sum() / (w.abs().sum() * g.abs().sum()))
        return score

    def class_of(self, arch: Architecture, classes: str) -> tuple[Any, ...]:
        if classes == "sums":
            return arch.embed_dim, arch.depth, sum(arch.num_heads), round(sum(arch.mlp_ratio), 6)
        counts = [tuple(values.count(c) for c in sorted(set(all_))) for values, all_ in self._dimensions(arch)]
        return (arch.embed_dim, arch.depth, *counts)

    def _dimensions(self, arch: Architecture) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        space = self.net.space
        return [(arch.num_heads, space.choices("num_heads")), (arch.mlp_ratio, space.choices("mlp_ratio"))]

    def elect(self, norm: str, classes: str) -> dict[tuple[Any, ...], Architecture]:
        groups: dict[tuple[Any, ...], list[Architecture]] = defaultdict(list)
        for arch in self.net.space.enumerate():
            groups[self.class_of(arch, classes)].append(arch)
        return {key: max(members, key=lambda a: self.normalised(a, norm)) for key, members in groups.items()}


@pytest.fixture(scope="module", params=range(len(OPTIONS)), ids=lambda i: str(OPTIONS[i]))
def case(request: pytest.FixtureRequest) -> tuple[Any, Saliency]:
    net = network(**OPTIONS[request.param])
    return net, saliency_of(net)


@pytest.mark.parametrize("released", [False, True])
def test_tables_equal_direct_slices(case: tuple[Any, Saliency], released: bool) -> None:
    net, saliency = case
    tables, naive = build_tables(saliency, space_axes(SPACE), released), Naive(net, saliency, released)
    archs = [SPACE.smallest(), SPACE.largest(), *SPACE.sample(seed=2, n=20)]
    for d in SPACE.choices("embed_dim"):
        for h in SPACE.choices("num_heads"):
            archs += [Architecture.vit(d, [h] * 3, [r] * 3) for r in SPACE.choices("mlp_ratio")]
    for arch in archs:
        assert tables.score(arch) == pytest.approx(naive.snip(arch), rel=1e-10)
    for norm in ("paper", "l1l1"):
        heads, mlp = tables.gains(norm)
        constant = naive.normalised(SPACE.smallest(), norm)
        for d, e in ((24, 0), (40, 1)):
            base = naive.normalised(Architecture.vit(d, [1] * 2, [0.8] * 2), norm)
            more = naive.normalised(Architecture.vit(d, [1, 3], [2.5, 0.8]), norm)
            gain = heads[e, 1, 2] - heads[e, 1, 0] + mlp[e, 0, 2] - mlp[e, 0, 0]
            assert gain == pytest.approx(more - base, rel=1e-9)
            assert constant > 0 and gain > 0


# Sums of 0.8, 1 and 2.5 in two and three layers; counts of three choices in two and three layers.
SUM_CLASSES = 2 * (5 * 6 + 7 * 10)
COUNT_CLASSES = 2 * (6 * 6 + 10 * 10)


@pytest.fixture(scope="module")
def toy() -> tuple[Any, Saliency, Tables]:
    net = network()
    saliency = saliency_of(net)
    return net, saliency, build_tables(saliency, space_axes(SPACE))


@pytest.mark.parametrize(("classes", "number"), [("sums", SUM_CLASSES), ("counts", COUNT_CLASSES)])
@pytest.mark.parametrize("norm", ["paper", "l1l1", "none"])
def test_election_equals_enumeration(toy: tuple[Any, Saliency, Tables], norm: str, classes: str, number: int) -> None:
    net, saliency, tables = toy
    naive = Naive(net, saliency, released=False)
    small = isotropic("half", embed_dim=[24, 40], depth=[2], num_heads=[1, 2, 3], mlp_ratio=[0.8, 1, 2.5])
    elected = elect(tables, cost_options(net), norm=norm, classes=classes)
    assert len(elected) == number
    archs = [elected.arch(i) for i in range(len(elected))]
    assert all(arch in SPACE for arch in archs)
    assert elected.costs.params.tolist() == [tas.cost(arch, net).params for arch in archs]
    assert elected.costs.macs.tolist() == [tas.cost(arch, net).macs for arch in archs]
    assert elected.score.tolist() == pytest.approx([naive.snip(arch) for arch in archs], rel=1e-10)
    # Exhaustive comparison on the two-layer half of the space; the rest is the same programme, tested by itself.
    naive.net.space = small
    expected = naive.elect(norm, classes)
    found = {naive.class_of(arch, classes): arch for arch in archs if arch.depth == 2}
    assert len(found) == len(expected)
    for key, arch in found.items():
        assert naive.normalised(arch, norm) == pytest.approx(naive.normalised(expected[key], norm), rel=1e-10)


def test_classes_and_numbers_of_the_published_spaces() -> None:
    for name, sums, counts in (
        ("autoformer_tiny", 1770, 1770),
        ("autoformer_small", 6585, 101_118),
        ("autoformer_base", 4476, 19_731),
    ):
        axes = space_axes(tas.space(name))
        layers, widths = max(axes.depth), len(axes.embed_dim)
        tables = random_tables(axes, layers, widths)
        for classes, number in (("sums", sums), ("counts", counts)):
            elected = elect(tables, CostOptions(), classes=classes)
            assert len(elected) == number
    skipped = elect(random_tables(axes, layers, widths), CostOptions(), **MODES["released"])
    assert len(skipped) < number and len(skipped) == 3 * sum((n + 1) * n * (n + 1) // 2 for n in (14, 15, 16))


def random_tables(axes: Any, layers: int, widths: int) -> Tables:
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.random(shape).cumsum(axis=-1)

    h, r = len(axes.num_heads), len(axes.mlp_ratio)
    heads, mlp = random(layers, widths, h), random(layers, widths, r)
    return Tables(axes, random(widths), random(layers, widths), heads, mlp, random(layers), heads, mlp)


# --- the whole selection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["paper", "released"])
@pytest.mark.parametrize("unit", ["Mparams", "GMACs"])
@pytest.mark.parametrize("top", [1, 3])
def test_selection_keeps_the_best_of_every_bin(
    toy: tuple[Any, Saliency, Tables], mode: str, unit: str, top: int
) -> None:
    net, saliency, _ = toy
    margin = 0.007 if unit == "Mparams" else 0.0001
    images = gaussian_images(0, 3, 3, (32, 32))
    found = tas.select_preferred(net, mode=mode, unit=unit, margin=margin, top=top, images=images)
    tables = build_tables(saliency, space_axes(SPACE), released=mode == "released")
    elected = elect(tables, cost_options(net), **MODES[mode])
    assert found.examined == len(elected)
    bins: dict[int, list[int]] = defaultdict(list)
    scale = 10**6 if unit == "Mparams" else 10**9
    cost = elected.costs.params if unit == "Mparams" else elected.costs.macs
    step = round(margin * scale)
    for i in range(len(elected)):
        bins[int(cost[i]) // step].append(i)
    expected = [
        (elected.arch(i), elected.score[i])
        for k in sorted(bins)
        for i in sorted(bins[k], key=lambda i: -elected.score[i])[:top]
    ]
    assert [c.arch for c in found] == [arch for arch, _ in expected]
    assert [c.score for c in found] == pytest.approx([score for _, score in expected])
    for c in found:
        assert (c.params, c.macs) == tas.cost(c.arch, net)
        value = c.params if unit == "Mparams" else c.macs
        assert round(c.bin * scale) - step <= value < round(c.bin * scale)
    assert set(found.empty_bins).isdisjoint(c.bin for c in found)
    least, most = (getattr(tas.cost(end, net), "params" if unit == "Mparams" else "macs") // step for end in ENDS)
    assert len(found.empty_bins) + len({c.bin for c in found}) == most - least + 1


def released_allocation(saliency: Saliency, parts: dict[str, list[int]], counts: list[int]) -> list[int]:
    """Choice per layer: from the largest down to the layers, still free, whose rows from the choice below score best.

    parts: matrix -> its first rows (columns for fc2) of every choice, at the greatest width, where all scores are made.
    """
    widest, layers = max(SPACE.choices("embed_dim")), sum(counts)
    chosen = [0] * layers
    for c in range(len(counts) - 1, 0, -1):
        score = {}
        for layer in (i for i in range(layers) if not chosen[i]):
            score[layer] = 0.0
            for part, ends in parts.items():
                w, g = (t.abs() for t in saliency[f"blocks.{layer}.{part}.weight"])
                w, g = (t[:widest].T if part == "mlp.fc2" else t[:, :widest] for t in (w, g))
                new = slice(ends[c - 1], ends[c])
                score[layer] += float((w[new] * g[new]).sum() / (w.sum() * g.sum()))
        for layer in sorted(score, key=lambda i: -score[i])[: counts[c]]:
            chosen[layer] = c
    return chosen


@pytest.mark.slow
def test_released_mode_step_by_step(case: tuple[Any, Saliency]) -> None:
    """Three choices, which the reference numbers of the tiny space do not have: enumerate, allocate, score, bin."""
    net, saliency = case
    naive = Naive(net, saliency, released=True)
    heads, ratios, widths = (SPACE.choices(n) for n in ("num_heads", "mlp_ratio", "embed_dim"))
    hidden = [int(r * widths[-1]) for r in ratios]
    best: dict[int, tuple[float, Architecture]] = {}
    examined = 0
    for d, depth in itertools.product(widths, SPACE.choices("depth")):
        splits = [(a, b - a, depth - b) for a, b in itertools.combinations(range(depth + 1), 2)]
        for h, r in itertools.product(splits, splits):
            h_of = released_allocation(saliency, {"attn.qkv": [192 * n for n in heads]}, list(h))
            r_of = released_allocation(saliency, {"mlp.fc1": hidden, "mlp.fc2": hidden}, list(r))
            arch = Architecture.vit(d, [heads[c] for c in h_of], [ratios[c] for c in r_of])
            examined += 1
            size, score = sum(p.numel() for p in net.subnet(arch).parameters()), naive.snip(arch)
            at = size // 7000
            if at not in best or score > best[at][0]:
                best[at] = score, arch
    images = gaussian_images(0, 3, net.options["in_chans"], net.img_size)
    found = tas.select_preferred(net, mode="released", margin=0.007, images=images)
    assert found.examined == examined
    assert [c.arch for c in found] == [best[k][1] for k in sorted(best)]
    assert [c.score for c in found] == pytest.approx([best[k][0] for k in sorted(best)])
    assert [c.bin for c in found] == pytest.approx([0.007 * (k + 1) for k in sorted(best)])


def test_selection_is_a_function_of_weights_settings_and_seed() -> None:
    net = network().float()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    first = tas.select_preferred(net.train(), margin=0.01, batch_size=4, seed=5)
    torch.manual_seed(99)
    again = tas.select_preferred(net.eval(), margin=0.01, batch_size=4, seed=5, micro_batch=4, progress=True)
    assert first.id == again.id and first == again
    assert first.id != tas.select_preferred(net, margin=0.01, batch_size=4, seed=6).id
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    data = json.loads(json.dumps(first.to_dict()))
    back = Selection.from_dict(data)
    assert back == first and back.id == first.id and back.to_dict() == first.to_dict()
    assert set(data["timing"]) == {"gradient", "tables", "elect"} and isinstance(back[0], Candidate)
    assert data["settings"]["allocation"] == "dp" and data["settings"]["seed"] == 5
    assert len(first) == len(list(first)) and first.archs == tuple(c.arch for c in first)


def test_labels_change_the_loss() -> None:
    net = network()
    images, labels = gaussian_images(1, 6, 3, (32, 32)), torch.arange(6)
    free = tas.select_preferred(net, margin=0.01, images=images)
    ce = tas.select_preferred(net, margin=0.01, images=images, labels=labels, loss="ce")
    assert ce.settings["loss"] == "ce" and ce[0].score != free[0].score
    config = SelectConfig(margin=0.01, images="data", loss="ce")
    assert select_with(config, net, images=images, targets=labels).candidates == ce.candidates
    with pytest.raises(UserError, match="'data' needs a batch"):
        select_with(config, net)
    with pytest.raises(UserError, match="needs images and labels"):
        select_with(SelectConfig(loss="ce"), net)
    with pytest.raises(UserError, match=r"select\.images"):
        select_with(SelectConfig(images="pictures"), net)


def test_limits_and_a_narrower_space() -> None:
    net = network()
    inner = isotropic("inner", embed_dim=[24], depth=[2], num_heads=[1, 2], mlp_ratio=[1, 2.5])
    found = tas.select_preferred(net, inner, margin=0.01, limits=(0.045, None), batch_size=2)
    assert all(c.arch in inner and c.params >= 45_000 for c in found)
    assert found.settings["space"] == inner.id
    config = SelectConfig(margin=0.01, low=0.045, batch_size=2)
    assert select_with(config, net, inner) == found


def test_mistakes() -> None:
    net = network()
    reach = "reaches 0.0[0-9]+ to 0.1[0-9]+ Mparams"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"limits": (5, 12)}, f"no architecture has 5 to 12 Mparams.*{reach}"),
        ({"margin": 2e-6, "limits": (0.06, 0.060001)}, f"none of the 200 isomer classes.*{reach}"),
        ({"margin": 3, "limits": (0, 2), "mode": "released"}, f"wider than the limits.*{reach}"),
        ({"mode": "papre"}, "Did you mean 'paper'"),
        ({"allocation": "released"}, "classes='counts'"),
        ({"norm": "l1"}, "Did you mean 'l1l1'"),
        ({"classes": "sum"}, "Did you mean 'sums'"),
        ({"allocation": "greedy"}, "evenly spaced"),
        ({"top": 0}, "top"),
        ({"limits": (5,)}, "limits: .*pair"),
        ({"space": "autoformer_tiny"}, "expected a SearchSpace, got str"),
        ({"unit": "params"}, "Did you mean 'Mparams'"),
    ]
    calls: list[tuple[int, int]] = []
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            tas.select_preferred(net, progress=lambda *r: calls.append(r), **{"margin": 0.01, **arguments})
    assert not calls  # all refused before any gradient
    large = isotropic("large", embed_dim=[64], depth=[2], num_heads=[1], mlp_ratio=[1])
    with pytest.raises(UserError, match="embed_dim"):
        tas.select_preferred(net, large)
    tied = tas.SearchSpace("tied", "autoformer", SPACE.dimensions, [Predicate("divisible", ("embed_dim", "num_heads"))])
    with pytest.raises(UserError, match="no predicates"):
        tas.select_preferred(net, tied)


def test_a_layer_without_gradient_is_named() -> None:
    net = network()
    with torch.no_grad():
        net.blocks[1].attn.proj.weight.zero_()
    with pytest.raises(UserError, match="no gradient reaches layer 1"):
        tas.select_preferred(net, mode="released", margin=0.01, batch_size=2)
    assert len(tas.select_preferred(net, margin=0.01, batch_size=2))
    with torch.no_grad():
        net.head.weight.zero_()
    for norm in ("paper", "none"):
        with pytest.raises(UserError, match="no gradient reaches layer 0"):
            tas.select_preferred(net, norm=norm, margin=0.01, batch_size=2)
