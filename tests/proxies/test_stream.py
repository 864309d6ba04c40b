"""Files of scores: what damage says, torn ends, paths that are none, ten thousand networks."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies import stream
from lightning_tas.proxies.stream import settings_path

from .score_files import ARCHS, NET, finish, keeper, places, row, score


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock."""
    monkeypatch.setattr(stream, "LOCK_SECONDS", 0.0)


DAMAGE = {
    "blank": b"\n",
    "blanks": b"\n  \n",
    "word": b"hello\n",
    "no text": b"\xff\xfe\n",
    "quote": b'"\n',
    "zeros": b"\0" * 40 + b"\n",
    "few": b"3,abc\n",
    "carriage return": b"1\r2\n",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_inside_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "scores.csv"
    score(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for number in (1, 3, 6):
        damaged = b"".join([*lines[:number], DAMAGE[kind], *lines[number:]])
        path.write_bytes(damaged)
        for options in ({}, {"shard": (0, 2)}):
            with pytest.raises(UserError, match=rf"path: line {number + 1} of '.*scores.csv' is damaged.*resume=False"):
                score(path, **options)
        assert path.read_bytes() == damaged
    (tmp_path / "scores.part1.csv").write_bytes(damaged)
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"path: line 7 of '.*scores.part1.csv' is damaged"):
        score(path)
    assert score(path, resume=False).archs == ARCHS


def test_a_flipped_bit_anywhere_in_a_line_is_named(tmp_path: Path) -> None:
    """The value of a score, too: a digit that became another one is a number like any other."""
    path = tmp_path / "scores.csv"
    one = keeper(path)
    one.begin()
    one.append(row(0)), one.append(row(1)), one.append(row(2))
    finish(one)
    content = path.read_bytes()
    start = len(b"".join(content.splitlines(keepends=True)[:2]))
    for place in range(start, content.index(b"\n", start)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"path: line 3 of '.*scores.csv' is damaged"):
            keeper(path).begin()


def test_blank_lines_and_a_torn_line_at_the_end_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    score(path, ARCHS[:3])
    whole = path.read_bytes()
    for tail in (b"\n", b"\r\n \n\n", b"\n" * 100_000, b"3,ab", b"\0" * 5000, b"\xff", b'\n3,"', b"  "):
        path.write_bytes(whole + tail)
        assert score(path, ARCHS[:3]).archs == ARCHS[:3]
        assert score(path).archs == ARCHS and path.read_bytes().startswith(whole) and places(path) == list(range(6))


@pytest.mark.parametrize("text", ["[1]", "", "{", "3", "null", '"a"', "\0", "[" * 100_000])
def test_damaged_settings_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    score(path)
    before = path.read_bytes()
    settings_path(path).write_text(text)
    with pytest.raises(
        UserError, match=r"path: '.*x.csv' exists, but not .* \(x.settings.json is damaged\).*resume=False"
    ):
        score(path)
    assert path.read_bytes() == before
    assert score(path, resume=False).archs == ARCHS
    settings_path(path).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"x.settings.json is damaged"):
        score(path)


@pytest.mark.parametrize("path", ["", ".", "..", "/", "a\0b", "/dev/null", "a" * 300])
def test_paths_that_are_no_files(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for resume in (True, False):
        with pytest.raises(UserError, match="path: "):
            tas.score_many("params", NET, ARCHS, path=path, resume=resume)
    assert not list(tmp_path.iterdir())


def test_a_finished_file_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.csv"
    score(path)
    before, opened = path.read_bytes(), os.open

    def refuse(name: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied")
        return opened(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert score(path).archs == ARCHS and path.read_bytes() == before
    with pytest.raises(UserError, match="cannot be written"):
        score(tmp_path / "new.csv")


@pytest.mark.slow
def test_ten_thousand_networks_load_fast_in_little_memory(tmp_path: Path) -> None:
    path, number = tmp_path / "scores.csv", 10_000
    one = keeper(path)
    one.begin()
    one.append(row(0))
    finish(one)
    header, line = path.read_bytes().splitlines(keepends=True)
    after = line.rpartition(b",")[0][1:].decode()  # what follows the place
    path.write_bytes(header + b"".join(stream.sealed(f"{place}{after}".encode()) for place in range(number)))
    two = keeper(path)
    began = time.process_time()
    assert len(two.begin()) == number
    found = finish(two, number)
    assert len(found) == number and time.process_time() - began < 10, "about one second alone"
    two = keeper(path)
    tracemalloc.start()
    try:
        two.begin(), finish(two, number)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400 * number, "ids and numbers by place, not the lines"
