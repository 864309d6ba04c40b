"""Code that a file names runs only where the command line says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from lightning_tas import plugins
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.entry import main
from lightning_tas.commands.fit import settings_of
from lightning_tas.data import registry
from lightning_tas.errors import UserError

EVIL = """from pathlib import Path
from lightning_tas.data import register

Path(r"{folder}/ran").touch()
register("evil")(lambda config: None)
"""


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that somebody has sent, with a module in it that leaves a trace when it is imported."""
    registry.names()  # the built-in ones are there
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    run = tmp_path / "run"
    run.mkdir()
    (run / "evil.py").write_text(EVIL.format(folder=tmp_path))
    (run / "study.json").write_text('{"phases": []}')
    (run / "bench.json").write_text("{}")
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(run)  # as `python -m` does with the current folder
    yield run
    sys.modules.pop("evil", None)


CKPT = ("evaluate", "search", "export", "score")
SETTINGS = {
    "data.name": {"data": {"name": "evil:load"}},
    "sampler.name": {"sampler": {"name": "evil:load"}},
    "scoring.proxies": {"scoring": {"proxies": ["snip", "evil:load"]}},
    "search.score": {"search": {"strategy": "random", "score": "evil:load"}},
    "search.strategy": {"search": {"strategy": "evil:load", "score": "snip"}},
    "search.options": {"search": {"strategy": "etas", "score": "snip", "options": {"filter": "evil:load"}}},
}


@pytest.mark.parametrize("key", SETTINGS)
def test_a_file_does_not_name_code(key: str, received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (received / "config.yaml").write_text(yaml.safe_dump(SETTINGS[key]))
    (received / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["quickstart"], **SETTINGS[key]}))
    others = [("fit", "config=config.yaml"), ("fit", "resume=."), *((one, "ckpt=.") for one in CKPT)]
    for command, argument in [("fit", "recipe=./mine.yaml"), *(others if key == "data.name" else ())]:
        assert main(command, [argument]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "trust=true on the command line" in err
        assert all(word in err for word in (key, "'evil:load'", str(received / "evil.py"), ".yaml")), err
    assert not (received.parent / "ran").exists() and "evil" not in sys.modules


def test_a_bench_of_a_file(received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (received / "mine.yaml").write_text("defaults: [vit_bench_pit]\nbench: {proxies: [evil:load], path: bench.json}\n")
    assert main("score", ["recipe=mine.yaml"]) == 2
    assert "bench.proxies: 'evil:load' is code that" in capsys.readouterr().err
    assert not (received.parent / "ran").exists()


@pytest.mark.parametrize("argument", ["trust=true", "data.name=evil:load"])
def test_the_command_line_does(argument: str, received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (received / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["quickstart"], **SETTINGS["data.name"]}))
    assert main("fit", ["recipe=mine.yaml", argument]) == 2
    assert "data.name: 'evil:load' is not registered" in capsys.readouterr().err
    assert (received.parent / "ran").exists()  # imported, as asked


def test_no_file_trusts_itself(received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (received / "config.yaml").write_text(yaml.safe_dump({"trust": True, **SETTINGS["data.name"]}))
    for argument in ("recipe=config.yaml", "config=config.yaml", "resume=."):
        assert main("fit", [argument]) == 2
        assert "on the command line" in capsys.readouterr().err
    assert not (received.parent / "ran").exists()


def test_a_run_does_not_read_the_environment(received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (received / "config.yaml").write_text("wandb: {name: '${oc.env:HOME}'}\n")
    assert main("fit", ["config=config.yaml"]) == 2
    assert "config.yaml: 1 interpolations (${...}) are too many; write values out" in capsys.readouterr().err


def test_what_continues_a_run_says_trust_where_it_is_needed() -> None:
    with plugins.command_line():
        assert plugins.trust_argument() == ""
        plugins.allow({"data.name": "json:load"}, "")
        with pytest.raises(UserError, match="not registered"):
            plugins.resolve("data.name", "json:load", dict, "register")
        assert plugins.trust_argument() == " trust=true"
    assert plugins.trust_argument() == ""  # Python's callers are asked nothing
    config = config_from("fit", ["recipe=quickstart", "trust=true"])
    assert config.trust and settings_of(config).hash == settings_of(config_from("fit", ["recipe=quickstart"])).hash
