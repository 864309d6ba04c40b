"""`scoring.proxies` in a recipe: what the run folder and W&B show of it, beside a training that stays the same."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "launch"))
from wandb_records import attempts

Fit = Callable[..., tuple[int, Path]]
SCORING = ("phases=[select,supernet]", "scoring.proxies=[snip,dss_pp]", "scoring.networks=4", "scoring.batch_size=4")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_study_with_scoring(fit: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    status, plain = fit("plain", *SCORING, "scoring.proxies=[]")
    assert status == 0 and not list(plain.glob("scoring*"))
    status, scored = fit("scored", *SCORING, "logger=wandb", "wandb.mode=offline")
    assert status == 0
    assert {path.name for path in scored.glob("scoring*")} == {"scoring.csv", "scoring.json", "scoring.png"}
    found = rows(scored / "scoring.csv")
    assert [row["epoch"] for row in found] == ["0"] * 8 + ["1"] * 8 + ["2"] * 8
    assert set(json.loads((scored / "scoring.json").read_text())["networks"]) == {row["network"] for row in found}

    metrics, without = rows(scored / "metrics.csv"), rows(plain / "metrics.csv")
    trained = [{key: row[key] for key in without[0]} for row in metrics if not row["score/top1"]]
    assert trained == without and len(metrics) == len(without) + 3

    (attempt,) = attempts(scored)
    last = max(int(row["step"]) for row in metrics)
    shown = [row for row in attempt.rows if "score/top1" in row]
    assert [row["score/step"] for row in shown] == [0, last // 2, last]
    assert [row["score/top1"] for row in shown] == [float(row["score/top1"]) for row in metrics if row["score/top1"]]
    tables = [row for row in attempt.rows if "score/networks.path" in row]
    lines = attempt.table(tables[-1], "score/networks")
    assert [(line["network"], line["proxy"]) for line in lines] == [(r["network"], r["proxy"]) for r in found[-8:]]
    assert len([row for row in attempt.rows if any(key.startswith("score/scatter") for key in row)]) == len(tables) == 3


def test_scoring_without_a_supernet_to_train_is_said_to_be_ignored(fit: Fit) -> None:
    arch = "arch={layer_num: 1, embed_dim: 32, num_heads: [1], mlp_ratio: [2]}"
    with pytest.warns(UserWarning, match="scoring is ignored: it goes with the phase 'supernet'"):
        status, _ = fit("a", "phases=[retrain]", arch, "scoring.proxies=[snip]", "plan=true")
    assert status == 0
