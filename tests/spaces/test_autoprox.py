"""The spaces that Auto-Prox's ViT-Bench-101 samples hold every network of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lightning_tas as tas


@pytest.mark.parametrize(
    ("file", "names", "count"),
    [("autoformer", ["autoprox_autoformer"], 100), ("pit", ["autoprox_pit", "pit_ti"], 60)],
)
def test_networks_of_the_bench_are_members(shared: Path, file: str, names: list[str], count: int) -> None:
    entries = json.loads((shared / "vit_bench_101" / f"{file}.json").read_text())["entries"]
    assert len(entries) == count
    for name in names:
        space = tas.space(name)
        assert [space.why_not(tas.Architecture.from_dict(entry["arch"])) for entry in entries] == [None] * count


def test_same_choices_as_autoformer_tiny_but_another_family() -> None:
    ours, theirs = tas.space("autoprox_autoformer"), tas.space("autoformer_tiny")
    assert ours.size() == theirs.size() and ours != theirs and ours.sample(seed=0) not in theirs
    for name in ("embed_dim", "depth", "num_heads", "mlp_ratio"):
        assert ours.choices(name) == theirs.choices(name)
    with pytest.raises(tas.UserError, match="embed_dim=241 fits no architecture"):
        tas.space("autoprox_autoformer", num_heads=(3, 5), embed_dim=(192, 216, 241))
