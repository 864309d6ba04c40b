"""Where finished networks go: memory, or a file that is continued; alone or as one of several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.launch.files import write_json
from lightning_tas.proxies.registry import Proxy
from lightning_tas.proxies.shards import Share
from lightning_tas.proxies.stream import (
    Claim,
    ScoreFile,
    first_lines,
    is_scores,
    part_of,
    parts_of,
    settings_path,
    whole_of,
    writing,
)
from lightning_tas.proxies.table import Gatherer, Row, Scores
from lightning_tas.reading import read_json


class Keeper(Protocol):
    """Keeps rows while networks are scored, and makes the `Scores` of them at the end."""

    def begin(self) -> dict[int, str]:
        """Places and ids of the networks that are known already."""
        ...

    def append(self, row: Row) -> None:
        """Keep one network."""
        ...

    def end(self, wanted: Sequence[Proxy], number: int) -> Scores:
        """Scores of the first `number` networks, on every process."""
        ...

    def close(self) -> None:
        """Let go of what is held; after `end` nothing is."""
        ...


class InMemory:
    """Keeps numbers in compact columns, and the architectures."""

    def __init__(self, parts: Sequence[Proxy], share: Share) -> None:
        self._share, self._parts = share, parts
        self._gatherer = Gatherer(parts, by_block=True)
        self._archs: dict[int, Architecture] = {}

    def begin(self) -> dict[int, str]:
        """Nothing is known."""
        return {}

    def append(self, row: Row) -> None:
        """Keep one network."""
        self._gatherer.append(row.place, row.params, row.macs, row.scores)
        self._archs[row.place] = row.arch

    def end(self, wanted: Sequence[Proxy], number: int) -> Scores:
        """Every rank gets the networks of all."""
        whole, archs = Gatherer(self._parts, by_block=True), dict[int, Architecture]()
        for gatherer, some in self._share.gather((self._gatherer, self._archs)):
            whole.extend(gatherer)
            archs |= some
        ordered = [archs[place] for place in sorted(archs)]
        return whole.scores(wanted, lambda: list(ordered))

    def close(self) -> None:
        """Nothing is held."""


class OnDisk:
    """Keeps everything in a file. Of several processes each has a part, which rank 0 joins.

    A process alone and rank 0 of a group lock the whole file, one with an explicit share its part.
    """

    def __init__(
        self, path: Path, parts: Sequence[Proxy], share: Share, settings: Mapping[str, Any], resume: bool
    ) -> None:
        check_path(path)
        self._share, self._parts, self._settings, self._resume = share, parts, settings, resume
        names = [part.name for part in parts]
        self._whole = ScoreFile(path, names)
        self._own = self._whole
        self._alone = share.world > 1 and not share.talks
        self._others: list[Path] = []  # all parts that this call may write
        if share.world > 1:
            ending = "" if share.talks else f"of{share.world}"
            self._own = ScoreFile(part_of(path, f"{share.rank}{ending}"), names)
            ranks = range(share.world) if share.talks else [share.rank]
            self._others = [part_of(path, f"{rank}{ending}") for rank in ranks]
        self._begun = False

    def begin(self) -> dict[int, str]:
        """Read what is there: of one process or a group everything, of an explicit share its own and the joined."""
        try:
            return self._share.first(self._open)
        except BaseException:
            self.close()
            raise

    def _open(self) -> dict[int, str]:
        path = self._whole.path
        for part in self._others:
            if settings_path(part).exists():
                raise UserError(
                    f"path: {str(path)!r} cannot be shared by processes: {part.name!r} beside it would be a part of "
                    f"it, but is a file of its own; give another path"
                )
        if self._alone and not self._resume:
            raise UserError("resume: False would delete what the other shares have done; delete the files yourself")
        (self._own if self._alone else self._whole).claim()
        if not self._resume:
            forget(path)
        check_settings(path, self._settings)
        if not self._alone and (parts := parts_of(path)):
            self._whole.join(parts)
        known = dict[int, str]()
        for file, line in first_lines(self._files):
            file.check(line)
            known[line.place] = line.fields[1]
        return known

    @property
    def _files(self) -> list[ScoreFile]:
        """What this process reads. An own part first: should it be joined meanwhile, the whole file has its lines."""
        return [self._own, self._whole] if self._alone else [self._whole]

    def append(self, row: Row) -> None:
        """Keep one network."""
        if self._alone and not self._begun:
            # Another share with other settings may have begun since, while there was nothing to see of this one.
            compare_settings(self._whole.path, self._settings)
        self._begun = True
        self._own.append(row)

    def end(self, wanted: Sequence[Proxy], number: int) -> Scores:
        """Join the parts of a group; an explicit share has its own networks only."""
        try:
            if self._own is not self._whole:
                self._own.close()
            if not self._alone:
                self._share.agree(None)  # all have closed their files
                self._share.first(self._join)
        finally:
            self.close()
        gatherer = Gatherer(self._parts)

        def own(place: int) -> bool:
            return place < number and (not self._alone or self._share.turn(place))

        def archs() -> list[Architecture]:
            found = {line.place: file.arch(line) for file, line in first_lines(self._files) if own(line.place)}
            return [found[place] for place in sorted(found)]

        for file, line in first_lines(self._files):
            if own(line.place):
                gatherer.append(line.place, *file.scores(line))
        return gatherer.scores(wanted, archs)

    def close(self) -> None:
        """Let other calls write the files."""
        self._own.close()
        self._whole.close()

    def _join(self) -> None:
        parts = parts_of(self._whole.path)
        if parts or not self._whole.ordered():
            # A share that began after this call writes on; what it finds is joined by the next one.
            self._whole.join(parts, leave_busy=True)


def check_path(path: Path) -> None:
    """`UserError` where scores cannot go."""
    expected = "valid: the name of a file, as 'scores.csv'"
    if "\0" in str(path) or not path.name:
        raise UserError(f"path: {str(path)!r} is no file; {expected}")
    with writing(path):
        if path.exists() and not path.is_file():
            raise UserError(f"path: {str(path)!r} is no file; {expected}")
        # Files of that name with settings of their own are from before this was refused.
        if (whole := whole_of(path)) is not None and not settings_path(path).exists():
            raise UserError(
                f"path: {path.name!r} is how a part of {whole.name!r} is called, which one of several processes "
                f"writes; {expected}"
            )


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """`UserError` with what differs when `path` was begun under other settings; writes them for a new file."""
    if _written(path):
        compare_settings(path, settings)
        return
    beside = settings_path(path)
    before = _settings(beside)
    if beside.exists() and not (before is not None and {"mode", "proxies"} <= before.keys()):
        raise UserError(
            f"path: {str(path)!r} needs {beside.name!r} beside it, which is there and something else; "
            f"give another path, or move that file away"
        )
    with writing(beside):
        write_json(beside, _plain(settings))


def compare_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """`UserError` with what differs from what the scores in `path` depend on."""
    beside, now = settings_path(path), _plain(settings)
    before = _settings(beside)
    advice = "give another path, or resume=False to begin anew"
    if before is None:
        first = next(iter(_written(path)), path)
        state = "damaged" if beside.exists() else "missing"
        with writing(first):
            ours = not first.exists() or is_scores(first)
        raise UserError(
            f"path: {str(first)!r} exists, but not what its scores depend on ({beside.name} is {state}); "
            f"{advice if ours or beside.exists() else 'give another path'}"
        )
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        said = "; ".join(f"{key}: {before.get(key)!r} in the file, now {now.get(key)!r}" for key in differing)
        raise UserError(f"path: {str(path)!r} holds scores under other settings: {said}; {advice}")


def forget(path: Path) -> None:
    """Empty the file, which the caller has claimed, and delete its parts and its settings.

    `UserError` for what is no file of scores: nothing of somebody else's is deleted.
    """
    if not _written(path):
        return  # also the settings may be somebody else's
    parts, beside = parts_of(path), settings_path(path)
    for one in (path, *parts):
        with writing(one):
            # A file with settings beside it was one of scores, whatever has become of it.
            if not is_scores(one) and not (one == path and beside.exists()):
                raise UserError(
                    f"path: {str(one)!r} is no file of scores, so that resume=False does not delete it; "
                    f"give another path, or move that file away"
                )
    claims: list[Claim] = []
    try:
        for part in parts:
            with writing(part):
                claims.append(Claim(part))
        for part in parts:
            with writing(part):
                part.unlink(missing_ok=True)
        with writing(path):
            os.truncate(path, 0)
        with writing(beside):
            beside.unlink(missing_ok=True)
    finally:
        for claim in claims:
            claim.end()


def _written(path: Path) -> list[Path]:
    """The file and its parts, as far as there is anything in them."""
    with writing(path):
        return [one for one in (path, *parts_of(path)) if one.exists() and one.stat().st_size > 0]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a file."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _settings(beside: Path) -> dict[str, Any] | None:
    """What was written there; None where nothing of the kind can be read."""
    try:
        found = read_json(beside)
    except UserError:
        return None
    return found if isinstance(found, dict) else None
