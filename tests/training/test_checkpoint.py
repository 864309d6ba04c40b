"""Networks come back out of checkpoints: nothing retyped, in a clean process, and EMA says so."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.errors import UserError
from lightning_tas.search import Candidate
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import network
from lightning_tas.training.checkpoint import load_network, load_supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.retrain import RetrainModule

Make = Callable[..., Any]
IMAGES = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)


def recipe(**given: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-2, "lr_batch": None, "warmup_epochs": 0, **given})


@pytest.fixture
def train(tmp_path: Path, make_trainer: Make, make_loader: Make) -> Callable[..., Path]:
    def fit(module: Any, name: str = "a.ckpt", **given: Any) -> Path:
        trainer = make_trainer(max_epochs=1, callbacks=module.callbacks(), **given)
        trainer.fit(module, make_loader())
        trainer.save_checkpoint(tmp_path / name)
        return tmp_path / name

    return fit


def test_supernet_is_rebuilt_from_its_checkpoint(train: Callable[..., Path], make_module: Make, make_net: Make) -> None:
    net = make_net(pool="token", qkv_bias=False, drop_path_rate=0.2)
    space = net.space
    module = make_module(recipe(), sampler="preferred", net=net, class_names=["a", "b", "c", "d"], seed=7)
    chosen = [Candidate(arch=space.sample(seed=i), score=0.5 + i, params=1000 + i, macs=9, bin=2.0) for i in range(2)]
    module.set_candidates(chosen)
    loaded = load_supernet(train(module))
    assert loaded.net is not net and loaded.net.options == net.options and loaded.net.space == space
    assert not loaded.net.training and loaded.candidates == chosen
    assert loaded.report == dict(module.reported()) and list(loaded.report.values()) == [c.arch for c in chosen]
    assert (loaded.class_names, loaded.seed, loaded.global_step, loaded.epoch) == (["a", "b", "c", "d"], 7, 4, 1)
    assert (loaded.weights, loaded.ema) == ("live", False)
    net.eval()
    for arch in (space.smallest(), space.largest()):
        assert torch.equal(loaded.net(IMAGES, arch), net(IMAGES, arch))


@pytest.mark.slow
def test_a_clean_process_loads_it(train: Callable[..., Path], make_module: Make) -> None:
    module = make_module(recipe(ema=True))
    path = train(module)
    code = (
        "import sys, torch; from lightning_tas.training.checkpoint import load_supernet\n"
        f"loaded = load_supernet({str(path)!r})\n"
        "images = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)\n"
        "print(loaded.weights, float(loaded.net(images, loaded.net.space.largest()).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    weights, total = done.stdout.split()
    assert weights == "ema"
    assert float(total) == pytest.approx(float(load_supernet(path).net(IMAGES, module.space.largest()).sum()))


def test_averaged_and_live_weights_are_told_apart(
    tmp_path: Path, make_module: Make, make_trainer: Make, make_loader: Make
) -> None:
    from pytorch_lightning.callbacks import ModelCheckpoint

    module = make_module(recipe(ema=True, ema_decay=0.5), seed=1)
    live: list[dict[str, torch.Tensor]] = []

    class Average(ModelCheckpoint):
        """Our own average beside Lightning's: e <- 0.5 e + 0.5 w, begun with the first updated weights."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            live.append({name: value.clone() for name, value in pl_module.net.state_dict().items()})

    saver = Average(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    make_trainer(max_epochs=1, callbacks=[*module.callbacks(), saver], enable_checkpointing=True).fit(
        module, make_loader()
    )
    averaged, last = load_supernet(tmp_path / "step=3.ckpt"), load_supernet(tmp_path / "step=3.ckpt", weights="live")
    assert (averaged.weights, last.weights) == ("ema", "live") and averaged.ema and not last.ema
    expected = dict(live[0])
    for weights in live[1:3]:
        expected = {name: 0.5 * expected[name] + 0.5 * weights[name] for name in expected}
    for name, value in averaged.net.state_dict().items():
        torch.testing.assert_close(value, expected[name])
        assert torch.equal(last.net.state_dict()[name], live[2][name])
    assert not torch.equal(averaged.net.cls_token, last.net.cls_token)


def test_validation_before_the_first_average_sees_the_live_weights(
    make_module: Make, make_trainer: Make, make_loader: Make
) -> None:
    module = make_module(recipe(ema=True))
    seen = []

    class Spy(type(module)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.net.head.weight.clone())
            super().validation_step(batch, batch_idx)

    module.__class__ = Spy
    before = module.net.head.weight.clone()
    trainer = make_trainer(max_epochs=1, callbacks=module.callbacks(), num_sanity_val_steps=1)
    trainer.fit(module, make_loader(), make_loader(8))
    assert torch.equal(seen[0], before) and not torch.equal(seen[-1], before)


def test_mistakes_in_loading(train: Callable[..., Path], make_module: Make, tmp_path: Path) -> None:
    path = train(make_module(recipe()))
    with pytest.raises(UserError, match="no averaged weights"):
        load_supernet(path, weights="ema")
    with pytest.raises(UserError, match="valid: auto, ema, live"):
        load_supernet(path, weights="emma")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds a 'supernet', but a 'network' is needed"):
        load_network(path)
    with pytest.raises(UserError, match=r"missing\.ckpt"):
        load_supernet(tmp_path / "missing.ckpt")
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="broken"):
        load_supernet(broken)
    torch.save({"state_dict": {"a": torch.zeros(1)}}, broken)
    with pytest.raises(UserError, match="not written by lightning_tas"):
        load_supernet(broken)


