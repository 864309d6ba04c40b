"""Files of scores: whose files they touch, who may write them, each network once, nothing of others lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies import stream
from lightning_tas.proxies.shards import Share
from lightning_tas.proxies.stream import Claim, ScoreFile, part_of, parts_of, settings_path

from .score_files import ARCHS, NET, finish, keeper, places, row, score


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock."""
    monkeypatch.setattr(stream, "LOCK_SECONDS", 0.0)


FOREIGN = ["scores.participants.csv", "scores.part.csv", "scores.part1.txt", "scores.part01.csv", "scores.part3of3.csv",
           "scores.part-1.csv", "scores.part1of.csv", "scores.part1of2of3.csv", "scores.part².csv", "scores.csv.part1",
           "scores.part1.part1.csv", "xscores.part1.csv", "scores.part1 .csv"]  # fmt: skip


@pytest.mark.parametrize("resume", [True, False])
def test_only_what_part_of_makes_is_a_part(tmp_path: Path, resume: bool) -> None:
    path = tmp_path / "scores.csv"
    for name in FOREIGN:
        (tmp_path / name).write_text("alice\n")
    score(path, resume=resume)
    score(path, resume=resume)
    assert all((tmp_path / name).read_text() == "alice\n" for name in FOREIGN)
    made = [part_of(path, name) for name in ("0", "12", "0of2", "1of2", "10of11")]
    for one in made:
        one.touch()
    assert parts_of(path) == sorted(made)
    bare = tmp_path / "bare"
    for name in ("1", "1of2"):
        part_of(bare, name).touch()
    (tmp_path / "bare.x.part1").touch()
    assert [one.name for one in parts_of(bare)] == ["bare.part1", "bare.part1of2"]
    odd = tmp_path / "a[1]*.c?v"
    part_of(odd, "1").touch()
    (tmp_path / "a1x.part1.cav").touch()
    assert parts_of(odd) == [part_of(odd, "1")]


def test_a_name_of_a_part_is_no_path(tmp_path: Path) -> None:
    for name in ("b.part2.csv", "b.part0of2.csv", "b.part2"):
        with pytest.raises(UserError, match=rf"path: '{name}' is how a part of 'b(.csv)?' is called"):
            score(tmp_path / name)
    assert not list(tmp_path.iterdir())
    score(tmp_path / "b.part2of2.csv", ARCHS[:1])  # which no process writes


@pytest.mark.parametrize("resume", [True, False])
def test_a_file_with_settings_of_its_own_is_no_part(tmp_path: Path, resume: bool) -> None:
    """As they were made before such names were refused; they are continued, too."""
    path, other = tmp_path / "b.csv", tmp_path / "b.part2.csv"
    score(tmp_path / "c.csv", ARCHS[3:])
    (tmp_path / "c.csv").rename(other)
    (tmp_path / "c.settings.json").rename(tmp_path / "b.part2.settings.json")
    before = other.read_bytes()
    for _ in range(2):
        assert score(path, ARCHS[:2], resume=resume).archs == ARCHS[:2]
    assert other.read_bytes() == before and score(other, ARCHS[3:]).archs == ARCHS[3:]
    part_of(path, "1of2").write_bytes(before)
    (tmp_path / "b.part1of2.settings.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot be shared by processes: 'b.part1of2.csv'"):
        score(path, ARCHS[:2], shard=(1, 2))
    assert part_of(path, "1of2").read_bytes() == before


def test_what_is_no_file_of_scores_is_not_deleted(tmp_path: Path) -> None:
    path, thesis = tmp_path / "scores.csv", "chapter 1\nchapter 2\n"
    for one in (path, part_of(path, "3")):
        one.write_text(thesis)
        for resume in (True, False):
            with pytest.raises(UserError, match="path: ") as caught:
                score(path, resume=resume)
            assert one.name in str(caught.value) and "to begin anew" not in str(caught.value)
        assert one.read_text() == thesis
        one.unlink()
    beside = settings_path(path)
    beside.write_text(thesis)
    for resume in (True, False):
        with pytest.raises(UserError, match=r"needs 'scores.settings.json' beside it"):
            score(path, resume=resume)
    assert beside.read_text() == thesis and [one.name for one in tmp_path.iterdir()] == [beside.name]
    beside.unlink()
    score(path, seed=1)
    path.write_text("chapter 1")  # looks torn
    with pytest.raises(UserError, match="its columns differ"):
        score(path, seed=1)
    assert path.read_text() == "chapter 1"


