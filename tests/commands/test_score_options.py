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
from lightning_tas.proxies.many import components
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


def test_a_space_is_no_use_beside_a_bench(argv: list[str]) -> None:
    with pytest.warns(UserWarning, match="space is ignored: .*bench.json"):
        assert main("score", [*argv, "bench.proxies=[params]", "space=autoformer_tiny", "plan=true"]) == 0
