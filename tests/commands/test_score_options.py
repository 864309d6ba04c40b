"""Options of proxies as a recipe gives them: the same in every batch group, and refused before anything is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_tas.commands import score_work
from lightning_tas.commands.entry import main
from lightning_tas.commands.score_sizes import check, groups
from lightning_tas.errors import UserError
from lightning_tas.proxies.config import BenchConfig
from lightning_tas.proxies.options import components
from lightning_tas.proxies.registry import chosen


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """To score two tiny networks of a file."""
    arch = {"layer_num": 1, "embed_dim": 16, "num_heads": [1], "mlp_ratio": [1]}
    entries = [{"arch": {**arch, "num_heads": [heads]}, "a_acc": heads} for heads in (1, 2)]
    (tmp_path / "bench.json").write_text(json.dumps({"entries": entries}))
    return [
        "recipe=vit_bench_autoformer",
        f"bench={tmp_path / 'bench.json'}",
        f"output_dir={tmp_path / 'runs'}",
        "data.img_size=32",
        "data.num_classes=10",
    ]


MISTAKES: list[tuple[list[str], list[str]]] = [
    (
        ["bench.proxies=[zen]", "bench.options={zen:{repeat:abc}}"],
        ["bench.options: repeat of zen: 'abc'", "at least 1"],
    ),
    (["plan=true", "bench.proxies=[naswot]", "bench.options={naswot:{redraw:maybe}}"], ["redraw of naswot", "true or"]),
    (["bench.proxies=[ntsr]", "bench.options={ntsr:{width:q}}"], ["bench.options: width of sept: 'q'", "embed, qkv"]),
    (["bench.proxies=[ntsr]", "bench.options={ntsr:{probe:2}}"], ["bench.options: option of proxy 'ntsr'", "'probes'"]),
    (["bench.proxies=[dss,dss_pp]", "bench.options={dss_pp:{mode:released}}"], ["bench.options: dss and dss_pp want"]),
    (["bench.proxies=[snip,zico]", "bench.options={zico:{batches:17}}"], ["bench.options: proxy 'zico'", "has 16"]),
    (
        ["bench.paper=true", "bench.proxies=[snip,auto_prox_p,zico]", "bench.options={zico:{batches:129}}"],
        ["bench.options: proxy 'zico'", "has 128"],
    ),
    (["bench.proxies=[snip]", "bench.options={snip:3}"], ["bench.options: {'snip': 3}"]),
    (["bench.proxies=3"], ["bench.proxies: 3 is not valid", "valid: all, a name"]),
    (["bench.proxies=null"], ["bench.proxies: None is not valid"]),
    (["bench.proxies=[[snip]]"], ["bench.proxies: ['snip'] is not valid"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_mistakes_leave_nothing(
    argv: list[str],
    overrides: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score_work, "score_many", lambda *given, **options: pytest.fail("networks were scored"))
    assert main("score", [*argv, *overrides]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning_tas.score: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"ntsr": {"width": "qkv", "probes": 2}, "ntkt": {"probes": 2}, "sept": {"width": "qkv"}},
        {"sept": {"width": "qkv"}},
        {"sept": {"width": "qkv"}, "ntkt": {"probes": 2}},
        {"ntsr": {"params": "paper"}, "ntkt": {"params": "paper"}},
    ],
)
def test_options_mean_the_same_in_every_group(options: dict[str, Any]) -> None:
    names = ["snip", "ntkt", "sept", "ntsr"]
    expected = components(chosen(names), options)[1]
    for paper in (False, True):
        bench = BenchConfig(proxies=names, options=options, paper=paper)
        check(names, bench)
        divided = groups(names, bench)
        assert len(divided) == (2 if paper else 1)
        for group in divided:
            parts, given = components(chosen(group.names), group.options)
            assert given == {part.name: expected[part.name] for part in parts if part.name in expected}
        with pytest.raises(UserError, match=r"bench\.options: .* want other options of sept"):
            check(names, BenchConfig(proxies=names, options={"ntsr": {"width": "qkv"}}, paper=paper))


def test_an_own_proxy(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None) -> None:
    """MODULE:NAME imports the module, which registers it; from then on it has its name."""
    (tmp_path / "my_proxies.py").write_text(
        "from lightning_tas.proxies import Measured, register\n\n"
        '@register("widths", paper="-", equation="sum of widths", cost="none", function=True)\n'
        "def widths(probe):\n"
        "    return Measured(sum(float(layer.module.weight.shape[0]) for layer in probe.weighted))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for given in ("[my_proxies:widths]", "[my_proxies:widths,snip]"):
        run = ["bench.inits=1", "bench.bootstrap=0", f"run=a{len(given)}"]
        assert main("score", [*argv, *run, f"bench.proxies={given}"]) == 0
        (scores,) = (tmp_path / "runs").glob(f"*/a{len(given)}/scores.csv")
        assert "widths" in scores.read_text().splitlines()[0].split(",")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("absent_module:widths", ["bench.proxies", "absent_module:widths", "No module named"]),
        (":widths", ["bench.proxies"]),
        ("json:snp", ["bench.proxies: 'json:snp' is not registered", "'snip'"]),
    ],
)
def test_own_proxies_that_are_none(
    argv: list[str], given: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("score", [*argv, f"bench.proxies=['{given}']"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(word in message for word in words)


IGNORED = [
    (["space=autoformer_tiny"], "space is ignored: .*bench.json"),
    (["source=prenas"], "source is ignored: .*bench.json"),
    (["bench.eval_batches=3"], "bench.eval_batches is ignored"),
    (["scoring.networks=3"], "scoring.networks is ignored: it is for fit"),
    (["trainer.precision=bf16-mixed"], "trainer.precision is ignored: score trains nothing"),
    (["train.lr=1"], "train.lr is ignored"),
    (["arch=5M"], "arch is ignored"),
    (["model.bias_rule=autoformer"], "model.bias_rule is ignored"),
    (["bench.paper=true", "bench.batch_size=8"], "bench.batch_size is ignored: bench.paper"),
    (["bench.paper=true", "bench.zen_repeat=8"], "bench.zen_repeat is ignored: bench.paper"),
    (["bench.proxies=[zen]", "bench.zen_repeat=8", "bench.options={zen:{repeat:1}}"], "bench.zen_repeat is ignored"),
]


@pytest.mark.parametrize(("overrides", "words"), IGNORED, ids=[" ".join(given) for given, _ in IGNORED])
def test_what_changes_nothing_is_said(argv: list[str], overrides: list[str], words: str) -> None:
    proxies = [] if any("bench.proxies" in one for one in overrides) else ["bench.proxies=[params]"]
    with pytest.warns(UserWarning, match=words):
        assert main("score", [*argv, *proxies, *overrides, "plan=true"]) == 0


def test_what_matters_is_not_called_ignored(argv: list[str], recwarn: pytest.WarningsRecorder) -> None:
    given = ["trainer.accelerator=cpu", "bench.batch_size=8", "data.in_chans=1", "seed=3", "bench.family=autoformer"]
    assert main("score", [*argv, *given, "bench.proxies=[params]", "plan=true"]) == 0
    assert not [warning for warning in recwarn if "is ignored" in str(warning.message)]


@pytest.mark.parametrize(
    "override", ["init=library", "init=tf_tas", "scale=true", "drop_rate=0.1", "drop_path_rate=0.2", "pool=token"]
)
def test_options_of_networks_reach_them(argv: list[str], override: str, tmp_path: Path) -> None:
    """Those that costs do not depend on as well: each is an option of the networks built."""
    key, value = override.split("=")
    quick = ["bench.proxies=[synflow]", "bench.inits=1", "bench.bootstrap=0", "run=a"]
    assert main("score", [*argv, *quick, f"model.{override}"]) == 0
    record = json.loads(next((tmp_path / "runs").glob("*/a/bench.json")).read_text())
    assert str(record["build"][key]).lower() == value


def test_options_that_networks_cannot_have_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("score", [*argv, "bench.proxies=[params]", "model.init=librar"]) == 2
    message = capsys.readouterr().err
    assert "model.init: 'librar'" in message and "library" in message and "network 0" not in message
    assert main("score", [*argv, "bench.proxies=[params]", "model.patch_size=64"]) == 2
    assert "data.img_size" in capsys.readouterr().err
