"""The score command whole: on a supernet, over two processes, stopped by a signal, on W&B, on the real benches."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.commands.entry import main
from lightning_tas.commands.score_report import Report
from lightning_tas.proxies.registry import proxies

from ..commands.test_score import correlations, records, table
from ..launch.wandb_records import attempts

FEW = ("bench.proxies=[snip,grad_norm]", "bench.batch_size=4", "bench.bootstrap=50")


def bench_call(folder: Path, name: str, *overrides: str, networks: int = 6) -> list[str]:
    """Arguments of a scoring of tiny networks."""
    path = folder / "bench.json"
    path.write_text(json.dumps(records(networks)))
    given = ["recipe=vit_bench_autoformer", f"bench={path}", f"output_dir={folder / 'runs'}", f"run={name}"]
    given += ["data.img_size=32", "data.num_classes=10", "bench.inits=2", *FEW, *overrides]
    return [f"{key}={value}" for key, value in dict(item.split("=", 1) for item in given).items()]


@pytest.mark.slow
def test_against_accuracies_in_a_supernet(
    fit: Callable[..., tuple[int, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, run = fit("trained", "trainer.max_epochs=1")
    assert status == 0
    call = [f"ckpt={run}", "bench.networks=5", "bench.inits=2", *FEW, f"output_dir={tmp_path / 'runs'}", "run=scored"]
    assert main("score", call) == 0
    folder = tmp_path / "runs" / "quickstart" / "scored"
    out = capsys.readouterr().out
    assert "inherited_top1, at initialisation: 5 networks" in out and "inherited_top1, with the trained weights" in out
    measured = json.loads((folder / "accuracies.json").read_text())
    assert measured["samples"] == 144 and len(measured["top1"]) == 5  # of the validation split, not the 360 of the test
    rows = table(folder / "scores.csv")
    assert [row["weights"] for row in rows] == ["initial"] * 10 + ["trained"] * 5
    assert {row["id"]: float(row["inherited_top1"]) for row in rows} == measured["top1"]
    by_weights = [{row["snip"] for row in rows if row["weights"] == weights} for weights in ("initial", "trained")]
    assert not by_weights[0] & by_weights[1]
    for name in ("scatter", "bars", "scatter-trained", "bars-trained"):
        assert (folder / f"{name}.png").exists()
    assert main("score", [f"ckpt={run}", "data.search_val=0", *FEW]) == 2
    assert "data.search_val: 0" in capsys.readouterr().err


# One launch for two scorings, of a bench and of a supernet: a process takes longer to start than to do either. Each
# has a store of its own, for that of the launcher's agent is for one command.
BOTH = """
import json, os, sys
from lightning_tas.commands.entry import main
statuses = []
for port, call in json.loads(sys.argv[1]):
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    statuses.append(main("score", call))
raise SystemExit(max(statuses))
"""


@pytest.mark.slow
def test_two_processes_score_as_one(fit: Callable[..., tuple[int, Path]], processes: Any, tmp_path: Path) -> None:
    status, run = fit("trained", "trainer.max_epochs=1", "phases=[supernet]", "sampler.name=uniform")
    assert status == 0

    def calls(name: str) -> list[list[str]]:
        of_run = [f"ckpt={run}", "bench.networks=5", "bench.inits=2", *FEW]
        return [
            bench_call(tmp_path, name, networks=5),
            [*of_run, f"output_dir={tmp_path / 'runs'}", f"run=scored-{name}"],
        ]

    assert [main("score", call) for call in calls("one")] == [0, 0]
    script = tmp_path / "both.py"
    script.write_text(BOTH)
    ports = [sys.modules["processes"].free_port() for _ in range(2)]
    both = processes.torchrun(script, json.dumps(list(zip(ports, calls("two"), strict=True))))
    processes.wait(both, timeout=300)
    for recipe, prefix in (("vit_bench_autoformer", ""), ("quickstart", "scored-")):
        one, two = (tmp_path / "runs" / recipe / f"{prefix}{name}" for name in ("one", "two"))
        assert correlations(one) == correlations(two)
        assert table(one / "scores.csv") == table(two / "scores.csv")
        for file in one.glob("scores-*.csv"):
            assert [line["place"] for line in table(two / file.name)] == [line["place"] for line in table(file)]
    assert len(table(one / "scores.csv")) == 15
    assert json.loads((one / "accuracies.json").read_text()) == json.loads((two / "accuracies.json").read_text())
    assert both[0].stdout.count("at initialisation") == 3 and both[1].stdout == ""


@pytest.mark.slow
def test_a_signal_leaves_what_goes_on(processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM: status 143, the networks scored so far are kept, and only the others are scored then."""
    networks = 150
    argv = ("python", "-m", "lightning_tas.score", *bench_call(tmp_path, "a", "bench.inits=1", networks=networks))
    process = processes.command(*argv, fork=True)
    folder = tmp_path / "runs" / "vit_bench_autoformer" / "a"
    file, end = folder / "scores-init0.csv", time.monotonic() + 60
    while not file.exists() or len(file.read_text().splitlines()) < 4:
        assert process.status is None and time.monotonic() < end
        time.sleep(0.02)
    process.send(signal.SIGTERM)
    assert processes.wait([process], timeout=60, check=False) == [143]
    assert f"resume={folder} continues it" in process.stderr and "Traceback" not in process.stderr
    text = file.read_text()
    whole = text[: text.rindex("\n") + 1]  # the last line may have been half-written
    assert 4 <= whole.count("\n") <= networks
    monkeypatch.setattr(Report, "draw", lambda self, folder: {})
    assert main("score", [f"resume={folder}"]) == 0
    assert file.read_text().startswith(whole) and len(table(folder / "scores.csv")) == networks


