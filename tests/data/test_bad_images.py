"""Images that cannot be read: replaced by a function of their number, named once, found beforehand on request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_tas.data import DataConfig, TASDataModule
from lightning_tas.data.dataset import AugmentedImages
from lightning_tas.data.workers import default_workers
from lightning_tas.errors import UserError

PLAIN: dict[str, Any] = {"crop": "none", "auto_augment": None, "color_jitter": 0.0, "reprob": 0.0, "hflip": 0.0,
                         "mean": 0.0, "std": 1.0}  # fmt: skip
BAD = {"train": (2, 9), "test": (1,)}
EACH = 6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes; every image has a colour of its own; of each class of train/, and in test/, one is cut off."""
    for split, bad in BAD.items():
        for number in range(2 * EACH):
            path = tmp_path / "data" / split / "ab"[number // EACH] / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * number, number, 0)).save(path)
            if number in bad:
                path.write_bytes(path.read_bytes()[:40])
            os.utime(path, (1e9, 1e9))
    return tmp_path / "data"


def module(root: Path, **changes: Any) -> TASDataModule:
    settings = {**PLAIN, "batch_size": 4, "img_size": 8, "search_val": 0, "on_bad_image": "skip",
                "cache_dir": str(root.parent / "cache"), **changes}  # fmt: skip
    return TASDataModule(DataConfig(name="folder", root=str(root), **settings), seed=3)


def epoch(loader: Any, number: int) -> dict[int, list[tuple[int, int]]]:
    """Which image (by its colour) and class stood for each number that was asked for."""
    loader.set_epoch(number)
    keys = np.concatenate(list(loader.sampler.batches(number)))[:, 1]
    images, targets = zip(*[batch for batch in loader], strict=True)
    shown = (torch.cat(images)[:, 1, 0, 0] * 255).round().int().tolist()
    found: dict[int, list[tuple[int, int]]] = {}
    for key, image, target in zip(keys.tolist(), shown, torch.cat(targets).tolist(), strict=True):
        found.setdefault(key, []).append((image, target))
    return found


def test_bad_images_are_replaced_alike_everywhere(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = module(root)
    first = epoch(data.train_dataloader(), 0)
    for number, seen in first.items():
        for image, target in seen:
            assert target == image // EACH, "the class goes with the image that is shown"
            assert image == number if number not in BAD["train"] else image not in BAD["train"]
    assert epoch(data.train_dataloader(), 5) == first == epoch(module(root, num_workers=2).train_dataloader(), 1)
    assert [next(iter(images.values())) for images in [epoch(data.test_dataloader(), 0)]] == [[(0, 0)]]
    counted = torch.cat([targets for _, targets in data.test_dataloader()])
    assert (counted >= 0).sum() == 2 * EACH - 1 and counted[1] == -1
    images, targets = data.selection_batch(2 * EACH)
    assert len(images) == 2 * EACH and int(targets.min()) >= 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be read" in line]
    for name in ("train/a/02.png", "train/b/09.png", "test/a/01.png"):
        assert sum(name in line for line in lines) == (2 if "train" in name else 1), "once for each data module"
    assert any("another one takes its place (2 so far)" in line for line in lines)
    assert any("it is not counted (3 so far)" in line for line in lines)


def test_resumed_in_the_middle_of_an_epoch(root: Path) -> None:
    whole = list(module(root).train_dataloader())
    loader = module(root).train_dataloader()
    loader.load_state_dict({"epoch": 0, "batches": 1})
    for (images, targets), (again, same) in zip(whole[1:], loader, strict=True):
        assert torch.equal(images, again) and torch.equal(targets, same)


def test_verifying_names_what_is_bad_and_remembers_what_is_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []
    whole = AugmentedImages.read
    monkeypatch.setattr(AugmentedImages, "read", lambda self, index: read.append(index) or whole(self, index))
    with pytest.raises(UserError, match=r"data\.verify: 3 of 24 images cannot be read: .*02\.png.*09\.png.*01\.png"):
        module(root, on_bad_image="error", verify=True).load()
    assert len(read) == 24
    read.clear()
    with pytest.warns(UserWarning, match="3 of 24 images"):
        data = module(root, verify=True)
        data.load()
    assert sorted(read) == [1, 2, 9], "those that were bad, again"
    epoch(data.train_dataloader(), 0)
    assert "cannot be read" not in capsys.readouterr().err, "they have been named"
    for split, bad in BAD.items():
        for number in bad:
            good = root / split / "ab"[number // EACH]
            Image.new("RGB", (8, 8)).save(good / f"{number:02d}.png")
    read.clear()
    module(root, on_bad_image="error", verify=True).load()
    assert sorted(read) == [1, 2, 9], "those that changed"


def test_nothing_is_squashed_unless_asked(root: Path) -> None:
    """A picture of 8 x 24 with a stripe on either side: they are cut off, not pressed together."""
    for split in BAD:
        for label in "ab":
            picture = np.zeros((8, 24, 3), np.uint8)
            picture[:, :6] = picture[:, -6:] = 255
            for path in (root / split / label).iterdir():
                Image.fromarray(picture).save(path)
    for crop in ("none", "pad"):
        images, _ = next(iter(module(root, crop=crop, crop_padding=0).train_dataloader()))
        assert images.max() == 0
        assert next(iter(module(root, crop=crop, img_size=[8, 12]).test_dataloader()))[0].max() == 0
        assert next(iter(module(root, crop=crop, resize="squash").test_dataloader()))[0].max() == 1


def test_workers_by_default(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tas.data.workers.processors", lambda: 6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**30}))
    assert default_workers(2**20) == 6 and default_workers(2**20, processes=2) == 3
    assert default_workers(2**20, processes=6) == 0, "one processor each"
    assert default_workers(77 * 2**20) == 2, "what shared memory holds"
    assert default_workers(400 * 2**20) == 0
    assert module(root).train_dataloader().num_workers == 0, "few images"
    monkeypatch.setattr("lightning_tas.data.module.FEW", 4)
    assert module(root).train_dataloader().num_workers == 6
    assert TASDataModule(DataConfig(name="digits")).train_dataloader().num_workers == 0, "in memory"
