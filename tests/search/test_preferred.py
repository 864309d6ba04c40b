"""The selection against a naive one that slices, enumerates and sorts; then the goldens of the released code."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_tas as tas
from lightning_tas import Architecture
from lightning_tas.costs import CostOptions, cost_options
from lightning_tas.errors import UserError
from lightning_tas.search import Candidate, SelectConfig, Selection, select_with
from lightning_tas.search.bins import Bins
from lightning_tas.search.isomers import elect
from lightning_tas.search.preferred import MODES, prefer, space_axes
from lightning_tas.search.saliency import IMAGENET_MEAN, IMAGENET_STD, Saliency, gaussian_images, gradient_pass
from lightning_tas.search.tables import Tables, build_tables
from lightning_tas.spaces import isotropic
from lightning_tas.spaces.predicates import Predicate
from lightning_tas.supernets.checkpoints import REFERENCE_NAMES

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


# --- goldens ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_released_selection_of_the_tiny_space(shared: Path) -> None:
    golden = json.loads((shared / "golden" / "prenas_selector_tiny.json").read_text())
    spec = importlib.util.spec_from_file_location("fill", shared / "golden" / "fill.py")
    assert spec is not None and spec.loader is not None
    fill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill)
    shapes = json.loads((shared / "golden" / "state_autoformer_tiny.json").read_text())
    net = tas.supernet("autoformer_tiny", drop_path_rate=0.0)
    state = {name: torch.from_numpy(fill.values(name, tuple(shape))) for name, shape in shapes}
    net.load_reference(state, source="prenas")

    noise = np.random.Generator(np.random.PCG64(0)).standard_normal((64, 3, 224, 224))
    mean, std = (np.array(v).reshape(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    images = torch.from_numpy((noise * std + mean).astype(np.float32))
    saliency = gradient_pass(net, net.space.largest(), images)
    sums = {ours(name): value for name, value in golden["abs_grad_sum_and_abs_weight_grad_sum"].items()}
    assert set(sums) == set(saliency)
    for name, (weight, grad) in saliency.items():
        found = [float(grad.double().abs().sum()), float((grad.double() * weight.double()).abs().sum())]
        assert found == pytest.approx(sums[name], rel=1e-4), name

    tables = build_tables(saliency, space_axes(net.space), released=True)
    steps = {"head_scores": np.diff(tables.l1_heads, axis=2), "mlp_scores": np.diff(tables.l1_mlp, axis=2)}
    for kind, table in steps.items():
        for e, width in enumerate((192, 216, 240)):
            np.testing.assert_allclose(table[:, e, 0], golden[kind][f"{width},4"], rtol=1e-4)

    elected = elect(tables, cost_options(net), **MODES["released"])
    assert len(elected) == golden["n_candidates_enumerated"]
    reach = [round(v * 10**6) for v in golden["params_range_M"]]
    assert [int(elected.costs.params.min()), int(elected.costs.params.max())] == reach
    bins = Bins.build(1.0, "Mparams", (reach[0], reach[1]), (5, 12), whole_only=True)
    candidates, empty = prefer(elected, bins, top=1)
    assert [c.bin for c in candidates] == [6, 7, 8, 9, 10, 11] and empty == (12,)
    chosen = {str(c.bin): c for c in candidates}
    for name, (expected,) in golden["selected"].items():
        layout = {k: expected[k] for k in ("layer_num", "embed_dim", "num_heads", "mlp_ratio")}
        assert chosen[name].arch == Architecture.from_dict(layout)
        assert chosen[name].score == pytest.approx(expected["score"], rel=1e-4)
        assert chosen[name].params == round(expected["num_params"] * 10**6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "margin", "limits", "bins"),
    [
        ("autoformer_tiny", 1, (5, 12), (6, 7, 8, 9, 10, 11)),
        ("autoformer_small", 5, (13, 33), (18, 23, 28, 33)),
        ("autoformer_base", 12, (30, 70), (42, 54, 66)),
    ],
)
def test_released_grids_of_the_published_spaces(
    name: str, margin: float, limits: tuple[float, float], bins: tuple[float, ...]
) -> None:
    torch.manual_seed(0)
    net = tas.supernet(name)
    found = tas.select_preferred(net, mode="released", margin=margin, limits=limits, batch_size=1)
    assert tuple(c.bin for c in found) == bins
    assert all(np.isfinite(c.score) and c.arch in net.space and c.params < c.bin * 10**6 for c in found)
    assert [c.score for c in found] == sorted(c.score for c in found)
    if name == "autoformer_base":
        # Of the published B42 only one architecture's contents fit: the released loop demands one layer of ratio 3.5.
        assert found[0].arch.num_heads == (9,) * 14 and sorted(found[0].arch.mlp_ratio) == [3] * 13 + [3.5]


def ours(name: str) -> str:
    """Our name of a reference parameter."""
    for pattern, replacement in REFERENCE_NAMES:
        name = re.sub(pattern, replacement, name)
    return name
