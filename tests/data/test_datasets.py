"""Built-in data sets read small files in the real formats; what is missing or broken gives one message."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import shutil
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_tas.data import DataConfig, TASDataModule
from lightning_tas.data import arrays as arrays_module
from lightning_tas.data.arrays import read_idx
from lightning_tas.data.registry import find, targets_of
from lightning_tas.data.stored import read
from lightning_tas.errors import UserError
from lightning_tas.randomness import numpy_generator


def noise(*shape: int, key: int = 0) -> np.ndarray:
    return numpy_generator(0, "files", key).integers(0, 256, shape, dtype=np.uint8)


def load(name: str, root: Path | None = None, **kwargs: Any) -> TASDataModule:
    module = TASDataModule(DataConfig(name=name, root=str(root) if root else None, batch_size=2, **kwargs), seed=0)
    module.load()
    return module


def assert_missing(name: str, root: Path | None, *parts: str, **kwargs: Any) -> None:
    with pytest.raises(UserError) as caught:
        load(name, root, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"data.name={name}", "Expected: ", "To get it: ", *parts):
        assert part in message


def test_digits() -> None:
    module = load("digits")
    data = module.load()
    train, test = data.train, data.test
    assert (len(train), len(test)) == (1437, 360)  # type: ignore[arg-type]
    pixels = torch.cat([train.images, test.images]).double() / 255  # type: ignore[attr-defined]
    assert len({hashlib.sha256(p.numpy().tobytes()).digest() for p in pixels}) > 1750  # the data hold a few duplicates
    assert module.mean[0] == pytest.approx(float(train.images.double().mean() / 255), abs=0.002)  # type: ignore[attr-defined]
    assert module.std[0] == pytest.approx(float((train.images.double() / 255).std()), abs=0.002)  # type: ignore[attr-defined]
    assert np.bincount(targets_of(test)).min() >= 34
    assert data.class_names == [str(i) for i in range(10)]


# ---- Fashion-MNIST ---------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray, zipped: bool) -> None:
    raw = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes() + array.tobytes()
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_fashion(folder: Path, zipped: bool) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, count in (("train", 40), ("t10k", 10)):
        written[split] = noise(count, 28, 28, key=count)
        write_idx(folder / f"{split}-images-idx3-ubyte", written[split], zipped)
        write_idx(folder / f"{split}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10, zipped)
    return written


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw"])
def test_fashion_mnist_from_written_files(tmp_path: Path, zipped: bool, below: str) -> None:
    written = write_fashion(tmp_path / below, zipped)
    module = load("fashion_mnist", tmp_path)
    data = module.load()
    for dataset, split in ((data.train, "train"), (data.test, "t10k")):
        assert np.array_equal(dataset.images[:, 0].numpy(), written[split])  # type: ignore[attr-defined]
        assert targets_of(dataset).tolist() == [i % 10 for i in range(len(written[split]))]
    assert module.class_names[9] == "Ankle boot" and module.num_train == 36


def test_broken_idx_files(tmp_path: Path) -> None:
    write_fashion(tmp_path, zipped=True)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[:-500])
    with pytest.raises(UserError, match=r"cannot read .*train-images"):
        load("fashion_mnist", tmp_path)
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    with pytest.raises(UserError, match="should hold 31360 bytes"):
        load("fashion_mnist", tmp_path)
    images.write_bytes(gzip.compress(b"not an image"))
    with pytest.raises(UserError, match="no IDX file"):
        load("fashion_mnist", tmp_path)
    images.unlink()
    images.with_suffix("").write_bytes(b"\x00\x00\x08\x03" + np.asarray([1, 2, 2], ">u4").tobytes() + b"1234")
    with pytest.raises(UserError, match="1 train images, but 40 labels"):
        load("fashion_mnist", tmp_path)


def test_fashion_mnist_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_missing("fashion_mnist", tmp_path, str(tmp_path), "apt-get install dataset-fashion-mnist", "idx3-ubyte")
    monkeypatch.setattr(arrays_module, "_DEBIAN_FASHION", tmp_path / "nowhere")
    assert_missing("fashion_mnist", None, "data.root is not set", str(tmp_path / "nowhere"))


@pytest.mark.skipif(
    not (arrays_module._DEBIAN_FASHION.is_dir() or os.environ.get("CI")),
    reason="dataset-fashion-mnist is not installed",
)
def test_real_fashion_mnist() -> None:
    module = load("fashion_mnist")
    data = module.load()
    train, test = data.train, data.test
    assert train.images.shape == (60_000, 1, 28, 28) and test.images.shape == (10_000, 1, 28, 28)  # type: ignore[attr-defined]
    assert np.bincount(targets_of(train)).tolist() == [6000] * 10
    assert module.mean[0] == pytest.approx(train.images.float().mean().item() / 255, abs=2e-4)  # type: ignore[attr-defined]
    assert module.std[0] == pytest.approx(train.images.float().std().item() / 255, abs=2e-4)  # type: ignore[attr-defined]
    assert module.num_train == 54_000
    pixels = read_idx(arrays_module._DEBIAN_FASHION / "t10k-labels-idx1-ubyte.gz", 1)
    assert pixels[:5].tolist() == [9, 2, 1, 1, 6]


# ---- CIFAR -----------------------------------------------------------------------------------------------------------


def write_cifar(folder: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled batches as published, ten images each, and their checksums where torchvision looks for them."""
    hundred = kind.__name__ == "CIFAR100"
    base = folder / kind.base_folder
    base.mkdir(parents=True)

    def write(name: str, content: dict[str, Any]) -> str:
        (base / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((base / name).read_bytes()).hexdigest()

    for attribute in ("train_list", "test_list"):
        entries = []
        for number, (name, _) in enumerate(getattr(kind, attribute)):
            labels = [(number + i) % (100 if hundred else 10) for i in range(10)]
            content = {"data": noise(10, 3072, key=number), "fine_labels" if hundred else "labels": labels}
            entries.append([name, write(name, content)])
        monkeypatch.setattr(kind, attribute, entries)
    key = kind.meta["key"]
    names = [f"name {i}" for i in range(100 if hundred else 10)]
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": write(kind.meta["filename"], {key: names})})


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    kind = getattr(datasets, name.upper())
    assert_missing(name, tmp_path, kind.base_folder, "data.download=true")
    assert_missing(name, None, "data.root is not set")
    write_cifar(tmp_path, kind, monkeypatch)
    module = load(name, tmp_path, search_val=0.0)
    train = module.load().train
    assert train.images.shape == (len(kind.train_list) * 10, 3, 32, 32)  # type: ignore[attr-defined]
    assert np.array_equal(train.images[0].numpy().reshape(-1), noise(10, 3072, key=0)[0])  # type: ignore[attr-defined]
    assert module.class_names[3] == "name 3" and module.num_classes == len(module.class_names)
    batch, targets = next(iter(module.train_dataloader()))
    assert batch.shape == (2, 3, 32, 32) and targets.shape == (2,)


# ---- Flowers-102 -----------------------------------------------------------------------------------------------------


def test_flowers102(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat
    from torchvision.datasets import Flowers102

    assert_missing("flowers102", tmp_path, "imagelabels.mat", "data.download=true")
    base = tmp_path / "flowers-102"
    (base / "jpg").mkdir(parents=True)
    for number in range(1, 9):
        Image.fromarray(noise(20, 30, 3, key=number)).save(base / "jpg" / f"image_{number:05d}.jpg")
    savemat(base / "imagelabels.mat", {"labels": np.array([[1, 2, 3, 1, 2, 3, 102, 102]])})
    savemat(base / "setid.mat", {"trnid": [[1, 2]], "valid": [[3, 4, 7]], "tstid": [[5, 6, 8]]})
    sums = {n: hashlib.md5((base / n).read_bytes()).hexdigest() for n in ("imagelabels.mat", "setid.mat")}
    monkeypatch.setattr(
        Flowers102,
        "_file_dict",
        {
            **Flowers102._file_dict,
            **{k: (n, sums[n]) for k, n in (("label", "imagelabels.mat"), ("setid", "setid.mat"))},
        },
    )
    module = load("flowers102", tmp_path, search_val=0.0, img_size=32)
    data = module.load()
    assert targets_of(data.train).tolist() == [0, 1, 2, 0, 101] and targets_of(data.test).tolist() == [1, 2, 101]
    assert len(module.class_names) == module.num_classes == 102
    assert next(iter(module.train_dataloader()))[0].shape == (2, 3, 32, 32)
    assert next(iter(module.test_dataloader()))[0].shape == (2, 3, 32, 32)


# ---- folders, tars and shards ----------------------------------------------------------------------------------------


def write_folder(root: Path, splits: dict[str, int], classes: tuple[str, ...] = ("cat", "dog", "eel")) -> None:
    for split, count in splits.items():
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                Image.fromarray(noise(12, 14, 3, key=label)).save(root / split / name / f"{split}_{name}_{i}.png")


@pytest.mark.parametrize("evaluation", ["val", "test"])
def test_folder(tmp_path: Path, evaluation: str) -> None:
    write_folder(tmp_path, {"train": 5, evaluation: 2})
    module = load("folder", tmp_path, img_size=8, search_val=3)
    assert module.class_names == ["cat", "dog", "eel"] and module.num_classes == 3 and module.num_train == 12
    assert next(iter(module.train_dataloader()))[0].shape == (2, 3, 8, 8)
    targets = torch.cat([y for _, y in module.test_dataloader()])
    assert sorted(targets.tolist()) == [0, 0, 1, 1, 2, 2]
    assert sorted(torch.cat([y for _, y in module.val_dataloader()]).tolist()) in ([-1, 0, 1, 2], [0, 1, 2])


def test_folder_with_its_own_validation_split(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 5, "val": 1, "test": 2})
    module = load("folder", tmp_path, img_size=8)
    assert module.num_train == 15
    assert sum(len(y) for _, y in module.val_dataloader()) == 3
    assert sum(len(y) for _, y in module.test_dataloader()) == 6


def test_folder_mistakes(tmp_path: Path) -> None:
    assert_missing("folder", None, "train/CLASS")
    assert_missing("folder", tmp_path, "train/CLASS")
    write_folder(tmp_path, {"train": 2})
    assert_missing("folder", tmp_path, "test/CLASS")
    write_folder(tmp_path, {"val": 1}, classes=("cat", "dog", "fox"))
    with pytest.raises(UserError, match=r"not in training: fox; missing: eel"):
        load("folder", tmp_path)
    write_folder(tmp_path / "b", {"train": 2})
    write_folder(tmp_path / "b", {"val": 0})
    with pytest.raises(UserError, match=r"no images in .*val"):
        load("folder", tmp_path / "b")


@pytest.mark.parametrize("name", ["folder", "imagenet"])
def test_hidden_things_are_no_classes_and_the_unused_is_counted(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, {"train": 3, "val": 1})
    for split in ("train", "val"):
        for litter in (".ipynb_checkpoints", "__MACOSX", "cat/.ipynb_checkpoints"):
            (tmp_path / split / litter).mkdir()
            Image.new("RGB", (9, 9)).save(tmp_path / split / litter / "a.png")
        for litter in (".DS_Store", "cat/.DS_Store", "cat/._a.png", "dog/Thumbs.db", "dog/notes.txt", "list.csv"):
            (tmp_path / split / litter).write_bytes(b"x")
    (tmp_path / "extra").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = load(name, tmp_path, img_size=8, search_val=0, num_classes=3)
        module.load()
    assert module.class_names == ["cat", "dog", "eel"] and module.num_train == 9
    said = [str(warning.message) for warning in caught if "not used" in str(warning.message)]
    assert f"data.root: not used of {tmp_path}: 1 beside the splits (extra)" in said
    for split in ("train", "val"):
        (line,) = [line for line in said if str(tmp_path / split) in line]
        assert "1 *.txt (dog/notes.txt)" in line and "1 beside the class folders (list.csv)" in line
        assert "7 hidden (.DS_Store)" in line


def test_hidden_things_in_tars(tmp_path: Path) -> None:
    """macOS puts a `._` file beside every file that it packs."""
    write_imagenet(tmp_path / "one", "one tar")
    members = {f"{prefix}{label}/{end}{i}.png": png(i) for prefix, end in (("", ""), ("__MACOSX/", "._"), ("", "._"))
               for label in ("a", "b") for i in range(2)}  # fmt: skip
    for split in ("train", "val"):
        tar_of(tmp_path / "one" / f"{split}.tar", members)
        tar_of(tmp_path / "many" / split / "a.tar", members)
        tar_of(tmp_path / "many" / split / "._a.tar", {"x.png": png(0)})
        shard = {
            f"{key}.{end}": png(0) if end == "png" else b"0" for key in ("s", "t", "._s") for end in ("png", "cls")
        }
        tar_of(tmp_path / "shards" / f"my-{split}-0.tar", shard)
        tar_of(tmp_path / "shards" / f"._my-{split}-0.tar", {"x": b""})
    for folder, classes, images in (("one", 2, 4), ("many", 1, 4), ("shards", 1, 2)):
        with pytest.warns(UserWarning, match=r"not used of .*hidden"):
            data = load("imagenet", tmp_path / folder, num_classes=classes, search_val=0).load()
        assert len(data.class_names) == classes and len(data.train) == images  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["folders", "tars", "tar of tars"])
