"""What the tests of score files share: tiny networks, and the least that writes and reads a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.proxies.keep import OnDisk
from lightning_tas.proxies.score import Score
from lightning_tas.proxies.shards import Share
from lightning_tas.proxies.table import Row, Scores
from lightning_tas.spaces import isotropic

SPACE = isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])
ARCHS = SPACE.sample(0, n=6)
NET = tas.supernet(SPACE, num_classes=4, img_size=8, in_chans=1, patch_size=4)
ALONE = Share(0, 1, talks=False)


def score(path: Path, archs: list[Architecture] = ARCHS, **options: Any) -> Scores:
    return tas.score_many("params", NET, archs, path=path, **options)


def places(path: Path) -> list[int]:
    return [int(line.split(",")[0]) for line in path.read_text().splitlines()[1:]]


def keeper(path: Path, share: Share = ALONE, seed: int = 0, resume: bool = True) -> OnDisk:
    settings = {"mode": "exact", "proxies": ["params"], "seed": seed}
    return OnDisk(path, [tas.proxies()["params"]], share, settings, resume)


def row(place: int, value: float = 1.0) -> Row:
    return Row(place, ARCHS[place % 6], 10 + place, 100, {"params": Score(value, seconds=0.5)})


def finish(one: OnDisk, number: int = 6) -> Scores:
    return one.end([tas.proxies()["params"]], number)
