"""The data module: splits, loaders, messages, and users' own data sets."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightning_tas.data import ArrayImages, DataConfig, Facts, ImageData, TASDataModule, names, register, registry
from lightning_tas.data.config import BUILT_IN, TIMM_PREFIXES
from lightning_tas.data.loader import CountedLoader
from lightning_tas.data.registry import targets_of
from lightning_tas.data.splits import Splits
from lightning_tas.errors import UserError

registry.names()  # the built-in data sets are there before any test puts a copy in the registry's place
LIGHT: dict[str, Any] = {"crop": "pad", "auto_augment": None, "color_jitter": 0.0, "reprob": 0.0}


def module(seed: int = 0, **kwargs: Any) -> TASDataModule:
    return TASDataModule(DataConfig(**{"name": "digits", "batch_size": 32, **LIGHT, **kwargs}), seed)


def test_splits_are_disjoint_stratified_and_seeded() -> None:
    one, same, other = module(seed=1), module(seed=1), module(seed=2)
    for m in (one, same, other):
        m.load()
    assert one._splits and same._splits and other._splits
    train, held = one._splits.train, one._splits.search_val
    assert len(held) == 144 and len(train) == 1293
    assert len(np.union1d(train, held)) == 1437 and len(np.intersect1d(train, held)) == 0
    targets = targets_of(one.load().train)
    assert np.abs(np.bincount(targets[held]) - 0.1 * np.bincount(targets)).max() < 1
    assert np.array_equal(held, same._splits.search_val) and not np.array_equal(held, other._splits.search_val)


def test_a_number_of_held_out_images_is_the_same_of_each_class() -> None:
    """As AutoFormer's 100 of each class of ImageNet, of which some have 732 images and most 1,300."""
    targets = np.repeat(np.arange(4), [5, 40, 60, 80])
    held = Splits.of(targets, 16, False, None, 0).search_val
    assert np.bincount(targets[held]).tolist() == [4, 4, 4, 4]
    scarce = Splits.of(targets, 40, False, None, 0).search_val
    assert np.bincount(targets[scarce]).tolist() == [4, 12, 12, 12], "what a small class cannot give, the others do"
    share = Splits.of(targets, 0.2, False, None, 0).search_val
    assert np.bincount(targets[share]).tolist() == [1, 8, 12, 16]


def test_images_that_choose_are_trained_on_where_leak_says_so() -> None:
    one, leaky = module(search_val=100), module(search_val=100, leak=True)
    assert (one.num_train, leaky.num_train) == (1337, 1437), "known before loading"
    for m in (one, leaky):
        m.load()
    assert one._splits and leaky._splits
    assert np.array_equal(one._splits.search_val, leaky._splits.search_val)
    assert len(leaky._splits.train) == leaky.num_train == 1437


@pytest.mark.parametrize(
    ("trained", "now", "seen"),
    [
        ({}, {}, 0),
        ({"search_val": 0}, {"search_val": 100}, 100),
        ({"leak": True}, {}, 144),
        ({"search_val": 100}, {"search_val": 50}, 0),  # of each class the first of the same order
        ({"search_val": 0, "train_subset": 50}, {"search_val": 1000}, None),
        ({"search_val": 0}, {"search_val": 100, "leak": True}, 0),
        ({"search_val": 0}, {"name": "synthetic", "img_size": 8, "num_classes": 10}, 0),
    ],
)
def test_weights_are_not_judged_by_images_that_they_have_seen(
    trained: dict[str, Any], now: dict[str, Any], seen: int | None
) -> None:
    before, m = module(**trained), module(**now)
    before.load()
    m.load()
    assert before._splits and m._splits
    if not now.get("leak"):
        with pytest.warns(UserWarning, match="does not say which images it was trained on"):
            m.check_unseen(None, "'old.ckpt'")
    if seen is None:
        seen = len(np.intersect1d(before._splits.train, m._splits.search_val))
        assert 0 < seen < 50
    if not seen:
        m.check_unseen([before.trained_on], "'a.ckpt'")
        return
    with pytest.raises(UserError, match=rf"data.search_val: 'a.ckpt' was trained on {seen} of the .*data.leak=true"):
        m.check_unseen([before.trained_on], "'a.ckpt'")


