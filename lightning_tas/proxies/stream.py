"""Scores on disk: a CSV file that grows by one line a network, survives a kill, and is continued.

Lines: place in the sequence given, id, architecture (JSON), params, macs, then value, valid, reason, seconds and extras
(JSON) of every proxy that was run, and last the CRC-32 of the line before that field, by which damage is seen. CSV and
not parquet: a line can be appended and its torn end cut, which a columnar file with its footer at the end cannot;
numbers are written with all digits. What the scores depend on lies beside the file (``scores.settings.json``), and
another setting is refused. Several processes write a part each (``scores.part3.csv``), which the next one that opens
the whole file joins. Who writes a file holds its lock.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import io
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.launch import files
from lightning_tas.launch.files import write_atomically
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.table import Row
from lightning_tas.reading import parse_json

FIXED = ("place", "id", "arch", "params", "macs")
FIELDS = (".value", ".valid", ".reason", ".seconds", ".extras")
CHECKSUM = "crc32"
writing = partial(files.writing, key="path")
"""Inside, a system that refuses to write is a `UserError` that names the file."""
LOCK_SECONDS = 2.0  # a process that was killed just now may hold its lock a little longer


class Claim:
    """The lock of one file that is written, against all other processes; it ends with the process, however that ends.

    Within a process the newest claim counts: a call that failed may never have given up its own, while its traceback
    is kept. Should the older call go on after all, its next line is refused.
    """

    _newest: ClassVar[dict[Path, Claim]] = {}

    def __init__(self, path: Path, seconds: float | None = None) -> None:
        self._path, self._key, self._process = path, path.resolve(), os.getpid()
        self._handles: list[int] = []
        if (older := self._newest.get(self._key)) is not None:
            older.end()
        end = time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
        while True:
            try:
                self._handles += _locked(path)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise self.busy() from None
                time.sleep(0.05)
        self._newest[self._key] = self

    def busy(self) -> UserError:
        """Somebody else writes the file."""
        return UserError(f"path: {str(self._path)!r} is being written by another call; wait for it or end it")

    @property
    def stands(self) -> bool:
        """Whether no newer call of this process has taken the file over."""
        return self._newest.get(self._key) is self

    def follow(self, handle: int) -> None:
        """Hold also the file behind `handle`, which is about to take the place of the one that is held."""
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._handles.append(os.dup(handle))

    def end(self) -> None:
        """Let others have the file."""
        if self.stands:
            del self._newest[self._key]
        for handle in self._handles:
            # Processes forked meanwhile share the lock, so that closing alone would not end it; nor may they end it.
            if self._process == os.getpid():
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
        self._handles.clear()


class Line(NamedTuple):
    """A whole line: its number in the file from 1, where it lies there [bytes], its place among the networks."""

    number: int
    start: int
    size: int
    place: int
    fields: list[str]


class ScoreFile:
    """Appends to and reads one CSV file; `names` are the proxies in the order of their columns."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self.names = path, tuple(names)
        self._header = [*FIXED, *(f"{name}{field}" for name in self.names for field in FIELDS), CHECKSUM]
        self._lines: io.FileIO | None = None
        self._claim: Claim | None = None

    def claim(self) -> None:
        """Keep all other writers away until `close`; makes the file. `UserError` when another one is at it."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._claim = Claim(self.path)

    def append(self, row: Row) -> None:
        """Add one line, which is with the system when this returns."""
        if self._claim is not None and not self._claim.stands:
            raise self._claim.busy()
        with writing(self.path):
            if self._lines is None:
                self.mend()
                self._lines = self.path.open("ab", buffering=0)
                if self._lines.tell() == 0:
                    self._lines.write(_line(self._header))
            self._lines.write(sealed(_line(_record(row, self.names)).rstrip(b"\n")))

    def close(self) -> None:
        """Finish writing; a file that nothing was written to vanishes."""
        self._stop()
        if self._claim is not None:
            with suppress(OSError):
                if self._claim.stands and self.path.stat().st_size == 0:
                    self.path.unlink()
            self._claim.end()
            self._claim = None

    def mend(self) -> None:
        """Cut what a killed process left of its last line, and blank lines at the end, which would else be inside."""
        if not self.path.exists():
            return
        end = self._header_size()
        for line in self.lines():
            end = line.start + line.size
        with writing(self.path):
            if self.path.stat().st_size > end:
                os.truncate(self.path, end)

    def lines(self) -> Iterator[Line]:
        """The whole lines; `UserError` for a file with other columns, and for damage before its end."""
        start = self._header_size()
        if not start:
            return
        blank = 0  # the first of the blank lines just before
        with self.path.open("rb") as file:
            file.seek(start)
            for number, raw in enumerate(file, 2):
                if not raw.endswith(b"\n"):
                    return  # the torn end that a killed process left
                if not raw.strip():
                    blank = blank or number
                elif blank:
                    raise self.damaged(blank, "it is blank")
                else:
                    with self.intact(number):
                        place, fields = _parsed(raw, len(self._header))
                    yield Line(number, start, len(raw), place, fields)
                start += len(raw)

    def check(self, line: Line) -> None:
        """`UserError` unless all its numbers can be read."""
        self.scores(line)
        with self.intact(line.number):
            parse_json(line.fields[2], "arch")

    def scores(self, line: Line) -> tuple[int, int, dict[str, Score]]:
        """Params, macs and the scores of one network."""
        with self.intact(line.number):
            params, macs = int(line.fields[3]), int(line.fields[4])
            if not 0 <= min(params, macs) <= max(params, macs) < 1 << 63:
                raise ValueError(f"params {params} or macs {macs} is out of range")
            return params, macs, _scores(line.fields, self.names)

    def arch(self, line: Line) -> Architecture:
        """One network."""
        with self.intact(line.number):
            return Architecture.from_dict(parse_json(line.fields[2], "arch"))

    def ordered(self) -> bool:
        """Whether its lines are in the order of places, each place once."""
        last = -1
        for line in self.lines():
            if line.place <= last:
                return False
            last = line.place
        return True

    def join(self, parts: Sequence[Path], leave_busy: bool = False) -> None:
        """Take in the lines of `parts`, which vanish, and put all in order of places; each place once.

        A part that another process is writing is refused, or left for the next time.
        """
        self._stop()
        claims: dict[Path, Claim] = {}
        try:
            for part in parts:
                try:
                    with writing(part):
                        claims[part] = Claim(part, 0.0 if leave_busy else None)
                except UserError:
                    if not leave_busy:
                        raise
            self._rewrite([ScoreFile(part, self.names) for part in claims])
            for part in claims:
                with writing(part):
                    part.unlink(missing_ok=True)
        finally:
            for claim in claims.values():
                claim.end()

    def _rewrite(self, parts: Sequence[ScoreFile]) -> None:
        where = {line.place: (file.path, line.start, line.size) for file, line in first_lines([self, *parts])}

        def write(temporary: Path) -> None:
            with ExitStack() as stack:
                target = stack.enter_context(temporary.open("wb"))
                sources = {path: stack.enter_context(path.open("rb")) for path, _, _ in where.values()}
                target.write(_line(self._header))
                for place in sorted(where):
                    path, start, size = where[place]
                    sources[path].seek(start)
                    target.write(sources[path].read(size))
                if self._claim is not None:
                    self._claim.follow(target.fileno())

        with writing(self.path):
            write_atomically(self.path, write)

    def _stop(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _header_size(self) -> int:
        """Bytes of the header's line, 0 while there is none; `UserError` for another header."""
        try:
            with self.path.open("rb") as file:
                raw = file.readline()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise UserError(f"path: {str(self.path)!r} cannot be read ({error.strerror or error})") from error
        header, whole = _line(self._header), raw.endswith(b"\n")
        # What was torn must be the beginning of this header: else the file of somebody else would be cut.
        if raw.replace(b"\r\n", b"\n") != header if whole else not header.startswith(raw):
            raise UserError(
                f"path: {str(self.path)!r} is no file of these scores: its columns differ (line 1); give another path, "
                f"or begin anew: delete the file, or resume=False"
            )
        return len(raw) if whole else 0

    @contextmanager
    def intact(self, number: int) -> Iterator[None]:
        """Inside, line `number` is read: what cannot be understood is damage."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, csv.Error) as error:
            raise self.damaged(number, str(error)) from None

    def damaged(self, number: int, what: str) -> UserError:
        """The error for line `number`."""
        return UserError(
            f"path: line {number} of {str(self.path)!r} is damaged ({what}); delete this line to have its network "
            f"scored again, or begin anew: delete the file, or resume=False"
        )


def first_lines(files: Sequence[ScoreFile]) -> Iterator[tuple[ScoreFile, Line]]:
    """The lines of all files, each place once: the first of a network counts, `UserError` for two networks.

    A place occurs twice where two processes wrote without locks, or where one was killed while it joined parts.
    """
    known: dict[int, str] = {}
    for file in files:
        for line in file.lines():
            arch_id = line.fields[1]
            if line.place not in known:
                known[line.place] = arch_id
                yield file, line
            elif known[line.place] != arch_id:
                what = f"place {line.place} is network {arch_id} there, but {known[line.place]} before"
                raise file.damaged(line.number, what)


def part_of(path: Path, name: str) -> Path:
    """The file of the process called `name`: "3" of a group, "3of8" of processes that do not talk."""
    return path.with_name(f"{path.stem}.part{name}{path.suffix}")


def whole_of(path: Path) -> Path | None:
    """The file that `path` is called a part of: the one of which `part_of` makes this name."""
    for suffix in (path.suffix, ""):
        name = path.name.removesuffix(suffix)
        match = re.fullmatch(r"(.+)\.part((0|[1-9][0-9]*)(?:of([1-9][0-9]*))?)", name, re.DOTALL)
        if match is not None and (match[4] is None or int(match[3]) < int(match[4])):
            whole = path.with_name(match[1] + suffix)
            if part_of(whole, match[2]) == path:
                return whole
    return None


def parts_of(path: Path) -> list[Path]:
    """The files of single processes beside `path`; not those with settings of their own, which nobody shared."""
    found = path.parent.glob(f"{glob.escape(path.stem)}.part*{glob.escape(path.suffix)}")
    return sorted(one for one in found if whole_of(one) == path and not settings_path(one).exists())


def settings_path(path: Path) -> Path:
    """Where it says what the scores in `path` depend on; of no two files the same."""
    return path.with_name(f"{path.stem}.settings.json" if path.suffix == ".csv" else f"{path.name}-settings.json")


def is_scores(path: Path) -> bool:
    """Whether `path` is a file of any scores, or the torn beginning of one."""
    start = _line(FIXED).rstrip(b"\n")
    with path.open("rb") as file:
        head = file.read(len(start))
    return start.startswith(head)


def _locked(path: Path) -> list[int]:
    """A handle that holds the lock of `path`, which is made if need be; `BlockingIOError` while another has it."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and path.exists():
                return []  # a finished file may be one that can only be read
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # a file system without locks
            return [handle]
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return [handle]
        os.close(handle)  # who had it has deleted or replaced it


