"""Paths that name nothing, or no file of weights: told before any work, by the user's key, with what is nearby."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_tas.commands.compose import config_from
from lightning_tas.commands.entry import main
from lightning_tas.commands.trained import load
from lightning_tas.errors import UserError, absent, neighbour
from lightning_tas.launch.results import find_checkpoint
from lightning_tas.supernets import load_checkpoint_file
from lightning_tas.training.checkpoint import initialise, load_network, load_supernet


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart" / "q").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / ".qq").mkdir()
    (tmp_path / "runs" / "quickstart" / "q" / "result.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("runs/quickstart/qq", "runs/quickstart/q"),
        ("runs/quickstrat/q", "runs/quickstart/q"),
        ("runs/quickstrat/r", "runs/quickstart"),
        ("run/quickstart/q/result.json", "runs/quickstart/q/result.json"),
        ("runs/quickstart/q/results.json", "runs/quickstart/q/result.json"),
        ("rns", "runs"),
        ("runs/quickstart/q/result.json/x", None),
        ("elsewhere", None),
        ("/nowhere/at/all", None),
        ("runs/" + "x" * 300, None),
    ],
)
def test_the_neighbour_of_a_path_that_is_not_there(path: str, near: str | None, runs: Path) -> None:
    assert neighbour(path) == near
    if not path.startswith("/"):
        assert neighbour(runs / path) == (None if near is None else str(runs / near))
    assert str(absent("k", path)).endswith("exist" if near is None else f"Did you mean {near!r}?")


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("evaluate", "ckpt=runs/quickstart/qq"),
        ("search", "ckpt=runs/quickstart/qq"),
        ("fit", "resume=runs/quickstart/qq"),
        ("fit", "config=runs/quickstart/qq"),
        ("fit recipe=quickstart", "train.from_checkpoint=runs/quickstart/qq"),
        ("fit recipe=retrain smoke=true", "arch=runs/quickstart/qq"),
    ],
)
def test_commands_name_the_neighbour(command: str, given: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *more = command.split()
    assert main(name, [*more, given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"lightning_tas.{name}: {given.partition('=')[0]}: 'runs/quickstart/qq'")
    assert err.endswith("Did you mean 'runs/quickstart/q'?\n") and err.count("\n") == 1
    with pytest.raises(UserError, match=r"^ckpt: .* does not exist; .*Did you mean"):
        find_checkpoint("runs/quickstart/qq")


@pytest.mark.parametrize(
    ("arch", "told"),
    [
        ("runs/t_razor_tiny/lat/search.json@best", "is neither a file, a run folder, nor a published"),
        ("autoformer_tt", "Did you mean 'autoformer_t'?"),
        ("runs/quickstart/q/result.json", "no layout is known"),
        ("runs/quickstart", "holds none of result.json"),
        ("{layer_num: 1}", ""),
    ],
)
@pytest.mark.parametrize("phases", ["[retrain]", "[supernet,measure,retrain]"])
def test_the_architecture_to_retrain_is_read_before_any_work(
    arch: str, told: str, phases: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "runs" / "quickstart" / "q" / "result.json").write_text('{"architectures": [{}]}')
    before = sorted(runs.rglob("*"))
    given = ["recipe=quickstart", "sampler.name=uniform", f"phases={phases}", "smoke=true"]
    assert main("fit", [*given, f"arch={arch}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1, err
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("name", ["a.ckpt", "a.pth", "a.safetensors"])
@pytest.mark.parametrize(("content", "why"), [(b"", "it is empty"), (b"nonsense", "")])
def test_files_that_hold_no_weights_are_named_by_the_users_key(
    name: str, content: bytes, why: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(content)
    told = f": '{name}' is not a file of weights: {why}"
    for key, read in (
        ("checkpoint", load_checkpoint_file),
        ("ckpt", load_supernet),
        ("ckpt", load_network),
        ("train.from_checkpoint", lambda path: initialise(torch.nn.Linear(1, 1), path)),
        ("ckpt", lambda path: load(config_from("evaluate", [f"ckpt={path}"]))),
        ("ckpt", lambda path: load(config_from("evaluate", [f"ckpt={path}", "source=prenas"]))),
    ):
        with pytest.raises(UserError) as caught:
            read(name)
        assert str(caught.value).startswith(key + told)
    assert main("search", ["recipe=t_razor_tiny", f"ckpt={name}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"lightning_tas.search: ckpt{told}")


@pytest.mark.parametrize("key", ["run", "output_dir", "ckpt", "resume", "config", "arch", "recipe", "data.root"])
@pytest.mark.parametrize("value", ["x" * 300, "ü" * 150, "deep/" * 1_000])
def test_a_path_that_no_file_system_takes(runs: Path, capsys: pytest.CaptureFixture[str], key: str, value: str) -> None:
    before = sorted(runs.rglob("*"))
    command = "evaluate" if key == "ckpt" else "fit"
    recipe = [] if key in ("recipe", "config", "ckpt") else ["recipe=quickstart"]
    assert main(command, [*recipe, f"{key}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightning_tas.{command}: {key}: ") and len(line) < 300, line
    assert sorted(runs.rglob("*")) == before


def test_a_folder_too_deep_for_the_run_in_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("fit", ["recipe=quickstart", f"output_dir={'deep/' * 759}d"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "output_dir: " in line and "is no path" in line
