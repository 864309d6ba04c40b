"""Where finished networks go: memory, or a file that is continued; alone or as one of several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.registry import Proxy
from lightning_tas.proxies.shards import Share
from lightning_tas.proxies.stream import ScoreFile, check_settings, forget, part_of, parts_of
from lightning_tas.proxies.table import Gatherer, Row, Scores


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


class InMemory:
    """Keeps numbers in compact columns, and the architectures."""

    def __init__(self, parts: Sequence[Proxy], share: Share) -> None:
        self._share, self._parts = share, parts
        self._gatherer = Gatherer(parts)
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
        whole, archs = Gatherer(self._parts), dict[int, Architecture]()
        for gatherer, some in self._share.gather((self._gatherer, self._archs)):
            whole.extend(gatherer)
            archs |= some
        ordered = [archs[place] for place in sorted(archs)]
        return whole.scores(wanted, lambda: list(ordered))


class OnDisk:
    """Keeps everything in a file. Of several processes each has a part, which rank 0 joins."""

    def __init__(
        self, path: Path, parts: Sequence[Proxy], share: Share, settings: Mapping[str, Any], resume: bool
    ) -> None:
        self._share, self._parts, self._settings, self._resume = share, parts, settings, resume
        names = [part.name for part in parts]
        self._whole = ScoreFile(path, names)
        self._own = self._whole
        self._alone = share.world > 1 and not share.talks
        if share.world > 1:
            own = f"{share.rank}" if share.talks else f"{share.rank}of{share.world}"
            self._own = ScoreFile(part_of(path, own), names)

    def begin(self) -> dict[int, str]:
        """Read what is there: of one process or a group everything, of an explicit share its own and the joined."""
        return self._share.first(self._open)

    def _open(self) -> dict[int, str]:
        path = self._whole.path
        if not self._resume:
            if self._alone:
                raise UserError("resume: False would delete what the other shares have done; delete the files yourself")
            forget(path)
        check_settings(path, self._settings)
        if not self._alone and (parts := parts_of(path)):
            self._whole.join(parts)
        return {**self._whole.ids(), **(self._own.ids() if self._own is not self._whole else {})}

    def append(self, row: Row) -> None:
        """Keep one network."""
        self._own.append(row)

    def end(self, wanted: Sequence[Proxy], number: int) -> Scores:
        """Join the parts of a group; an explicit share has its own networks only."""
        self._own.close()
        if not self._alone:
            self._share.agree(None)  # all have closed their files
            self._share.first(self._join)
        files = [self._whole, self._own] if self._alone else [self._whole]
        gatherer = Gatherer(self._parts)

        def own(place: int) -> bool:
            return place < number and (not self._alone or self._share.turn(place))

        def archs() -> list[Architecture]:
            found = {place: arch for file in files for place, arch in file.archs(own).items()}
            return [found[place] for place in sorted(found)]

        for file in files:
            file.gather(gatherer, own)
        return gatherer.scores(wanted, archs)

    def _join(self) -> None:
        parts = parts_of(self._whole.path)
        places = list(self._whole.ids())
        if parts or places != sorted(places):
            self._whole.join(parts)