@pytest.mark.slow
def test_wandb_shows_table_pictures_numbers_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main("score", bench_call(tmp_path, "a", "logger=wandb", "wandb.mode=offline", networks=4)) == 0
    folder = tmp_path / "runs" / "vit_bench_autoformer" / "a"
    (attempt,) = attempts(folder)
    media = {path.name.partition("_")[0] for path in attempt.folder.rglob("media/*/score/*")}
    assert media == {"correlations", "scatter", "bars"}
    found = correlations(folder)
    (row,) = attempt.rows
    shown = attempt.table(row, "score/correlations")
    assert len(shown) == len(found) == 2 * 4
    for line, known in zip(shown, found, strict=True):
        assert {key: line[key] for key in ("weights", "accuracy", "proxy", "tau_a", "tau_b", "networks")} == {
            key: known[key] for key in ("weights", "accuracy", "proxy", "tau_a", "tau_b", "networks")
        }
    summary = {key: value for update in attempt.of("summary") for key, value in update["update"].items()}
    expected = {f"score/{known['weights']}/{known['accuracy']}/{known['proxy']}": known["tau_b"] for known in found}
    assert {key: value for key, value in summary.items() if key.startswith("score/initial/")} == expected
    (kept,) = attempt.artifacts("score")
    held = {entry["path"]: Path(entry["local_path"]) for entry in kept["manifest"]["contents"]}
    assert held.keys() == {"scores.csv", "correlations.csv", "score.json"}
    assert all(copied.read_bytes() == (folder / name).read_bytes() for name, copied in held.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "file", "columns", "chosen"),
    [
        ("vit_bench_autoformer", "autoformer", 6, "[snip]"),
        ("vit_bench_imagenet", "autoformer", 1, "[snip]"),
        ("vit_bench_pit", "pit", 6, "all"),
    ],
)
def test_smoke(recipe: str, file: str, columns: int, chosen: str, shared: Path, tmp_path: Path) -> None:
    """The first networks of the real benches, on small images."""
    shutil.copy(shared / "vit_bench_101" / f"{file}.json", tmp_path / "bench.json")
    call = [f"recipe={recipe}", f"bench={tmp_path / 'bench.json'}", "smoke=true", f"bench.proxies={chosen}"]
    networks = 2 if chosen == "all" else 4
    given = [f"bench.networks={networks}", "bench.inits=1", "bench.bootstrap=0", f"output_dir={tmp_path}", "run=a"]
    assert main("score", [*call, *given]) == 0
    found = correlations(tmp_path / recipe / "a")
    assert len({row["accuracy"] for row in found}) == columns
    assert {row["proxy"] for row in found} == (set(proxies()) if chosen == "all" else {"params", "macs", "snip"})
    assert all(row["published_tau"] is None for row in found), "of some networks nothing is published"