def _line(fields: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode(errors="backslashreplace")


def sealed(content: bytes) -> bytes:
    """The line of `content` (without its end) and its checksum."""
    return b"%s,%08x\n" % (content, zlib.crc32(content))


def _record(row: Row, names: Sequence[str]) -> list[object]:
    arch = json.dumps(row.arch.to_dict(), separators=(",", ":"))
    fields: list[object] = [row.place, row.arch.id, arch, row.params, row.macs]
    for name in names:
        score = row.scores[name]
        # A line is one network: whatever an error message holds, it has no line breaks here, and no zero bytes.
        reason = " ".join(score.reason.replace("\0", " ").split())
        fields += [repr(score.value), int(score.valid), reason, repr(score.seconds), json.dumps(dict(score.extras))]
    return fields


def _parsed(raw: bytes, columns: int) -> tuple[int, list[str]]:
    """Place and fields of a line; an error of any kind where it is none."""
    content, _, checksum = raw.rstrip(b"\r\n").rpartition(b",")
    if checksum != b"%08x" % zlib.crc32(content):
        raise ValueError("its checksum is wrong")
    fields = next(csv.reader([raw.decode()], strict=True))
    if len(fields) != columns:
        raise ValueError(f"{len(fields)} columns instead of {columns}")
    if not (fields[0].isascii() and fields[0].isdigit()):
        raise ValueError(f"{fields[0]!r} is no place")
    return int(fields[0]), fields


def _scores(record: Sequence[str], names: Sequence[str]) -> dict[str, Score]:
    found = {}
    for number, name in enumerate(names):
        start = len(FIXED) + len(FIELDS) * number
        value, valid, reason, seconds, extras = record[start : start + len(FIELDS)]
        raw = {key: float(one) for key, one in parse_json(extras, "extras").items()}
        found[name] = Score(float(value), (), ("0", "1").index(valid) == 1, reason, float(seconds), raw)
    return found
