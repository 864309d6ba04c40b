"""Scores and selections of the released PreNAS code, and its grids of bins on the published spaces."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_tas as tas
from lightning_tas import Architecture
from lightning_tas.costs import cost_options
from lightning_tas.proxies.saliency import IMAGENET_MEAN, IMAGENET_STD, gradient_pass
from lightning_tas.proxies.slices import build_tables
from lightning_tas.search.bins import Bins
from lightning_tas.search.isomers import elect
from lightning_tas.search.preferred import MODES, prefer, space_axes
from lightning_tas.supernets.checkpoints import REFERENCE_NAMES


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
