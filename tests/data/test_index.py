"""The list of images is made once, kept, and made anew when anything has changed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_tas.data import index_cache
from lightning_tas.data import stored as stored_module
from lightning_tas.data.config import DataConfig
from lightning_tas.data.index import of_folders
from lightning_tas.data.stored import StoredImages, read
from lightning_tas.errors import UserError

from .test_datasets import png, tar_of


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which lists were made, one entry each; all are worth keeping."""
    monkeypatch.setattr(index_cache, "WORTH", 0.0)
    found: list[str] = []
    for name in ("of_folders", "of_shards"):
        make = getattr(stored_module, name)

        def counted(*arguments: Any, make: Any = make, name: str = name) -> Any:
            found.append(name)
            time.sleep(0.05)  # the others are waiting by then
            return make(*arguments)

        monkeypatch.setattr(stored_module, name, counted)
    return found


def age(root: Path) -> None:
    """What was written a moment ago might be written again without a new time, and is not trusted."""
    for path in (root, *root.rglob("*")):
        os.utime(path, (1e9, 1e9))


def folders(root: Path) -> Path:
    for name in ("b", "a", "a/deep"):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(root / name / "é.png")
    (root / "notes.txt").write_text("")
    age(root)
    return root


def shards(root: Path) -> Path:
    for number in range(2):
        tar_of(root / f"x-{number}.tar", {"s.png": png(number), "s.cls": b"%d" % number, "t.json": b""})
    age(root)
    return root


def listed(root: Path, cache: Path) -> StoredImages:
    config = DataConfig(cache_dir=str(cache))
    names = sorted(path.name for path in root.glob("*.tar"))
    with pytest.warns(UserWarning, match="not used of"):
        return read(root, "shards" if names else "folders", names, config)


def same(one: StoredImages, two: StoredImages) -> bool:
    places = [[data.index.place(i) for i in range(len(data))] for data in (one, two)]
    return places[0] == places[1] and one.classes == two.classes and one.targets.tolist() == two.targets.tolist()


@pytest.mark.parametrize("layout", [folders, shards])
def test_kept_until_something_changes(tmp_path: Path, made: list[str], layout: Any) -> None:
    root, cache = layout(tmp_path / "data"), tmp_path / "cache"
    first = listed(root, cache)
    again = listed(root, cache)
    assert len(made) == 1 and same(first, again) and again[1][0].size in ((4, 4), (14, 12))
    if layout is folders:
        assert first.name_of(0) == str(root / "a" / "é.png") and first.targets.tolist() == [0, 0, 1]
        Image.new("RGB", (4, 4)).save(root / "a" / "deep" / "new.png")
    else:
        tar_of(root / "x-1.tar", {"s.png": png(1), "s.cls": b"1", "u.png": png(2), "u.cls": b"1"})
    assert len(listed(root, cache)) == len(first) + 1 and len(made) == 2
    listed(root, cache)
    assert len(made) == 3, "changed a moment ago"
    age(root)
    listed(root, cache)
    listed(root, cache)
    assert len(made) == 4
    (kept,) = cache.glob("index-*.safetensors")
    content = bytearray(kept.read_bytes())
    content[-3] ^= 1
    kept.write_bytes(content)
    assert same(listed(root, cache), listed(root, cache)) and len(made) == 5, "a damaged list is made anew"


def test_one_makes_it_and_the_others_wait(tmp_path: Path, made: list[str]) -> None:
    root, found = folders(tmp_path / "data"), []
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    threads = [threading.Thread(target=lambda: found.append(read(root, "folders", (), config))) for _ in range(4)]
    with pytest.warns(UserWarning, match="not used of"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1 and all(same(found[0], other) for other in found)


def test_no_place_to_keep_it(tmp_path: Path, made: list[str]) -> None:
    root = folders(tmp_path / "data")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"data\.cache_dir: .* cannot be kept in"):
        assert len(listed(root, tmp_path / "file" / "cache")) == 3


def test_what_is_quick_to_list_leaves_no_trace(tmp_path: Path) -> None:
    root = folders(tmp_path / "data")
    listed(root, tmp_path / "cache")
    (tmp_path / "broken.tar").write_bytes(b"x" * 2000)
    with pytest.raises(UserError, match="broken"):
        read(tmp_path, "shards", ["broken.tar"], DataConfig(cache_dir=str(tmp_path / "cache")))
    assert not any((tmp_path / "cache").iterdir())


def test_links_that_lead_back_end(tmp_path: Path) -> None:
    root = folders(tmp_path / "data")
    (root / "a" / "deep" / "back").symlink_to(root / "a")
    assert len(of_folders(root, lambda number: None).targets) == 3


def test_order_of_images(tmp_path: Path) -> None:
    """`folder` has torchvision's order and `imagenet` timm's, which splits and runs of before depend on."""
    from timm.data.readers.reader_image_folder import ReaderImageFolder
    from torchvision.datasets import ImageFolder

    names = ["n2_10.JPEG", "n2_9.JPEG", "N2_9a.JPEG", "n2_1.png", "n10.jpg"]
    for label in ("n02", "n10"):
        (tmp_path / label).mkdir()
        for name in names:
            Image.new("L", (2, 2)).save(tmp_path / label / name)
    plain, natural = (of_folders(tmp_path, lambda number: None, natural) for natural in (False, True))
    theirs = [path for path, _ in ImageFolder(str(tmp_path)).samples]
    assert [str(tmp_path / plain.name(i)) for i in range(10)] == theirs
    reader = ReaderImageFolder(str(tmp_path))
    assert [natural.name(i) for i in range(10)] == [reader.filename(i) for i in range(10)]