def test_every_file_has_settings_of_its_own(tmp_path: Path) -> None:
    names = [
        "c.csv",
        "c.txt",
        "c",
        "c.CSV",
        "c.txt.csv",
        "c.settings.json",
        "c.csv.csv",
        "c.csv.txt",
        "c-settings.json",
    ]
    assert len({settings_path(tmp_path / name) for name in names}) == len(names)
    assert settings_path(tmp_path / "c.csv").name == "c.settings.json", "what runs in progress have"
    score(tmp_path / "c.csv", seed=0)
    score(tmp_path / "c.txt", seed=1)
    score(tmp_path / "c", seed=2)
    for name, seed in (("c.csv", 1), ("c.txt", 0), ("c", 1)):
        with pytest.raises(UserError, match="seed: "):
            score(tmp_path / name, seed=seed)
    with pytest.raises(UserError, match="is there and something else"):  # a score file that is called like settings
        score(tmp_path / "x-settings.json") and score(tmp_path / "x")
    assert len(score(tmp_path / "x-settings.json")) == 6


def test_each_network_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    expected = score(path).value("params").tolist()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[3], lines[5], lines[3]]))
    found = score(path)
    assert found.value("params").tolist() == expected and found.archs == ARCHS
    assert path.read_bytes() == b"".join(lines), "and the file has each once again"
    # Killed after the joined file was in place, before its parts were deleted.
    for name in ("0of2", "1"):
        part_of(path, name).write_bytes(b"".join([lines[0], *lines[1:3]]))
    assert score(path, shard=(0, 2)).archs == ARCHS[::2]
    assert score(path).archs == ARCHS and not parts_of(path) and path.read_bytes() == b"".join(lines)


def test_of_two_scores_of_a_network_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    one = keeper(path)
    one.begin()
    for place, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
        one.append(row(place, value))
    assert finish(one).value("params").tolist() == [1.0, 2.0] and places(path) == [0, 1]
    part = ScoreFile(part_of(path, "1of2"), ["params"])
    part.append(row(1, 5.0)), part.append(row(2, 4.0)), part.close()
    two = keeper(path)
    assert len(two.begin()) == 3
    assert finish(two).value("params").tolist() == [1.0, 2.0, 4.0]


