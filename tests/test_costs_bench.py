"""Parameters against published networks and against the accuracies of ViT-Bench-101: the baseline of every proxy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy.stats import kendalltau

import lightning_tas as tas
from lightning_tas.catalogue import PUBLISHED

# Kendall's tau-b of the parameter count with accuracy after distillation: CIFAR-100, Flowers, Chaoyang.
TAU = {"autoformer": (0.548, 0.700, 0.315), "pit": (0.819, 0.856, 0.566)}


@pytest.mark.parametrize("bench", TAU)
def test_rank_correlation_of_params_with_accuracy(shared: Path, bench: str) -> None:
    entries = json.loads((shared / "vit_bench_101" / f"{bench}.json").read_text())["entries"]
    params = tas.cost([tas.Architecture.from_dict(entry["arch"]) for entry in entries], num_classes=100).params
    # To two decimals: the file has one count of Chaoyang's 2139 test images as 82.9359 % and as 82.936 %.
    accuracies = [[round(entry[f"{data}_kd_acc"], 2) for entry in entries] for data in ("c100", "flower", "chaoyang")]
    found = [kendalltau(params, accuracy).statistic for accuracy in accuracies]
    assert found == pytest.approx(TAU[bench], abs=0.0005)


@pytest.mark.parametrize(
    ("name", "params", "giga"),
    [
        ("pit_ti", 4_847_272, 0.70),
        ("pit_xs", 10_618_888, 1.39),
        ("pit_s", 23_461_912, 2.87),
        ("tf_tas_pit_ti", 4_732_120, 0.67),
        ("tf_tas_pit_xs", 10_643_464, 1.83),
        ("tf_tas_pit_s", 24_966_496, 3.41),
    ],
)
def test_published_pits(name: str, params: int, giga: float) -> None:
    found = tas.cost(PUBLISHED[name])
    assert found.params == params and round(found.macs / 1e9, 2) == giga


def test_codes_without_what_a_pit_has() -> None:
    space = tas.space("pit_ti")
    for lacking in ("base_dim", "mlp_ratio", "num_heads"):
        dimensions = [d for d in space.dimensions if d.name != lacking]
        less = tas.SearchSpace("less", "pit", dimensions, stages=3)
        with pytest.raises(tas.UserError, match=f"'less' cannot be counted: it has no {lacking} where a PiT"):
            tas.cost(less.sample_codes(0, 3), less)
