"""Whatever a user gives as JSON or YAML answers soon: too large, too deep or repeated without end is one message."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_tas import reading
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError

BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
DEEP = "[" * 3000 + "]" * 3000
HIDDEN = "x: " + "[" * 1000 + "\n" * 5 + "]" * 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "too large"),
        ("b: &b {x: 1}\nc: {<<: *b, y: [*b, *b]}", None),
        ("a: &a [*a]", "inside itself: *a"),
        (DEEP, "nested too deeply"),
        (HIDDEN, "nested too deeply"),
        ("{a: " * 3000, "nested too deeply"),
        ("- " * 3000 + "x", "nested too deeply"),
        ("".join(" " * i + "a:\n" for i in range(1000)), "nested too deeply"),
        ("[" + "1," * 1_001 + "]", "too large"),
        ("x" * (reading.MAX_YAML + 1), "characters"),
        ("!!int x", "not valid YAML"),
        ("!!bool x", "not valid YAML"),
        ('!!int ""', "not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a: \0", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: 1\na: 2", "duplicate key 'a'"),
    ],
)
def test_yaml(text: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_VALUES", 1000)
    started = time.process_time()
    if words is None:
        assert reading.parse_yaml(text, "it")["c"] == {"x": 1, "y": [{"x": 1}, {"x": 1}]}
    else:
        with pytest.raises(UserError, match=r"^it") as found:
            reading.parse_yaml(text, "it")
        assert words in str(found.value) and len(str(found.value)) < 500
    assert time.process_time() - started < 5  # without the bounds: minutes, or a traceback


def test_yaml_says_what_recipes_mean() -> None:
    text = "a: 5e-4\nb: 1e5\nc: 2024-01-01\nd: 0x1e5\ne: &e {x: 1}\nf: {g: &g {<<: *e, x: 2}}\nh: {<<: *e, i: .5}"
    assert reading.parse_yaml(text, "it") == {
        **{"a": 5e-4, "b": 1e5, "c": "2024-01-01", "d": 0x1E5, "e": {"x": 1}},
        **{"f": {"g": {"x": 2}}, "h": {"x": 1, "i": 0.5}},
    }
    nested = "[" * reading.MAX_DEPTH + "]" * reading.MAX_DEPTH
    assert reading.parse_yaml(nested, "it") == reading.parse_json(nested, "it")


@pytest.mark.parametrize("text", [DEEP, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000, "[1,]", ""])
def test_json(text: str) -> None:
    with pytest.raises(UserError, match=r"^it is (nested too deeply|not valid JSON)"):
        reading.parse_json(text, "it")


@pytest.mark.parametrize("read", [reading.read_json, reading.read_yaml, reading.read_data])
def test_files(read: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 1000)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for path, words in [
        ("/dev/zero", "larger than"),
        (tmp_path, "is a folder"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (tmp_path / "latin", "UTF-8"),
    ]:
        with pytest.raises(UserError, match=f"arch: .*{words}"):
            read(path, "arch")
    (tmp_path / "marked.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read(tmp_path / "marked.json") == {"a": 1}


FILES = {
    "bomb.yaml": BOMB,
    "bomb_space.yaml": f"space:\n{''.join(f'  {line}' + chr(10) for line in BOMB.splitlines())}",
    "deep.yaml": f"space: {DEEP}",
    "deep.json": DEEP,
    "chain.yaml": "space: {a0: x" + "".join(f", a{i}: '{f'${{space.a{i - 1}}}' * 10}'" for i in range(1, 9)) + "}",
    "braces.yaml": "seed: '" + "${" * 3000 + "'",
}


@pytest.mark.parametrize(
    "argv",
    [
        *(["recipe=bomb.yaml"], ["recipe=bomb_space.yaml"], ["recipe=deep.yaml"], ["config=deep.yaml"]),
        *(["config=bomb.yaml"], ["recipe=chain.yaml"], ["recipe=braces.yaml"], ["ckpt=run", "resume=run"]),
        *(["recipe=quickstart", f"space={one}"] for one in ("bomb.yaml", "deep.yaml", "deep.json")),
        *(["recipe=retrain", "smoke=true", f"arch={one}"] for one in ("deep.json", "/dev/zero")),
        ["recipe=quickstart", f"space={{a: {DEEP}}}"],
        ["recipe=quickstart", "space={a: [" + "1," * 20_000 + "1]}"],
        ["recipe=quickstart", f"space.{'a.' * 3000}b=1"],
        ["recipe=quickstart", f"limits.params={'[' * 500}"],
        ["recipe=quickstart", "-m", f"seed={'[' * 500}"],
        ["recipe=quickstart", f"data.name='{'${' * 3000}'"],
    ],
    ids=lambda argv: " ".join(argv)[:50],
)
def test_commands(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("run").mkdir()
    Path("run/study.json").write_text("{}")
    Path("run/config.yaml").write_text(FILES["bomb_space.yaml"])
    started = time.process_time()
    assert main("fit", argv) == 2
    assert time.process_time() - started < 8
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 4500, err