def test_starting_from_other_classes_renews_the_head_with_one_warning(
    train: Callable[..., Path], make_module: Make, make_net: Make
) -> None:
    first = make_module(recipe())
    path = train(first)
    net = make_net(seed=5, num_classes=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_module(recipe(from_checkpoint=str(path)), net=net)
    assert [str(w.message) for w in caught if "head starts afresh" in str(w.message)] == [
        str(w.message) for w in caught
    ]
    assert len(caught) == 1
    for name, value in first.net.state_dict().items():
        if name.startswith("head."):
            assert net.state_dict()[name].shape[0] == 9
        else:
            assert torch.equal(net.state_dict()[name], value)


def test_starting_from_another_size_resamples(train: Callable[..., Path], make_module: Make, make_net: Make) -> None:
    first = make_module(recipe(), net=make_net(img_size=(8, 8)))
    path = train(first)
    net = make_net(seed=5, img_size=(16, 8))
    make_module(recipe(from_checkpoint=str(path)), net=net)
    assert net.pos_embed.shape[1] == 9 and torch.equal(net.pos_embed[:, 0], first.net.pos_embed[:, 0])
    assert torch.equal(net.head.weight, first.net.head.weight)
    assert torch.equal(net.blocks[0].attn.rel_pos_k.horizontal, first.net.blocks[0].attn.rel_pos_k.horizontal)


def test_retraining_inherits_the_slice_of_a_supernet(
    train: Callable[..., Path], make_module: Make, space: SearchSpace
) -> None:
    module = make_module(recipe())
    path, arch = train(module), space.sample(seed=4)
    options = dict(num_classes=4, img_size=8, in_chans=1, patch_size=4)
    single = RetrainModule(network(arch, **options), recipe(from_checkpoint=str(path)), 8)
    assert single.net.training and RetrainModule(load_supernet(path).net.subnet(arch), recipe(), 8).net.training
    module.net.eval(), single.eval()
    assert torch.equal(single(IMAGES), module.net(IMAGES, arch))


def test_retraining_from_scratch_reports_and_comes_back(
    train: Callable[..., Path], make_module: Make, make_trainer: Make, make_loader: Make, space: SearchSpace
) -> None:
    arch = space.largest()
    torch.manual_seed(0)
    net = network(arch, num_classes=4, img_size=8, in_chans=1, patch_size=4)
    module = RetrainModule(net, recipe(lr=3e-3, mixup=0.0, cutmix=0.0), 8, seed=2, class_names=list("abcd"))
    trainer = make_trainer(max_epochs=6)
    trainer.fit(module, make_loader(64), make_loader(64, seed=1))
    assert {name for name in trainer.callback_metrics if name.startswith("val")} == {"val/top1", "val/top5", "val/loss"}
    assert trainer.callback_metrics["val/top1"] > 60
    loaded = load_network(train(module))
    assert loaded.arch == arch and loaded.class_names == list("abcd") and loaded.seed == 2
    module.eval()
    assert torch.equal(loaded.net(IMAGES), module(IMAGES))
    again = RetrainModule(network(arch, **net.options), recipe(from_checkpoint=str(train(module, "b.ckpt"))), 8).eval()
    assert torch.equal(again(IMAGES), module.eval()(IMAGES))
    with pytest.raises(UserError, match="another architecture"):
        saved = {"arch": arch.to_dict()}
        RetrainModule(network(space.smallest(), **net.options), recipe(), 8).check_resume(saved)