def test_classes_are_in_one_order_in_every_layout(layout: str, tmp_path: Path) -> None:
    """ "-" comes before "." and after the end of a name: tars sorted by their file names would swap these two."""
    for split in ("train", "val"):
        inner = {}
        for label, name in enumerate(("cat", "cat-wild")):
            path = tmp_path / split / f"{name}.tar"
            tar_of(path, {f"{i}.png": png(label) for i in range(2)})
            inner[path.name] = path.read_bytes()
            if layout == "folders" or split == "val":  # one split of tars, one of folders
                (tmp_path / split / name).mkdir()
                for i in range(2):
                    (tmp_path / split / name / f"{i}.png").write_bytes(png(label))
            if layout != "tars" or split == "val":
                path.unlink()
        if layout == "tar of tars":
            tar_of(tmp_path / f"{split}.tar", inner)
            shutil.rmtree(tmp_path / split)
    data = load("imagenet", tmp_path, num_classes=2, search_val=0).load()
    assert data.class_names == ["cat", "cat-wild"]
    for source in (data.train, data.test):
        assert targets_of(source).tolist() == [0, 0, 1, 1]
        assert np.array_equal(np.asarray(source[3][0]), noise(12, 14, 3, key=1))


def test_a_tar_of_tars(tmp_path: Path) -> None:
    """As ILSVRC2012_img_train.tar is: a tar for each class."""
    for split in ("train", "val"):
        inner = {}
        for label, name in enumerate(("n01", "n02")):
            tar_of(tmp_path / "x.tar", {f"{name}_{i}.png": png(label) for i in range(2)})
            inner[f"{name}.tar"] = (tmp_path / "x.tar").read_bytes()
        tar_of(tmp_path / f"{split}.tar", inner)
    data = load("imagenet", tmp_path, num_classes=2, search_val=0).load()
    assert data.class_names == ["n01", "n02"] and targets_of(data.train).tolist() == [0, 0, 1, 1]
    assert np.array_equal(np.asarray(data.train[3][0]), noise(12, 14, 3, key=1))


