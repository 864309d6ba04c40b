"""What papers report for proxies on ViT-Bench-101, to be shown beside what is measured here, and for nothing else.

Auto-Prox (https://arxiv.org/abs/2312.09059): table 2 (distilled accuracies), table 5 (ImageNet) and table 6 (plain
training of PiT), all in per cent there. They are of the 40 % of its networks that the paper evaluates on, which it does
not name, each with its own first weights and batch; those of table 5 are from all widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

PUBLISHED_ON = "on 40 % of the networks, which it does not name"


class Published(NamedTuple):
    """Kendall's tau, Spearman's rho, Pearson's r and where they are printed; None is what the paper leaves out."""

    tau: float | None
    spearman: float | None
    pearson: float | None
    source: str


# The paper's columns of proxies, in the order of its tables; the last is its own, one formula for each family.
_PROXIES = ("grasp", "synflow", "te_nas", "naswot", "dss")
_OWN = {"autoprox_vit": "auto_prox_a", "autoformer": "auto_prox_a", "pit": "auto_prox_p"}
_TABLE_2: dict[tuple[str, str], list[tuple[float, float, float]]] = {
    ("autoprox_vit", "c100_kd_acc"): [
        (0.84, 1.35, 0.82),
        (37.66, 52.89, 52.01),
        (-30.03, -43.27, -42.66),
        (54.65, 63.11, 60.01),
        (35.89, 50.84, 50.51),
        (55.67, 63.87, 60.56),
    ],
    ("autoprox_vit", "flower_kd_acc"): [
        (0.82, -7.33, -4.14),
        (62.59, 82.13, 62.26),
        (-53.55, -73.79, -54.17),
        (68.16, 82.06, 53.91),
        (63.90, 83.28, 62.80),
        (69.19, 83.65, 79.52),
    ],
    ("autoprox_vit", "chaoyang_kd_acc"): [
        (-4.42, -6.53, 6.26),
        (27.87, 39.30, 41.08),
        (-27.81, -39.69, -40.79),
        (27.29, 38.96, 40.57),
        (27.14, 38.52, 40.57),
        (33.76, 41.76, 42.63),
    ],
    ("pit", "c100_kd_acc"): [
        (-42.02, -58.71, -31.53),
        (69.79, 87.05, 70.80),
        (-2.13, -3.21, -1.68),
        (-2.61, -4.13, -0.52),
        (63.83, 82.20, 58.37),
        (82.07, 95.12, 73.25),
    ],
    ("pit", "flower_kd_acc"): [
        (-50.66, -69.64, -40.90),
        (62.22, 79.98, 71.66),
        (-2.86, -4.23, -3.33),
        (2.67, 3.69, 0.71),
        (64.48, 82.91, 67.23),
        (79.25, 92.94, 79.53),
    ],
    ("pit", "chaoyang_kd_acc"): [
        (-16.00, -22.94, -19.07),
        (30.96, 42.66, 39.24),
        (-3.34, -5.04, -3.55),
        (4.73, 6.87, 4.43),
        (37.99, 52.92, 42.68),
        (41.67, 55.09, 49.17),
    ],
}
_TABLE_5: dict[str, tuple[float, float, float]] = {
    "snip": (14.61, 30.62, 49.45),
    "synflow": (14.81, 27.69, 44.19),
    "naswot": (13.34, 19.79, 38.39),
    "dss": (14.52, 29.93, 48.70),
    "auto_prox_a": (25.44, 37.10, 51.84),
}
_TABLE_6: dict[str, dict[str, float]] = {
    "c100_base_acc": {"synflow": 86.88, "naswot": -0.45, "dss": 84.79, "auto_prox_p": 91.01},
    "flower_base_acc": {"synflow": 86.57, "naswot": 1.98, "dss": 86.51, "auto_prox_p": 90.70},
    "chaoyang_base_acc": {"synflow": 64.51, "naswot": -2.26, "dss": 69.09, "auto_prox_p": 76.95},
}


def published(family: str, column: str, columns: Iterable[str]) -> Mapping[str, Published]:
    """Proxy to published figures for the accuracy `column` of a bench that has these `columns`; often empty.

    A bench is taken for ViT-Bench-101 where it has the family and all the columns that the release has of a kind.
    """
    known = set(columns)
    if (family, column) in _TABLE_2 and {name for who, name in _TABLE_2 if who == family} <= known:
        names = (*_PROXIES, _OWN[family])
        rows = zip(names, _TABLE_2[family, column], strict=True)
        return {name: Published(*_shares(row), "Auto-Prox table 2") for name, row in rows}
    if family == "autoformer" and column == "imagenet_super_acc":
        return {name: Published(*_shares(row), "Auto-Prox table 5") for name, row in _TABLE_5.items()}
    if family == "pit" and column in _TABLE_6 and set(_TABLE_6) <= known:
        row = _TABLE_6[column]
        return {name: Published(None, value / 100, None, "Auto-Prox table 6") for name, value in row.items()}
    return {}


def _shares(row: tuple[float, float, float]) -> tuple[float, float, float]:
    """Per cent as numbers from -1 to 1."""
    tau, spearman, pearson = (value / 100 for value in row)
    return tau, spearman, pearson