def test_two_networks_at_a_place_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    score(path, ARCHS[:3])
    part = ScoreFile(part_of(path, "1of2"), ["params"])
    part.append(row(1)._replace(arch=ARCHS[5])), part.close()
    before = part.path.read_bytes()
    with pytest.raises(UserError, match=rf"line 2 of '.*part1of2.csv'.*place 1 is network {ARCHS[5].id}"):
        score(path, ARCHS[:3])
    assert part.path.read_bytes() == before and places(path) == [0, 1, 2]


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that writes `path`."""
    process = subprocess.Popen([sys.executable, "-Sc", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path, shard = tmp_path / "scores.csv", tmp_path / "shared.csv"
    score(path, ARCHS[:2])
    score(shard, ARCHS, shard=(0, 2))
    before = path.read_bytes()
    process, other = hold(path), hold(part_of(shard, "0of2"))
    try:
        for resume in (True, False):
            with pytest.raises(UserError, match=r"path: '.*/scores.csv' is being written by another call"):
                score(path, resume=resume)
        with pytest.raises(UserError, match=r"path: '.*/shared.part0of2.csv' is being written"):
            score(shard, shard=(0, 2))
        for resume in (True, False):  # which would take the part away
            with pytest.raises(UserError, match=r"path: '.*/shared.part0of2.csv' is being written"):
                score(shard, resume=resume)
        assert score(shard, shard=(1, 2)).archs == ARCHS[1::2], "another share does not mind"
    finally:
        process.kill(), other.kill(), process.wait(), other.wait()
    assert path.read_bytes() == before
    assert score(path).archs == score(shard).archs == ARCHS, "a killed process holds nothing"
    assert {one.name for one in tmp_path.glob("*.csv")} == {"scores.csv", "shared.csv"}


def test_a_share_that_begins_later_keeps_its_part(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    whole, late = keeper(path), part_of(path, "1of2")
    whole.begin()
    for place in range(6):
        whole.append(row(place))
    ScoreFile(late, ["params"]).append(row(1))
    process = hold(late)
    try:
        assert len(finish(whole)) == 6 and late.exists()
    finally:
        process.kill(), process.wait()
    again = keeper(path)
    again.begin()
    assert len(finish(again)) == 6 and not late.exists()


def test_the_lock_goes_over_to_the_joined_file(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    ScoreFile(part_of(path, "1of2"), ["params"]).append(row(1))
    settings_path(path).write_text(json.dumps({"mode": "exact", "proxies": ["params"], "seed": 0}))
    one = keeper(path)
    one.begin()
    assert places(path) == [1]
    command = [sys.executable, "-Sc", HOLDER, str(path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "BlockingIOError" in second.stderr
    one.append(row(0))
    assert len(finish(one)) == 2 and places(path) == [0, 1]


def test_a_call_that_failed_is_in_nobodys_way(tmp_path: Path) -> None:
    """Its traceback, which a notebook keeps, keeps the lock; a newer call of the process takes it over."""
    path, failed = tmp_path / "scores.csv", keeper(tmp_path / "scores.csv")
    failed.begin()
    failed.append(row(0))
    newer = keeper(path)
    assert len(newer.begin()) == 1
    newer.append(row(1))
    with pytest.raises(UserError, match="is being written by another call"):
        failed.append(row(2))
    failed.close()
    newer.append(row(2))
    assert len(finish(newer)) == 3 and places(path) == [0, 1, 2]


def test_a_call_within_a_call(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"

    def nested() -> Iterator[Architecture]:
        yield from ARCHS[:2]
        score(path)
        yield from ARCHS[2:]

    with pytest.raises(UserError, match=r"scores.csv' is being written"):
        tas.score_many("params", NET, (arch for arch in nested()), path=path)
    assert score(path).archs == ARCHS and places(path) == list(range(6))


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers where files cannot be locked: each network once all the same."""

    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(stream.fcntl, "flock", refuse)
    path = tmp_path / "scores.csv"
    one, two = ScoreFile(path, ["params"]), keeper(path)
    two.begin()
    for place in range(4):
        two.append(row(place)), one.append(row(place))
    one.close()
    assert len(places(path)) == 8 and len(finish(two)) == 4 and places(path) == [0, 1, 2, 3]


def test_forked_processes_do_not_prolong_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    claim = Claim(path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        claim.end()
        Claim(path).end()
    finally:
        os.write(writer, b"x"), os.waitpid(child, 0), os.close(reader), os.close(writer)


def test_a_share_sees_when_another_began_with_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    one, two = (keeper(path, Share(rank, 2, talks=False), seed=rank) for rank in (0, 1))
    one.begin(), two.begin()  # nothing is to be seen of the first yet
    two.append(row(1))
    with pytest.raises(UserError, match="seed: 1 in the file, now 0"):
        one.append(row(0))
    one.close()
    assert parts_of(path) == [part_of(path, "1of2")]


def test_nothing_is_left_of_what_wrote_nothing(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    score(path)
    score(path, shard=(1, 2))
    with pytest.raises(UserError, match="seed: 0 in the file"):
        score(path, shard=(1, 2), seed=1)
    assert {one.name for one in tmp_path.iterdir()} == {"scores.csv", "scores.settings.json"}
