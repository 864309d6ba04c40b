"""The score command on tiny networks: what it reports, what it refuses, how it goes on after a stop."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_tas.commands.compose import config_from, parse
from lightning_tas.commands.entry import main
from lightning_tas.commands.score_report import Report
from lightning_tas.commands.score_sizes import PAPER, groups, size_of
from lightning_tas.commands.score_work import sample
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.proxies import many
from lightning_tas.proxies.config import BenchConfig
from lightning_tas.proxies.registry import proxies
from lightning_tas.published import read_architecture
from lightning_tas.randomness import numpy_generator
from lightning_tas.spaces import space

TINY = ("data.img_size=32", "data.num_classes=10", "bench.batch_size=4", "bench.proxies=[snip,grad_norm]")


def records(number: int = 8) -> list[dict[str, Any]]:
    generator = numpy_generator(0, "bench")
    found = []
    for _ in range(number):
        depth, width = int(generator.integers(1, 3)), int(generator.choice([16, 32]))
        heads, ratios = (generator.integers(1, 3, size=depth).tolist() for _ in range(2))
        arch = {"layer_num": depth, "embed_dim": width, "num_heads": heads, "mlp_ratio": ratios}
        found.append({"arch": arch, "a_acc": float(generator.normal()), "b_acc": float(generator.normal())})
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A file of eight tiny AutoFormer networks with two made-up accuracies."""
    path = tmp_path / "my bench.json"
    path.write_text(json.dumps({"entries": records()}))
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures: they take most of a tiny scoring's time."""
    monkeypatch.setattr(Report, "draw", lambda self, folder: {})


