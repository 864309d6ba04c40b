"""Comparing strategies: curves, the table's numbers, ranks over all runs, refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata

from lightning_tas.analysis.strategies import Curve, comparison_figure, comparison_table, read_runs
from lightning_tas.errors import UserError


def test_curves_are_the_best_so_far() -> None:
    curve = Curve.of("random", 0, [1.0, -np.inf, 3.0, 2.0])
    assert curve.best.tolist() == [1, 1, 3, 3]
    assert [curve.after(n) for n in (1, 2, 3, 100)] == [1, 1, 3, 3]
    for bad in ([], [float("nan")]):
        with pytest.raises(UserError, match="random of seed 0 has no values"):
            Curve.of("random", 0, bad)


def test_table_and_figure() -> None:
    curves = [Curve.of("random", s, [1.0, 2.0 + s]) for s in range(2)] + [Curve.of("evolution", 0, [1.0, 4.0])]
    text = comparison_table(curves, "snip", [1, 2], optimum=4.0)
    random, evolution = (line.split() for line in text.splitlines()[2:])
    assert random[:2] == ["random", "2"] and random[5:8] == ["2.5", "±", "0.71"] and random[8:] == ["37.500", "0/2"]
    assert evolution[8:] == ["0.000", "1/1"]
    figure = comparison_figure(curves, "snip", 2, "title", 4.0)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [
        "random (2 seeds)", "evolution (1 seed)", "optimum of the whole space",
    ]  # fmt: skip


def write_run(folder: Path, seed: int, table: list[dict[str, Any]], **record: Any) -> Path:
    folder.mkdir()
    given = {"score": "dss_pp", "strategy": "random", "seed": seed, "space": {"id": "a"}, **record}
    (folder / "search.json").write_text(json.dumps(given))
    with (folder / "search.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return folder


def rows(rng: np.random.Generator, n: int) -> list[dict[str, Any]]:
    d, s = rng.random(n), rng.random(n)
    return [
        {"objective": 0, "dss": x + y, "dss.diversity": x, "dss.saliency": y}
        for x, y in zip(d.tolist(), s.tolist(), strict=True)
    ]


def test_rank_combined_scores_are_ranked_over_all_runs(tmp_path: Path) -> None:
    tables = [rows(np.random.default_rng(seed), n) for seed, n in ((0, 5), (1, 7))]
    folders = [write_run(tmp_path / str(i), i, table) for i, table in enumerate(tables)]
    both = [row for table in tables for row in table]
    ranks = rankdata([r["dss.diversity"] for r in both]) + rankdata([r["dss.saliency"] for r in both])
    curves = read_runs(folders)
    assert [len(curve.best) for curve in curves] == [5, 7]
    assert np.floor(2 * curves[0].best[-1]) / 2 == ranks[:5].max()
    assert np.floor(2 * curves[1].best[-1]) / 2 == ranks[5:].max()


def test_runs_that_do_not_compare_are_refused(tmp_path: Path) -> None:
    table = rows(np.random.default_rng(0), 3)
    one = write_run(tmp_path / "one", 0, table)
    for key, value in (("score", "dss"), ("space", {"id": "b"})):
        other = write_run(tmp_path / key, 0, table, **{key: value})
        with pytest.raises(UserError, match=f"runs: .*{key}.* has another {key} than"):
            read_runs([one, other])
    (one / "search.json").write_text(json.dumps({**json.loads((one / "search.json").read_text()), "table_sha256": "0"}))
    with pytest.raises(UserError, match=r"search\.csv' is damaged"):
        read_runs([one])
    (one / "search.csv").unlink()
    with pytest.raises(UserError, match=r"has no search\.csv"):
        read_runs([one])
