"""What a command says of itself, and that the package as a whole is one too."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from lightning_tas.commands import entry
from lightning_tas.commands.entry import any_command, main
from lightning_tas.commands.help import ABOUT, OWN
from lightning_tas.version import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", OWN)
def test_help_shows_a_commands_own_keys_first(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, ["--help"]) == 0
    text = capsys.readouterr().out.partition("keys (key=value")[2]
    own, _, others = text.partition("keys of other commands")
    for name in OWN[command]:
        assert re.search(rf"^(  )?{name}[.=]", own, re.M)
    assert "  trainer.max_epochs=" in others and "  trainer.max_epochs=" not in own
    assert own.splitlines()[1].startswith(f"  {OWN[command][0]}=")


def test_the_package_answers_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["lightning-tas"]
    assert script == f"{any_command.__module__}:{any_command.__name__}"
    for words in ([], ["--help"]):
        assert any_command(words) == 0
        out = capsys.readouterr().out
        assert all(f"  {command} " in out for command in ABOUT)
    assert any_command(["export", "--help"]) == 0 and "usage: python -m lightning_tas.export" in capsys.readouterr().out
    assert any_command(["fti", "recipe=quickstart"]) == 2 and "Did you mean 'fit'?" in capsys.readouterr().err
    assert any_command(["fit", "recipe=quickstrat"]) == 2 and "Did you mean 'quickstart'" in capsys.readouterr().err
    assert main("score", ["--version"]) == 0 and capsys.readouterr().out == f"lightning_tas {__version__}\n"
    call = [sys.executable, "-m", "lightning_tas", "--version"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"lightning_tas {__version__}\n")


def test_the_console_script_finds_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m` does."""
    (tmp_path / "mine_of_here.py").write_text("def largest(config, source, seed): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert any_command(["fit", "recipe=quickstart", "sampler.name=mine_of_here:largest", "plan=true"]) == 2
    assert "is not registered" in capsys.readouterr().err  # it was found
    sys.modules.pop("mine_of_here", None)


def test_a_warning_is_one_line_of_the_command() -> None:
    """Without the line of source that Python adds; of Lightning's, which formats its own, and ours alike."""
    written: list[str] = []

    def show(*args: object) -> None:
        written.append(warnings.formatwarning(*args))  # type: ignore[arg-type]

    before = warnings.formatwarning
    entry._beside_bars("fit", show, UserWarning("arch is ignored"), UserWarning, "compose.py", 85)
    assert written == ["lightning_tas.fit: warning: arch is ignored\n"] and warnings.formatwarning is before