@pytest.fixture
def score(bench: Path, tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Run `score` in this process: `score("run", "key=value", ...)` gives (exit status, run folder)."""

    def run(name: str, *overrides: str) -> tuple[int, Path]:
        given = ["recipe=vit_bench_autoformer", f"bench={bench}", f"output_dir={tmp_path / 'runs'}", f"run={name}"]
        settings = dict(item.split("=", 1) for item in (*given, *TINY, *overrides))
        argv = [f"{key}={value}" for key, value in settings.items() if value]
        return main("score", argv), tmp_path / "runs" / "vit_bench_autoformer" / name

    return run


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def correlations(folder: Path) -> list[dict[str, Any]]:
    """What two runs of the same must agree on."""
    found = json.loads((folder / "score.json").read_text())["correlations"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def test_the_report(score: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = score("a", "bench.inits=2", "bench.bootstrap=50")
    out = capsys.readouterr().out
    assert status == 0
    rows = table(folder / "scores.csv")
    assert len(rows) == 2 * 8
    prices = [cost(read_architecture(entry["arch"]), None, img_size=32, num_classes=10) for entry in records()]
    assert [float(row["params"]) for row in rows] == [price.params for price in prices] * 2
    for row in correlations(folder):
        truth = [float(entry[row["accuracy"]]) for entry in records()]
        columns = [[float(r[row["proxy"]]) for r in rows if r["init"] == str(init)] for init in (0, 1)]
        taus = [stats.kendalltau(column, truth).statistic for column in columns]
        assert row["per_init"] == pytest.approx(taus) and row["tau_b"] == pytest.approx(np.mean(taus))
        assert row["low"] <= row["high"] and row["networks"] == 8 and row["invalid"] == 0
    assert len(table(folder / "correlations.csv")) == 2 * 4
    for name in ("a_acc", "b_acc"):
        section = out[out.index(f"{name}, at initialisation: 8 networks") :].splitlines()
        assert section[0].endswith("2 initialisations") and "M params" in section[0]
        assert [line.split()[0] for line in section[3:5]] == ["params", "macs"]
        assert {line.split()[0] for line in section[5:7]} == {"snip", "grad_norm"}
    for name in ("scatter.png", "bars.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "score.json").read_text())
    assert record["bench_sha256"] and record["versions"]["torch"] and record["proxies"]["snip"]["batch_size"] == 4


@pytest.mark.usefixtures("undrawn")
def test_the_best_proxy_comes_first_after_the_baselines(score: Callable[..., tuple[int, Path]]) -> None:
    _, folder = score("a", "bench.inits=1")
    rows = [row for row in correlations(folder) if row["accuracy"] == "a_acc"]
    mean = {
        row["proxy"]: np.mean([other["tau_b"] for other in correlations(folder) if other["proxy"] == row["proxy"]])
        for row in rows
    }
    assert [row["proxy"] for row in rows[:2]] == ["params", "macs"]
    assert mean[rows[2]["proxy"]] >= mean[rows[3]["proxy"]]


@pytest.mark.usefixtures("undrawn")
def test_same_seed_same_scores_other_seed_other_scores(score: Callable[..., tuple[int, Path]]) -> None:
    few = ("bench.inits=2", "bench.networks=4", "bench.bootstrap=20")
    folders = [score(name, *few, f"seed={seed}")[1] for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    assert correlations(folders[0]) == correlations(folders[1])
    values = [[row["snip"] for row in table(folder / "scores.csv")] for folder in folders]
    assert values[0] == values[1] and len(set(values[0]) | set(values[2])) == 16


class Interrupting:
    """Counts the networks that are scored, and stops before the one after `most`."""

    def __init__(self, most: int | None, error: type[BaseException]) -> None:
        self.most, self.error, self.scored = most, error, 0
        self._score = many.score_network

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.scored == self.most:
            raise self.error
        self.scored += 1
        return self._score(*given, **named)


@pytest.mark.usefixtures("undrawn")
def test_a_stopped_scoring_goes_on(
    score: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = score("whole", "bench.inits=2")[1]
    with monkeypatch.context() as patched:
        patched.setattr(many, "score_network", Interrupting(11, KeyboardInterrupt))
        status, folder = score("stopped", "bench.inits=2")
    err = capsys.readouterr().err
    assert status == 130 and f"lightning_tas.score resume={folder} continues it" in err
    assert not (folder / "score.json").exists()
    counted = Interrupting(None, KeyboardInterrupt)
    monkeypatch.setattr(many, "score_network", counted)
    assert main("score", [f"resume={folder}"]) == 0  # everything else is in the folder
    assert counted.scored == 5
    assert correlations(folder) == correlations(whole)
    # Finished, it is only reported again, here with another bootstrap.
    assert score("stopped", "bench.inits=2", "resume=auto", "bench.bootstrap=20")[0] == 0
    assert counted.scored == 5 and correlations(folder) != correlations(whole)


@pytest.mark.usefixtures("undrawn")
def test_a_folder_goes_on_under_the_same_settings_only(
    score: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("bench.inits=1", "bench.networks=4")
    assert score("a", *few)[0] == 0
    assert score("a", *few)[0] == 2
    assert "exists already" in capsys.readouterr().err
    assert score("a", *few, "resume=auto", "bench.batch_size=5")[0] == 2
    assert "bench.batch_size 4, now 5" in capsys.readouterr().err
    assert score("a", *few, "resume=auto", "bench.inits=2")[0] == 0  # more of the same


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["bench="], ["bench.path", "ckpt=RUN"]),
    (["bench=absent.json"], ["bench: 'absent.json' does not exist"]),
    (["bench.proxies=[snipp]"], ["bench.proxies: 'snipp'", "Did you mean 'snip'"]),
    (["bench.options={snip: {mode: x}}"], ["bench.options", "'snip'", "'mode'"]),
    (["bench.options={dss: {mode: x}}"], ["bench.options: 'dss'", "snip"]),
    (["bench.options=3"], ["bench.options: 3", "{dss: {mode: released}}"]),
    (["bench.accuracies=[c_acc]"], ["bench.accuracies: 'c_acc'", "a_acc, b_acc"]),
    (["bench.accuracies=[]"], ["bench.accuracies: []"]),
    (["bench.accuracies=[[a_acc]]"], ["bench.accuracies: ['a_acc']", "a_acc, b_acc"]),
    (["bench.init=xavier"], ["bench.init: 'xavier'", "xavier_normal"]),
    (["bench.images=real"], ["bench.images: 'real'", "gaussian, data"]),
    (["bench.inits=0"], ["bench.inits: 0"]),
    (["bench.networks=1"], ["bench.networks: 1"]),
    (["bench.family=autoformr"], ["bench.family: 'autoformr'", "Did you mean 'autoformer'"]),
    (["bench.family=pit"], ["bench.path", "network 0: base_dim", "embed_dim"]),
    (["data.img_size=8"], ["data.img_size: [8, 8]", "patch"]),
    (["bench.images=data", "bench.batch_size=100000"], ["bench.batch_size: 100000", "synthetic"]),
    (["resume=absent"], ["resume: 'absent'"]),
    (["logger=wand"], ["logger: 'wand'"]),
]
if not torch.cuda.is_available():
    MISTAKES.append((["trainer.accelerator=gpu"], ["trainer.accelerator: 'gpu'", "auto, cpu"]))


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_mistake(
    score: Callable[..., tuple[int, Path]],
    overrides: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert score("bad", *overrides)[0] == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning_tas.score: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert not (tmp_path / "runs").exists()


def test_nothing_to_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("score", []) == 2
    message = capsys.readouterr().err
    assert "recipe=vit_bench_pit" in message and "bench=FILE" in message


def test_plan_writes_nothing(
    score: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert score("a", "plan=true", "bench.inits=2")[0] == 0
    out = capsys.readouterr().out
    for word in (
        "8 networks of family autoformer",
        "a_acc, b_acc",
        "snip",
        "8 networks x 2 draws of weights",
        " h on one",
    ):
        assert word in out
    assert not (tmp_path / "runs").exists()


def test_bench_is_short_for_its_path() -> None:
    assert parse("bench=a b=c.json").key == "bench.path" and parse("bench=a b=c.json").value == "a b=c.json"
    config = config_from("score", ["recipe=vit_bench_pit", "bench={inits: 5}"])
    assert (config.bench.inits, config.bench.batch_size, config.bench.zen_repeat) == (5, 16, 4)
    with pytest.raises(UserError, match="given twice"):
        config_from("score", ["recipe=vit_bench_pit", "bench=a", "bench.path=b"])


@pytest.mark.parametrize("name", ["vit_bench_autoformer", "vit_bench_imagenet", "vit_bench_pit"])
def test_recipes(name: str) -> None:
    config = config_from("score", [f"recipe={name}"])
    bench, data = config.bench, config.data
    assert (bench.batch_size, bench.zen_repeat, bench.inits, bench.proxies, bench.paper) == (16, 4, 3, "all", False)
    assert (data.img_size, data.in_chans, bench.images) == (224, 3, "gaussian")
    imagenet = name == "vit_bench_imagenet"
    assert data.num_classes == (1000 if imagenet else 100)
    assert bench.family == ("autoformer" if imagenet else None)
    assert bench.accuracies == (["imagenet_super_acc"] if imagenet else None)


def test_sizes_of_the_papers() -> None:
    assert set(PAPER) <= set(proxies())
    everything = list(proxies())
    (one,) = groups(everything, BenchConfig())
    assert one.batch_size == 16 and set(one.names) == set(everything) and one.options["zen"] == {"repeat": 4}
    divided = groups(everything, BenchConfig(paper=True))
    assert sorted(name for group in divided for name in group.names) == sorted(everything)
    batch = {name: group.batch_size for group in divided for name in group.names}
    assert (batch["naswot"], batch["te_nas"], batch["zen"], batch["auto_prox_a"], batch["knas"]) == (
        64,
        64,
        16,
        128,
        50,
    )
    assert batch["zico"] == 64 * proxies()["zico"].options["batches"], "it splits its images"
    assert size_of("zen", BenchConfig(paper=True)).options == {"repeat": 32}
    for name, size in PAPER.items():
        proxies()[name].check_options(size.options)


def test_sampled_networks_are_distinct_and_of_the_seed() -> None:
    small = space({"name": "s", "embed_dim": [16, 32], "depth": [1, 2], "num_heads": [1, 2], "mlp_ratio": [1, 2]})
    assert len(set(sample(small, 10, 0))) == 10 and sample(small, 10, 0) == sample(small, 10, 0)
    assert sample(small, 10, 0) != sample(small, 10, 1)
    assert sample(small, 10_000, 0) == list(small.enumerate())