def test_another_seed_holds_out_images_that_were_trained_on() -> None:
    before, m = module(seed=1), module(seed=2)
    before.load()
    with pytest.raises(UserError, match=r"search_val=0.1, seed=1 and data.leak=false"):
        m.check_unseen([before.trained_on], "'a.ckpt'")


def test_every_training_of_the_weights_counts() -> None:
    """Begun with the weights of a run that held out nothing, they have seen all images."""
    first, second = module(search_val=0), module()
    for m in (first, second):
        m.load()
    second.check_unseen([second.trained_on], "'a.ckpt'")
    with pytest.raises(UserError, match="was trained on 144 of the 144"):
        second.check_unseen([first.trained_on, second.trained_on], "'a.ckpt'")
    assert second.chooses and not first.chooses


def test_training_never_sees_what_is_held_out() -> None:
    m = module(hflip=0.0, crop="none", drop_last=False)
    held = {x.numpy().tobytes() for batch, _ in m.val_dataloader() for x in batch}
    test = {x.numpy().tobytes() for batch, _ in m.test_dataloader() for x in batch}
    seen = [x.numpy().tobytes() for batch, _ in m.train_dataloader() for x in batch]
    assert len(held) == 144 and len(test) == 360 and len(seen) == 1293
    duplicates = 3  # the digits hold a few pairs of equal images
    assert len(held & set(seen)) + len(test & set(seen)) + len(held & test) <= duplicates


def test_train_subset() -> None:
    whole, part, again = module(), module(train_subset=100), module(train_subset=100)
    for m in (whole, part, again):
        m.load()
    assert whole._splits and part._splits and again._splits
    assert np.array_equal(part._splits.train, again._splits.train)
    assert set(part._splits.train) < set(whole._splits.train)
    assert np.array_equal(part._splits.search_val, whole._splits.search_val)
    assert part.num_train == 100 and part.steps_per_epoch() == 3
    assert np.bincount(targets_of(part.load().train)[part._splits.train]).min() >= 9


def test_no_search_split_validates_on_the_test_set_with_a_warning() -> None:
    m = module(search_val=0)
    with pytest.warns(UserWarning, match="search_val=0"):
        loader = m.val_dataloader()
    assert sum(len(y) for _, y in loader) == 360


@pytest.mark.parametrize(
    "kwargs", [{}, {"repeated_aug": 3}, {"drop_last": False}, {"train_subset": 50}, {"search_val": 200}]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_are_known_before_loading(kwargs: dict[str, Any], world_size: int) -> None:
    m = module(batch_size=8, **kwargs)
    before = m.num_train, m.steps_per_epoch(world_size)
    assert m._data is None
    m.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=0, world_size=world_size, train_dataloader=None
    )
    loader = m.train_dataloader()
    assert before == (m.num_train, len(loader))
    assert sum(1 for _ in loader) == len(loader)


def test_ranks_share_the_images() -> None:
    loaders = []
    for rank in range(2):
        m = module(batch_size=8)
        m.trainer = SimpleNamespace(  # type: ignore[assignment]
            global_rank=rank, world_size=2, train_dataloader=None
        )
        loaders.append((m.train_dataloader(), m.test_dataloader()))
    keys = [np.concatenate(list(t.sampler.batches(3))) for t, _ in loaders]
    assert len(np.intersect1d(keys[0][:, 1], keys[1][:, 1])) == 0
    images = [next(iter(t))[0] for t, _ in loaders]
    assert not torch.equal(*images)
    counted = [sum(int((y >= 0).sum()) for _, y in e) for _, e in loaders]
    assert counted == [180, 180]


def test_meets_the_interface_without_opening_files() -> None:
    m = TASDataModule(DataConfig(name="imagenet", batch_size=1024, repeated_aug=3), 0)
    assert (m.num_classes, m.in_chans, m.img_size) == (1000, 3, (224, 224))
    assert m.num_train == 1_281_167 - 128_117
    assert m.steps_per_epoch(8) == m.num_train // 256 * 256 // 8 // 1024
    assert m._data is None
    with pytest.raises(UserError, match="image-net"):
        m.setup("fit")


