"""Scores on disk: a CSV file that grows by one line a network, survives a kill, and is continued.

Lines: place in the sequence given, id, architecture (JSON), params, macs, then value, valid, reason, seconds and extras
(JSON) of every proxy that was run. CSV and not parquet: a line can be appended and its torn end cut, which a
columnar file with its footer at the end cannot; numbers are written with all digits. What the scores depend on lies
beside the file (``scores.settings.json``), and another setting is refused. Several processes write a part each
(``scores.part3.csv``), which the next one that opens the whole file joins.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.table import Gatherer, Row

FIXED = ("place", "id", "arch", "params", "macs")
FIELDS = (".value", ".valid", ".reason", ".seconds", ".extras")


class ScoreFile:
    """Appends to and reads one CSV file; `names` are the proxies in the order of their columns."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self.names = path, tuple(names)
        self._header = [*FIXED, *(f"{name}{field}" for name in self.names for field in FIELDS)]
        self._lines: io.FileIO | None = None

    def append(self, row: Row) -> None:
        """Add one line, which is with the system when this returns."""
        with writing(self.path):
            if self._lines is None:
                self.mend()
                self._lines = self.path.open("ab", buffering=0)
                if self._lines.tell() == 0:
                    self._lines.write(_line(self._header))
            self._lines.write(_line(_record(row, self.names)))

    def close(self) -> None:
        """Finish writing."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def mend(self) -> None:
        """Cut what a killed process left of its last line."""
        if not self.path.exists():
            return
        with writing(self.path), self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.truncate(_last_end(file, end))

    def records(self) -> Iterator[list[str]]:
        """The whole lines, as lists of texts; `UserError` for a file with other columns."""
        if not self.path.exists():
            return
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(line for line in file if line.endswith("\n"))
            header = next(reader, None)
            if header is not None and header != self._header:
                raise UserError(f"path: {str(self.path)!r} is no file of these scores: its columns differ")
            yield from reader

    def ids(self) -> dict[int, str]:
        """Ids of the networks in the file, by place."""
        return {int(record[0]): record[1] for record in self.records()}

    def gather(self, gatherer: Gatherer, wanted: Callable[[int], bool]) -> None:
        """Add the numbers of the networks at `wanted` places."""
        for record in self.records():
            if wanted(int(record[0])):
                gatherer.append(int(record[0]), int(record[3]), int(record[4]), _scores(record, self.names))

    def archs(self, wanted: Callable[[int], bool]) -> dict[int, Architecture]:
        """The networks at `wanted` places."""
        return {int(r[0]): Architecture.from_dict(json.loads(r[2])) for r in self.records() if wanted(int(r[0]))}

    def join(self, parts: Sequence[Path]) -> None:
        """Take in the lines of `parts`, which vanish, and put all in order of places; each place once."""
        where: dict[int, tuple[Path, int, int]] = {}
        for path in (self.path, *parts):
            for place, start, size in ScoreFile(path, self.names)._offsets():
                where.setdefault(place, (path, start, size))
        with writing(self.path), replacing(self.path) as target:
            target.write(_line(self._header))
            files = {path: path.open("rb") for path, _, _ in where.values()}
            try:
                for place in sorted(where):
                    path, start, size = where[place]
                    files[path].seek(start)
                    target.write(files[path].read(size))
            finally:
                for file in files.values():
                    file.close()
        for path in parts:
            path.unlink(missing_ok=True)

    def _offsets(self) -> Iterator[tuple[int, int, int]]:
        """(place, start, bytes) of every whole line."""
        next(self.records(), None)  # checks the columns
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            start = len(file.readline())
            for line in file:
                if line.endswith(b"\n"):
                    yield int(line.split(b",", 1)[0]), start, len(line)
                start += len(line)


def parts_of(path: Path) -> list[Path]:
    """The files of single processes beside `path`."""
    return sorted(path.parent.glob(f"{_escaped(path.stem)}.part*{path.suffix}"))


def part_of(path: Path, name: str) -> Path:
    """The file of the process called `name`."""
    return path.with_name(f"{path.stem}.part{name}{path.suffix}")


def settings_path(path: Path) -> Path:
    """Where it says what the scores in `path` depend on."""
    return path.with_name(f"{path.stem}.settings.json")


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """`UserError` with what differs when `path` was begun under other settings; writes them for a new file."""
    beside = settings_path(path)
    now = json.loads(json.dumps(settings, default=str))
    begun = path.exists() or bool(parts_of(path))
    if not begun:
        with writing(beside):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(beside) as file:
                file.write((json.dumps(now, indent=2) + "\n").encode())
        return
    advice = "give another path, or resume=False to begin anew"
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"path: {str(path)!r} exists, but not what its scores depend on ({beside.name}); {advice}"
        ) from None
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        said = "; ".join(f"{key}: {before.get(key)!r} in the file, now {now.get(key)!r}" for key in differing)
        raise UserError(f"path: {str(path)!r} holds scores under other settings: {said}; {advice}")


def forget(path: Path) -> None:
    """Delete the file, its parts and its settings."""
    for one in (path, settings_path(path), *parts_of(path)):
        with writing(one):
            one.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a system that refuses to write (a full disk, no permission) is a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"path: {str(path)!r} cannot be written ({error.strerror or error})") from error


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file that takes the place of `path` once it is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)  # mkstemp makes private files
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _escaped(stem: str) -> str:
    return "".join(f"[{c}]" if c in "[]*?" else c for c in stem)


def _line(fields: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()


def _record(row: Row, names: Sequence[str]) -> list[object]:
    arch = json.dumps(row.arch.to_dict(), separators=(",", ":"))
    fields: list[object] = [row.place, row.arch.id, arch, row.params, row.macs]
    for name in names:
        score = row.scores[name]
        # A line is one network: whatever an error message holds, it has no line breaks here.
        reason = " ".join(score.reason.split())
        fields += [repr(score.value), int(score.valid), reason, repr(score.seconds), json.dumps(dict(score.extras))]
    return fields


def _scores(record: Sequence[str], names: Sequence[str]) -> dict[str, Score]:
    found = {}
    for number, name in enumerate(names):
        start = len(FIXED) + len(FIELDS) * number
        value, valid, reason, seconds, extras = record[start : start + len(FIELDS)]
        found[name] = Score(float(value), (), valid == "1", reason, float(seconds), json.loads(extras))
    return found


def _last_end(file: Any, end: int) -> int:
    """Where the last whole line ends."""
    step = 1 << 16
    while end > 0:
        start = max(0, end - step)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return int(start + at + 1)
        end = start
    return 0