def tar_of(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def png(key: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(12, 14, 3, key=key)).save(buffer, "png")
    return buffer.getvalue()


def write_imagenet(root: Path, layout: str) -> None:
    names = ("n01", "n02", "n03")
    for split, count in (("train", 4), ("val", 2)):
        if layout == "folders":
            write_folder(root, {split: count}, names)
        elif layout == "class tars":
            for label, name in enumerate(names):
                tar_of(root / split / f"{name}.tar", {f"{name}_{i}.png": png(label) for i in range(count)})
        elif layout == "one tar":
            members = {f"{name}/{name}_{i}.png": png(label) for label, name in enumerate(names) for i in range(count)}
            tar_of(root / f"{split}.tar", members)
        else:
            for shard in range(2):
                members = {}
                for i in range(shard, 3 * count, 2):
                    members |= {
                        f"s{i:03d}.png": png(i % 3),
                        f"s{i:03d}.cls": str(i % 3).encode(),
                        f"s{i:03d}.json": b"{}",
                    }
                tar_of(root / f"imagenet-{split}-{shard:04d}.tar", members)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("layout", ["folders", "class tars", "one tar", "shards"])
def test_imagenet_layouts(tmp_path: Path, layout: str, num_workers: int) -> None:
    write_imagenet(tmp_path, layout)
    module = load("imagenet", tmp_path, num_classes=3, img_size=12, search_val=3, num_workers=num_workers, crop="none",
                  auto_augment=None, color_jitter=0.0, reprob=0.0, hflip=0.0, mean=0.0, std=1.0)  # fmt: skip
    assert module.class_names == (["0", "1", "2"] if layout == "shards" else ["n01", "n02", "n03"])
    assert module.num_train == 9
    wanted: dict[int, torch.Tensor] = {}
    for label in range(3):
        wanted[label] = torch.from_numpy(noise(12, 14, 3, key=label)[:, 1:13]).permute(2, 0, 1) / 255
    for loader, total in ((module.train_dataloader(), 8), (module.test_dataloader(), 6)):
        count = 0
        for images, targets in loader:
            count += len(targets)
            for image, target in zip(images, targets.tolist(), strict=True):
                assert torch.allclose(image, wanted[target], atol=0.02), "an image goes with its class"
        assert count == total


def test_imagenet_mistakes(tmp_path: Path) -> None:
    assert_missing("imagenet", None, "image-net.org")
    assert_missing("imagenet", tmp_path, "image-net.org")
    write_imagenet(tmp_path, "folders")
    with pytest.raises(UserError, match=r"imagenet has 1000 classes, but .* holds 3: use data.name=folder"):
        load("imagenet", tmp_path)
    with pytest.raises(UserError, match=r"data.num_classes: 2 is not valid.*3 classes"):
        load("imagenet", tmp_path, num_classes=2)


def test_webdataset_by_its_prefix(tmp_path: Path) -> None:
    assert_missing("wds/mine", tmp_path, "*train*.tar")
    write_imagenet(tmp_path, "shards")
    assert load("wds/mine", tmp_path, search_val=0).num_train == 12
    (tmp_path / "imagenet-train-0002.tar").write_bytes(b"x" * 2000)
    with pytest.raises(UserError, match=r"cannot read the shard .*0002"):
        load("wds/mine", tmp_path)


def test_a_shard_without_labels_is_refused(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", {"x.png": png(0), "y.cls": b"1"})
    with pytest.raises(UserError, match="no samples"):
        read(tmp_path, "shards", ["a.tar"], DataConfig(cache_dir=str(tmp_path / "cache")))


def test_timm_prefixes(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    write_fashion(folder, zipped=False)
    with pytest.raises(UserError, match="torch/nothing"):
        load("torch/nothing", tmp_path)
    module = load("torch/mnist", tmp_path, in_chans=1, search_val=0, num_classes=10, img_size=28, mean=0.13, std=0.3)
    assert len(module.class_names) == 10
    assert next(iter(module.train_dataloader()))[0].shape == (2, 1, 28, 28)
    with pytest.raises(UserError, match="stream"):
        load("tfds/mnist", tmp_path)


# ---- synthetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (152, 150)])
def test_synthetic_is_a_function_of_the_index(size: tuple[int, int]) -> None:
    kwargs: dict[str, Any] = {"img_size": list(size), "in_chans": 3, "num_classes": 7}
    first, second = (load("synthetic", **kwargs).load() for _ in range(2))
    for i in (0, 6, 511):
        a, b = first.train[i], second.train[i]
        assert np.array_equal(np.asarray(a[0]), np.asarray(b[0])) and a[1] == b[1] == i % 7
    assert not np.array_equal(np.asarray(first.train[0][0]), np.asarray(first.train[7][0]))
    assert not np.array_equal(np.asarray(first.train[0][0]), np.asarray(first.test[0][0]))


@pytest.mark.parametrize("chans", [1, 3, 5])
def test_synthetic_of_any_shape(chans: int) -> None:
    module = load("synthetic", img_size=[10, 6], in_chans=chans, num_classes=3, auto_augment=None, color_jitter=0.0)
    images, targets = next(iter(module.train_dataloader()))
    assert images.shape == (2, chans, 10, 6) and int(targets.max()) < 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(int((y >= 0).sum()) for _, y in module.test_dataloader()) == 128


def test_facts_known_in_advance_are_those_of_the_data() -> None:
    for name in ("digits", "synthetic"):
        entry = find(name)
        config = DataConfig(name=name)
        assert entry.facts(config) == entry.load(config).facts()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named(tmp_path, workers):
    """Also from a worker process: one line, not the text of a traceback."""
    for split in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / split / label / f"{i}.png")
    damaged = tmp_path / "test" / "b" / "1.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    data = TASDataModule(
        DataConfig(name="folder", root=str(tmp_path), img_size=8, batch_size=2, num_workers=workers, search_val=0)
    )
    with pytest.raises(UserError, match=r"^data\.root: image '.*1\.png' cannot be read") as caught:
        list(data.test_dataloader())
    assert "\n" not in str(caught.value)