def test_channels_and_statistics_follow_the_settings() -> None:
    assert module(in_chans=3).mean == pytest.approx((0.3053,) * 3)
    assert TASDataModule(DataConfig(name="cifar10", in_chans=1)).std == pytest.approx(((0.2470 + 0.2435 + 0.2616) / 3,))
    assert module(mean=[0.2], std=0.5).std == (0.5,)
    images, _ = next(iter(module(in_chans=3, img_size=[9, 10]).train_dataloader()))
    assert images.shape == (32, 3, 9, 10)
    for kwargs in ({"mean": [0.1, 0.2]}, {"std": 0.0}):
        with pytest.raises(UserError, match="is not valid"):
            module(**kwargs).train_dataloader()
    with pytest.raises(UserError, match=r"data\.in_chans: 2"):
        module(in_chans=2).train_dataloader()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"batch_size": 0},
        {"batch_size": 2000},
        {"train_subset": 20},
        {"train_subset": 1400},
        {"search_val": -0.1},
        {"search_val": 1.5},
        {"search_val": 1436},
        {"num_workers": -1},
        {"hflip": 1.5},
        {"crop": "center"},
        {"crop_scale": [0.9, 0.1]},
        {"crop_pct": 0.0},
        {"auto_augment": "random-m9"},
        {"interpolation": "cubic"},
        {"remode": "pixels"},
        {"img_size": [8, 8, 8]},
        {"img_size": 0},
        {"repeated_aug": 0},
        {"num_classes": 5},
        {"color_jitter": -1.0},
    ],
    ids=str,
)
def test_mistakes_are_refused_before_training(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        module(**kwargs).load()
    message = str(caught.value)
    assert f"data.{next(iter(kwargs))}" in message and "\n" not in message
    assert str(next(iter(kwargs.values()))) in message


def test_too_many_processes_for_the_images() -> None:
    m = module(train_subset=40, batch_size=30)
    m.trainer = SimpleNamespace(global_rank=0, world_size=2)  # type: ignore[assignment]
    with pytest.raises(UserError, match="2 processes share 40 training images, 20 each"):
        m.train_dataloader()


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'fashion_mnist'"):
        module(name="fashionmnist")
    with pytest.raises(UserError, match="cannot be imported"):
        module(name="no.such.module:data")


def test_built_in_names() -> None:
    assert {"digits", "fashion_mnist", "cifar10", "cifar100", "flowers102", "folder", "imagenet", "synthetic"} <= set(
        names()
    )


# ---- users' data sets ------------------------------------------------------------------------------------------------


def stripes(config: DataConfig) -> ImageData:
    """What a user writes."""
    pixels = np.zeros((60, 6, 6), np.uint8)
    pixels[::2, ::2] = 255
    train, test = (ArrayImages(pixels[:n], np.arange(n) % 2) for n in (60, 20))
    return ImageData(train, test, ["flat", "striped"], img_size=(6, 6), in_chans=1, mean=(0.1,), std=(0.3,))


def assert_striped(m: TASDataModule) -> None:
    assert (m.num_classes, m.img_size, m.in_chans, m.num_train) == (2, (6, 6), 1, 54)
    images, targets = next(iter(m.train_dataloader()))
    assert images.shape == (32, 1, 6, 6) and set(targets.tolist()) == {0, 1}


def test_what_is_known_without_torch_is_what_there_is() -> None:
    built_in = {name for name, entry in registry._ENTRIES.items() if entry.load.__module__.startswith("lightning_tas.")}
    assert built_in == {*BUILT_IN, *TIMM_PREFIXES}


def test_registered_by_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    register("stripes")(stripes)
    register("known_stripes", Facts(2, (6, 6), 1, (0.1,), (0.3,), 60, 20))(stripes)
    assert "stripes" in names()
    for name in ("stripes", "known_stripes"):
        assert_striped(module(name=name))
    with pytest.raises(UserError, match="registered already"):
        register("digits")(stripes)


def test_registered_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("my_stripes", "stripes_module:stripes", registry.GROUP)
    monkeypatch.setitem(sys.modules, "stripes_module", SimpleNamespace(stripes=stripes))  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    assert "my_stripes" in names()
    assert_striped(module(name="my_stripes"))


def test_named_by_module_and_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the function or the one it is registered under; never what nobody has registered."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setitem(sys.modules, "stripes_module", SimpleNamespace(stripes=stripes))  # type: ignore[arg-type]
    for name in ("stripes_module:stripes", "os:system", f"{__name__}:stripes"):
        with pytest.raises(UserError, match=f"data.name: '{name}' is not registered; decorate it"):
            module(name=name)
    register("my_stripes")(stripes)
    for name in ("stripes_module:stripes", f"{__name__}:my_stripes"):
        assert_striped(module(name=name))
    with pytest.raises(UserError, match=r"registered in .*: my_stripes\. Did you mean 'my_stripes'"):
        module(name=f"{__name__}:my_stripe")
    with pytest.raises(UserError, match=r"data.name: .no_such_module:f. cannot be imported: No module"):
        module(name="no_such_module:f")


def test_plain_torch_data_set_without_a_list_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [(np.full((6, 6), i, np.uint8), i % 3) for i in range(30)]
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    register("plain")(lambda config: ImageData(items, items[:9], ["a", "b", "c"], (6, 6), 1, (0.5,), (0.2,)))  # type: ignore[arg-type]
    m = module(name="plain", batch_size=4, search_val=6, auto_augment="rand-m9-mstd0.5-inc1")
    assert m.num_train == 24
    assert sorted(torch.cat([y for _, y in m.val_dataloader()]).tolist()) == [0, 0, 1, 1, 2, 2]
    assert next(iter(m.train_dataloader()))[0].shape == (4, 1, 6, 6)


# ---- loader ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_state_counts_what_was_handed_out(num_workers: int) -> None:
    """By hand, without Lightning: workers prefetch, the state does not run ahead."""
    whole, first, second = (
        module(num_workers=n, train_subset=200).train_dataloader() for n in (0, num_workers, num_workers)
    )
    for loader in (whole, first):
        loader.set_epoch(2)
    batches = list(whole)
    running = iter(first)
    for _ in range(2):
        next(running)
    state = first.state_dict()
    assert (state["epoch"], state["batches"]) == (2, 2) and all(type(v) is int for v in state.values())
    second.load_state_dict(state)
    assert len(second) == len(batches) == 6
    rest = list(second)
    assert len(rest) == 4
    for (x, y), (u, v) in zip(rest, batches[2:], strict=True):
        assert torch.equal(x, u) and torch.equal(y, v)
    second.set_epoch(3)
    assert sum(1 for _ in second) == 6


def test_resuming_in_the_middle_with_other_settings_warns() -> None:
    loader, other = module().train_dataloader(), module(batch_size=16).train_dataloader()
    next(iter(loader))
    with pytest.warns(UserWarning, match="batch_size 32 -> 16"):
        other.load_state_dict(loader.state_dict())


def test_checkpoint_of_other_classes_is_refused() -> None:
    state = module().state_dict()
    module(seed=5).load_state_dict(state)
    with pytest.raises(UserError, match=r"10 classes of data.name=digits.*data.name=synthetic"):
        module(name="synthetic").load_state_dict(state)


def test_loader_is_left_alone_by_lightning() -> None:
    from torch.utils.data import DataLoader

    loader = module().train_dataloader()
    assert isinstance(loader, CountedLoader) and not isinstance(loader, DataLoader)
    assert loader.batch_sampler.batch_size == 32  # DeepSpeed reads it


def test_config_is_a_structured_config() -> None:
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), {"img_size": [8, 8], "search_val": 200, "root": "x"})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, DataConfig) and config.search_val == 200 and config.root == "x"
    assert {f.name for f in dataclasses.fields(config)} >= {"name", "batch_size", "search_val", "crop"}


@pytest.mark.slow
def test_core_packages_are_not_needed(tmp_path: Path) -> None:
    """Importing the data package needs neither wandb, deepspeed nor hydra."""
    code = (
        "import sys\n"
        "for name in ('wandb', 'deepspeed', 'hydra'): sys.modules[name] = None\n"
        "from lightning_tas.data import DataConfig, TASDataModule\n"
        "next(iter(TASDataModule(DataConfig()).train_dataloader()))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()


def test_a_resume_names_classes_in_another_order() -> None:
    """Their number and first names may well be equal, and going on by number would train on permuted labels."""
    m = module()
    before = {**m.state_dict(), "class_names": [*m.class_names[:8], "9", "8"]}
    with pytest.raises(UserError, match=r"same classes in another order: class 8 was '9' and is '8' now") as caught:
        m.load_state_dict(before)
    assert "ignore" not in str(caught.value)
    m.load_state_dict(m.state_dict())
