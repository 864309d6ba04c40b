"""DSS against the formula written out, TF-TAS's numbers layer by layer, and those of Auto-Prox's own DSS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_tas as tas
import lightning_tas.proxies.dss as dss_file
import lightning_tas.proxies.probe as probe_file
from lightning_tas.errors import UserError
from lightning_tas.proxies import nuclear
from lightning_tas.proxies.nuclear import NormCache

nuc = torch.linalg.matrix_norm
Parts = list[float]


def naive(
    net: nn.Module, size: int, released: bool = False, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Parts, Parts, float]:
    """(diversity and saliency of every block, saliency outside) by eq. 9."""
    net = copy.deepcopy(net).to(dtype)
    for name, parameter in net.named_parameters():
        if not released or name in ("cls_token", "pos_embed"):
            parameter.data = parameter.data.abs()
    net(torch.ones(1, 3, size, size, dtype=dtype)).sum().backward()
    diversity: Parts = []
    saliency: Parts = []
    outside = 0.0
    for name, module in net.named_modules():
        if name.endswith("attn"):
            diversity.append(0.0)
        if name.endswith("mlp"):
            saliency.append(0.0)
        if not isinstance(module, nn.Linear):
            continue
        assert isinstance(module.weight.grad, Tensor)
        w, g = module.weight.detach().double(), module.weight.grad.double()
        if name.endswith("attn.qkv"):
            pieces = zip(w.chunk(3), g.chunk(3), strict=True) if options.get("qkv") == "split" else [(w, g)]
            diversity[-1] += 0.0 if released else sum((nuc(a, "nuc") * nuc(b, "nuc")).item() for a, b in pieces)
        elif name.endswith("attn.proj"):
            diversity[-1] += (nuc(w, "nuc") * nuc(g, "nuc")).item()
        elif name.endswith(("fc1", "fc2")):
            saliency[-1] += (g * w).sum().item() if options.get("signed") else (g * w).abs().sum().item()
        elif name == "head":
            counted = options.get("head_weight", 0) + (options.get("layers") == "autoprox")
            product = g * w
            outside += counted * (product.sum() if options.get("signed") else product.abs().sum()).item()
        elif options.get("layers") == "autoprox":
            square = w.shape[0] == w.shape[1]
            outside += (nuc(w, "nuc") * nuc(g, "nuc") if square else (g * w).abs().sum()).item()
    return diversity, saliency, outside


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv": "split"},
        {"signed": True, "head_weight": 1},
        {"head_weight": 2},
        {"layers": "autoprox"},
        {"layers": "autoprox", "head_weight": 1, "qkv": "split"},
    ],
    ids=str,
)
def test_dss_is_its_formula(small: Any, options: dict[str, Any]) -> None:
    """As exact as float32 gradients are: positive weights give gradients of which norm layers take nearly all away."""
    diversity, saliency, outside = naive(small.net, 32, **options)
    rounded = naive(small.net, 32, dtype=torch.float32, **options)

    def near(exact: float, float32: float) -> Any:
        return pytest.approx(exact, rel=2e-5, abs=2 * abs(exact - float32))

    found = small.score("dss", **options)
    blocks = [[d + s for d, s in zip(*sums[:2], strict=True)] for sums in ((diversity, saliency), rounded)]
    assert len(found.parts) == len(blocks[0])
    assert all(part == near(*pair) for part, *pair in zip(found.parts, *blocks, strict=True))
    exact, float32 = sum(blocks[0]) + outside, sum(blocks[1]) + rounded[2]
    assert abs(exact - float32) < 1e-4 * exact
    assert found.value == near(exact, float32)
    assert found.extras["diversity"] + found.extras["saliency"] == pytest.approx(found.value, rel=1e-12)
    if options.get("layers") != "autoprox":
        assert found.extras["diversity"] == near(sum(diversity), sum(rounded[0]))


def test_released_dss_is_its_formula(small: Any) -> None:
    diversity, saliency, _ = naive(small.net, 32, released=True)
    found = small.score("dss", mode="released")
    assert found.parts == pytest.approx([d + s for d, s in zip(diversity, saliency, strict=True)], rel=2e-5)
    assert found.value == pytest.approx(sum(diversity) + sum(saliency), rel=2e-5)
    assert found.value != pytest.approx(small.score("dss").value, rel=1e-2)


def test_wrong_and_ignored_options() -> None:
    arch, build = tas.Architecture.vit(24, [1], [2]), {"img_size": 32, "num_classes": 3}
    with pytest.raises(UserError, match=r"mode of dss.*'release'.*released"):
        tas.score_one("dss", None, arch, build=build, mode="release")
    with pytest.raises(UserError, match=r"qkv of dss.*'fuse'"):
        tas.score_one("dss", None, arch, build=build, qkv="fuse")
    with pytest.raises(UserError, match=r"layers of dss"):
        tas.score_one("dss", None, arch, build=build, layers="all")
    with pytest.raises(UserError, match=r"head_weight of dss: -1"):
        tas.score_one("dss", None, arch, build=build, head_weight=-1)
    with pytest.warns(UserWarning, match=r"no effect with mode='released'"):
        tas.score_one("dss", None, arch, build=build, mode="released", head_weight=2)


def test_networks_of_a_supernet_share_the_norms_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four networks with two different widths of qkv and proj in each layer: 2 * 2 * 2 norms of weights, not 16."""
    caches: list[NormCache] = []
    keep = NormCache.__init__
    monkeypatch.setattr(NormCache, "__init__", lambda self: (keep(self), caches.append(self))[0])
    space = tas.spaces.isotropic("s", "autoformer", embed_dim=[24], depth=[2], num_heads=[1, 2], mlp_ratio=[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = tas.supernet(space, img_size=32, num_classes=3)
    archs = list(space)
    together = tas.score_many("dss", net, archs, batch_size=1)
    assert max(cache.computed for cache in caches) == 8
    alone = [tas.score_one("dss", net, arch, batch_size=1).value for arch in archs]
    assert together.value("dss").tolist() == alone


# --- reference numbers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tf_tas(golden: Any, fill: Any) -> Callable[[], Any]:
    """AutoFormer-Tiny's supernet with the reference weights (kept: filling takes a second)."""

    @lru_cache(maxsize=1)
    def make() -> Any:
        state = golden("state_autoformer_tiny.json")
        net = tas.supernet("autoformer_tiny", drop_path_rate=0.0)
        weights = {name: torch.from_numpy(fill.values(name, tuple(shape))) for name, shape in state}
        net.load_reference({"model": weights}, source="autoformer")
        return net

    return make


SIZES = ["smallest", *(pytest.param(size, marks=pytest.mark.slow) for size in ("largest", "random0", "random1"))]


@pytest.mark.parametrize("size", SIZES)
def test_dss_equals_tf_tas(size: str, golden: Any, tf_tas: Any) -> None:
    record = golden("dss_tf_tas_tiny.json")
    wanted = record["results"][size]
    arch = tas.Architecture.from_dict(wanted["config"])
    numbers = wanted["float64"] or wanted["float32"]
    found = tas.score_one("dss", tf_tas(), arch, batch_size=1)
    keys = ("msa_qkv", "msa_proj", "fc1_saliency", "fc2_saliency")
    assert found.parts == pytest.approx([sum(layer[k] for k in keys) for layer in numbers["per_layer"]], rel=2e-5)
    assert found.extras["diversity"] == pytest.approx(numbers["msa_diversity"], rel=1e-5)
    assert found.extras["saliency"] == pytest.approx(numbers["mlp_saliency"], rel=1e-5)
    assert found.value == pytest.approx(numbers["dss_msa_plus_mlp"], rel=1e-5)
    for head_weight, key in ((1, "dss_code_without_double_head"), (2, "dss_code")):
        counted = tas.score_one("dss", tf_tas(), arch, batch_size=1, head_weight=head_weight)
        assert counted.value == pytest.approx(numbers[key], rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_matrices_of_dss_equal_tf_tas(size: str, golden: Any, tf_tas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer: the nuclear norms of weights and gradients, their products and the saliencies, as they add up."""
    wanted = golden("dss_tf_tas_tiny.json")["results"][size]
    numbers = wanted["float64"] or wanted["float32"]
    terms: dict[tuple[str, int], float] = {}
    norms: dict[tuple[str, int], list[float]] = {}

    def per_block(probe: Any, found: Any, *blocks: Any, **extras: Any) -> Any:
        terms.update({(layer.role, layer.block): float(term) for layer, term in found.items()})
        # What went into the products, by the singular values instead of a Gram matrix.
        ones = dss_file.ones_pass(probe)
        for layer in probe.of("qkv", "proj"):
            matrices = (ones.weights[layer.weight], ones.gradients[layer.weight])
            norms[layer.role, layer.block] = [float(torch.linalg.svdvals(m).sum()) for m in matrices]
        return probe_file.per_block(probe, found, *blocks, **extras)

    monkeypatch.setattr(dss_file, "per_block", per_block)
    score = tas.score_one("dss", tf_tas(), tas.Architecture.from_dict(wanted["config"]), batch_size=1)
    keys = {"qkv": "msa_qkv", "proj": "msa_proj", "fc1": "fc1_saliency", "fc2": "fc2_saliency"}
    assert len(terms) == 4 * len(numbers["per_layer"])
    for block, layer in enumerate(numbers["per_layer"]):
        for role, key in keys.items():
            assert terms[role, block] == pytest.approx(layer[key], rel=2e-5), (role, block)
        diversity, saliency = layer["msa_qkv"] + layer["msa_proj"], layer["fc1_saliency"] + layer["fc2_saliency"]
        assert score.blocks["diversity"][block] == pytest.approx(diversity, rel=2e-5)
        assert score.blocks["saliency"][block] == pytest.approx(saliency, rel=2e-5)
        assert score.parts[block] == pytest.approx(diversity + saliency, rel=2e-5)
        for role in ("qkv", "proj"):
            assert norms[role, block] == pytest.approx([layer[f"{role}_nuc_w"], layer[f"{role}_nuc_g"]], rel=2e-5)
    for role in ("qkv", "proj"):
        total = sum(term for (known, _), term in terms.items() if known == role)
        assert total == pytest.approx(numbers[keys[role]], rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_released_dss_equals_tf_tas(size: str, golden: Any, tf_tas: Any) -> None:
    record = golden("dss_tf_tas_tiny.json")
    arch = tas.Architecture.from_dict(record["results"][size]["config"])
    layers = record["released_path_per_layer"][size]["per_layer"]
    found = tas.score_one("dss", tf_tas(), arch, batch_size=1, mode="released")
    assert found.parts == pytest.approx([sum(layer.values()) for layer in layers], rel=1e-5)
    assert found.value == pytest.approx(record["released_path_scores"][size], rel=1e-5)


ROWS = [("pit", 0), ("pit", 2), ("pit", 3), ("autoformer", 0)]
SLOW_ROWS = [("pit", 1), *(("autoformer", row) for row in (1, 2, 3))]


@pytest.mark.parametrize(("space", "row"), [*ROWS, *(pytest.param(*r, marks=pytest.mark.slow) for r in SLOW_ROWS)])
def test_dss_of_the_auto_prox_repository(space: str, row: int, auto_prox: Any) -> None:
    """Theirs are singular values of float32 matrices, most of them near zero: 1e-5 is their error."""
    net, scores = auto_prox(space, row)
    assert net.score("dss", layers="autoprox").value == pytest.approx(scores["dss"], rel=2e-5)


@pytest.mark.slow
def test_the_largest_base_network_has_finite_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 passes; nuclear norms of finite matrices are finite, and left out for they take most of a minute."""
    monkeypatch.setattr(nuclear, "_from_gram", lambda matrix: matrix.norm(dtype=torch.float64))
    arch = tas.space("autoformer_base").largest()
    names = ["dss", "synflow", "snip", "auto_prox_a", "auto_prox_p", "auto_prox_released"]
    scores = tas.score_many(names, None, [arch], batch_size=1, build={"img_size": 32})
    for name in names:
        assert scores.valid(name).all() and scores.value(name)[0] > 0, name
