"""Training a small real supernet: gradients, schedules, counters, metrics."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_tas import spaces
from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.evaluator import evaluate
from lightning_tas.samplers import SamplerConfig, preferred, sandwich
from lightning_tas.search import Candidate
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.optim import build_optimiser, no_decay_patterns
from lightning_tas.training.supernet_module import SupernetModule, candidate_labels

Make = Callable[..., Any]
PLAIN: dict[str, Any] = {"mixup": 0.0, "cutmix": 0.0, "lr_batch": None}


class Recorder(pl.Callback):
    """What happened in each batch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def candidate(arch: Architecture, params: int = 1000) -> Candidate:
    return Candidate(arch=arch, score=1.0, params=params, macs=1, bin=1.0)


@pytest.mark.slow
def test_loss_falls_and_every_network_learns(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    module = make_module(TrainConfig(lr=3e-3, warmup_epochs=1, **PLAIN), sampler="sandwich")
    recorder = Recorder()
    trainer = make_trainer(max_epochs=8, callbacks=[recorder])
    trainer.fit(module, make_loader(64), make_loader(64, seed=1))
    losses = [step["train/loss"] for step in recorder.metrics]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.3
    for label in ("smallest", "middle", "largest"):
        assert trainer.callback_metrics[f"val/{label}/top1"] > 60


def test_gradient_of_a_sandwich_is_the_mean_of_separate_gradients(make_module: Make, space: SearchSpace) -> None:
    module = make_module()
    module.net.eval()  # no drop path: the passes are comparable
    images, targets = torch.randn(6, 1, 8, 8), torch.randint(4, (6,))
    archs = [space.largest(), space.smallest(), space.sample(seed=1), space.sample(seed=2)]
    module.mean_loss(images, targets, archs).backward()
    together = {name: p.grad.clone() for name, p in module.named_parameters()}
    separate = {name: torch.zeros_like(grad) for name, grad in together.items()}
    for arch in archs:
        module.zero_grad()
        module.mean_loss(images, targets, [arch]).backward()
        for name, p in module.named_parameters():
            if p.grad is not None:
                separate[name] += p.grad / len(archs)
    for name, grad in together.items():
        torch.testing.assert_close(grad, separate[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lean", [False, True])
def test_summed_gradients_are_those_of_the_mean_times_the_networks(
    make_module: Make, make_loader: Make, make_trainer: Make, lean: bool
) -> None:
    """`sampler.reduce`: what is logged is the mean loss either way."""
    told = {}
    for reduce in ("mean", "sum"):
        module = make_module(
            TrainConfig(memory_lean=lean), sampler_config=SamplerConfig("sandwich", middle=1, reduce=reduce)
        )
        trainer = make_trainer(max_epochs=1, limit_train_batches=1, log_every_n_steps=1)
        trainer.fit(module, make_loader())
        told[reduce] = trainer.callback_metrics
    assert told["sum"]["train/loss"] == told["mean"]["train/loss"]
    assert float(told["sum"]["train/grad_norm"]) == pytest.approx(3 * float(told["mean"]["train/grad_norm"]), rel=1e-5)
    with pytest.raises(UserError, match=r"sampler\.reduce: 'avg'"):
        make_module(sampler_config=SamplerConfig(reduce="avg"))


def test_what_is_reported_and_not_trained_is_told(
    make_module: Make, make_loader: Make, make_trainer: Make, space: SearchSpace
) -> None:
    chosen = [candidate(space.smallest()), candidate(space.largest(), 2000)]
    for sampler, told in (
        (SamplerConfig("uniform", source="space"), "2 of 2 networks that are reported .*whole space"),
        (sandwich(space), "2 of 2 networks that are reported .*whole space"),
        (preferred([space.smallest()]), "1 of 2 networks that are reported .2.00k. .*a list of networks .1."),
    ):
        given = isinstance(sampler, SamplerConfig)
        module = make_module(sampler_config=sampler) if given else make_module(sampler=sampler)
        module.set_candidates(chosen)
        with pytest.warns(UserWarning, match=told):
            make_trainer(max_epochs=1, limit_train_batches=1).fit(module, make_loader())


def test_loss_is_smoothed_cross_entropy_or_soft_target_cross_entropy(make_module: Make, space: SearchSpace) -> None:
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    module = make_module(TrainConfig(label_smoothing=0.2))
    logits, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 1])
    torch.testing.assert_close(module.criterion(logits, targets), LabelSmoothingCrossEntropy(0.2)(logits, targets))
    soft = torch.rand(5, 4).softmax(-1)
    torch.testing.assert_close(module.criterion(logits, soft), SoftTargetCrossEntropy()(logits, soft))
    assert module.criterion(logits.bfloat16(), targets).dtype == torch.float32


def test_blocks_without_a_turn_keep_their_weights(
    make_module: Make, make_loader: Make, make_trainer: Make, space: SearchSpace
) -> None:
    shallow = Architecture.vit(32, [2], [2])
    module = make_module(TrainConfig(lr=1e-2, warmup_epochs=0, **PLAIN), sampler="preferred")
    module.set_candidates([candidate(shallow)])
    before = copy.deepcopy(module.net.state_dict())
    make_trainer().fit(module, make_loader())
    for name, value in module.net.state_dict().items():
        unused = name.startswith(("blocks.1.", "blocks.2."))
        assert torch.equal(value, before[name]) == unused, name


def test_weight_decay_groups(make_net: Make) -> None:
    net = make_net()
    names = {id(p): name for name, p in net.named_parameters()}

    def decayed(train: TrainConfig) -> tuple[set[str], set[str]]:
        groups = build_optimiser(net, train, 1e-3).param_groups
        assert {g["weight_decay"] for g in groups} == {0.0, 0.05}
        assert sum(len(g["params"]) for g in groups) == len(names)
        on = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
        return on, set(names.values()) - on

    on, off = decayed(TrainConfig())
    assert {"cls_token", "pos_embed", "norm.weight", "head.bias", "blocks.0.attn.qkv.bias"} <= off
    assert all(
        name.endswith((".bias", "norm1.weight", "norm2.weight", "norm.weight", "_token", "_embed")) for name in off
    )
    tables = {name for name in names.values() if "rel_pos" in name}
    assert len(tables) == 12 and tables <= on and {"head.weight", "patch_embed.proj.weight"} <= on
    on, off = decayed(TrainConfig(decay_relative_position=False))
    assert tables <= off and "blocks.1.mlp.fc1.weight" in on
    for pattern in no_decay_patterns(net, TrainConfig(decay_relative_position=False)):
        assert any(__import__("fnmatch").fnmatch(name, pattern) for name in names.values()), pattern


def test_idle_patterns_are_warned_about(make_net: Make) -> None:
    with pytest.warns(UserWarning, match="rel_pos"):
        no_decay_patterns(make_net(relative_position=False), TrainConfig(decay_relative_position=False))


def test_rate_is_scaled_by_the_global_batch(make_module: Make) -> None:
    assert make_module(TrainConfig(), global_batch=1024).peak_lr == pytest.approx(1e-3)
    assert make_module(TrainConfig(lr=2e-3, lr_batch=None), global_batch=1024).peak_lr == 2e-3
    with pytest.raises(UserError, match="batch_size"):
        make_module(TrainConfig(), global_batch=0)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", ["epoch", "step"])
def test_rate_follows_the_curve(
    make_module: Make, make_loader: Make, make_trainer: Make, schedule: str, accumulate: int
) -> None:
    """10 epochs of 4 batches, 2 of warm-up; with accumulation an epoch has 2 updates."""
    train = TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=2, schedule=schedule)
    recorder = Recorder()
    trainer = make_trainer(max_epochs=10, callbacks=[recorder], log_every_n_steps=1, accumulate_grad_batches=accumulate)
    trainer.fit(make_module(train), make_loader())

    def curve(epoch: float) -> float:
        if epoch < 2:
            return 1e-6 + epoch / 2 * (1e-3 - 1e-6)
        return 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + np.cos(np.pi * epoch / 10))

    steps = 4 // accumulate
    at = [i // 4 if schedule == "epoch" else (i // accumulate) / steps for i in range(40)]
    assert [step["train/lr"] for step in recorder.metrics] == pytest.approx([curve(epoch) for epoch in at])


def test_the_sampler_sees_the_update_and_not_the_batch(
    make_module: Make, make_loader: Make, make_trainer: Make, space: SearchSpace
) -> None:
    steps: list[int] = []

    def sampler(step: int) -> list[Architecture]:
        steps.append(step)
        return [space.sample(seed=step)]

    make_trainer(accumulate_grad_batches=2).fit(make_module(sampler=sampler), make_loader())
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3]


def test_training_is_a_function_of_the_seed_alone(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    def weights(seed: int, noise: int) -> Tensor:
        module = make_module(seed=seed)
        torch.manual_seed(noise)
        np.random.seed(noise)
        make_trainer().fit(module, make_loader())
        return torch.cat([p.flatten() for p in module.parameters()])

    first = weights(0, 1)
    assert torch.equal(first, weights(0, 2))
    assert not torch.equal(first, weights(1, 1))


def test_counters_decide_what_a_batch_draws(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    """Drop path and mixing differ between batches, epochs and seeds, on the same images in the same order."""
    seen: list[tuple[float, float]] = []

    class Spy(SupernetModule):
        def mean_loss(self, images: Tensor, targets: Tensor, archs: Sequence[Architecture | None]) -> Tensor:
            seen.append((float(images[0].sum()), float(torch.rand(()))))
            return super().mean_loss(images, targets, archs)

    for seed in (0, 1):
        module = make_module(seed=seed)
        spy = Spy(module.net, module.sampler, module.train_config, 8, seed)
        make_trainer(limit_train_batches=2).fit(spy, make_loader())
    assert len(seen) == 8
    for draws in zip(*seen, strict=True):
        assert len(set(draws)) == 8


def test_nothing_in_a_step_waits_for_the_device(make_module: Make, space: SearchSpace) -> None:
    """The meta device holds no data, so whatever needs a value on the host raises there."""
    for mode in ("batch", "elem", "pair"):
        module = make_module(TrainConfig(mixup_mode=mode)).to("meta")
        images, targets = torch.empty(6, 1, 8, 8, device="meta"), torch.empty(6, dtype=torch.long, device="meta")
        assert module.mixing is not None
        mixed, soft = module.mixing(images, targets, 3)
        loss = module.mean_loss(mixed, soft, [space.largest(), space.smallest()])
        assert loss.is_meta
        with pytest.raises(RuntimeError):
            loss.item()


@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
def test_odd_batches_train_with_mixing(make_module: Make, make_loader: Make, make_trainer: Make, mode: str) -> None:
    recorder = Recorder()
    module = make_module(TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=1, mixup_mode=mode))
    make_trainer(callbacks=[recorder]).fit(module, make_loader(n=12, batch_size=5))
    assert len(recorder.metrics) == 6 and all(np.isfinite(step["train/loss"]) for step in recorder.metrics)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_bf16_autocast_trains_and_validates(
    make_module: Make, make_loader: Make, make_trainer: Make, clip: float | None
) -> None:
    module = make_module()
    trainer = make_trainer(precision="bf16-mixed", gradient_clip_val=clip)
    trainer.fit(module, make_loader(), make_loader())
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in module.parameters())
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_metric_names_and_values(make_module: Make, make_loader: Make, make_trainer: Make, space: SearchSpace) -> None:
    module = make_module()
    trainer = make_trainer(log_every_n_steps=1)
    held_out = make_loader(20, seed=1)
    trainer.fit(module, make_loader(), held_out)
    labels = ("smallest", "middle", "largest")
    names = {f"val/{label}/{value}" for label in labels for value in ("top1", "top5", "loss")}
    step = {f"train/{name}" for name in ("loss", "lr", "params", "grad_norm", "bad_steps")}
    assert set(trainer.callback_metrics) == names | step
    archs = list(module.reported().values())
    assert archs[0] == space.smallest() and archs[2] == space.largest() and archs[1] in space
    for label, accuracy in zip(labels, evaluate(module.net, archs, held_out), strict=True):
        assert float(trainer.callback_metrics[f"val/{label}/top1"]) == pytest.approx(accuracy.top1)
        assert float(trainer.callback_metrics[f"val/{label}/loss"]) == pytest.approx(accuracy.loss, rel=1e-5)
    last = module.sampler(module.global_step - 1)
    assert float(trainer.callback_metrics["train/params"]) == cost(last[0], module.net).params
    tested = trainer.test(module, held_out, verbose=False)[0]
    assert set(tested) == {name.replace("val", "test") for name in names}


def test_candidates_are_trained_and_reported_under_their_labels(
    make_module: Make, make_loader: Make, make_trainer: Make, space: SearchSpace
) -> None:
    module = make_module(sampler="balanced")
    chosen = [candidate(space.smallest(), 7_940), candidate(space.largest(), 5_712_345)]
    module.set_candidates(chosen)
    assert set(module.sampler.archs) == {c.arch for c in chosen}
    trainer = make_trainer()
    trainer.fit(module, make_loader(), make_loader())
    names = {f"val/{label}/{value}" for label in ("7.94k", "5.71M") for value in ("top1", "top5", "loss")}
    assert names == {name for name in trainer.callback_metrics if name.startswith("val")}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sampler", ["preferred", "balanced", "sandwich"])
def test_few_candidates_train(
    make_module: Make, make_loader: Make, make_trainer: Make, space: SearchSpace, sampler: str, count: int
) -> None:
    archs = [space.largest(), space.smallest(), Architecture.vit(16, [2, 2], [1, 2])][:count]
    module = make_module(sampler=sampler)
    module.set_candidates([candidate(arch, params) for params, arch in enumerate(archs)])
    make_trainer(max_epochs=1).fit(module, make_loader())
    assert module.global_step == 4


def test_candidates_that_cannot_be_trained(make_module: Make) -> None:
    module = make_module(sampler="preferred")
    with pytest.raises(UserError, match="no candidates"):
        module.set_candidates([])
    with pytest.raises(UserError, match="64"):
        module.set_candidates([candidate(Architecture.vit(64, [2], [2]))])
    with pytest.raises(UserError, match="phases needs 'select'"):
        module.architectures(0)


def test_labels_are_sizes_and_unique() -> None:
    archs = [Architecture.vit(16 * (i + 1), [1], [1]) for i in range(7)]
    sizes = [999, 26_150, 26_249, 26_201, 5_212_345, 54_000_000, 999_600]
    labels = candidate_labels([candidate(arch, size) for arch, size in zip(archs, sizes, strict=True)])
    assert list(labels) == ["999", "26.1k", "26.2k", "26.2k-2", "5.21M", "54.0M", "1.00M"]
    assert list(labels.values()) == archs


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_module_can_be_copied_before_and_after_training(
    make_module: Make, make_loader: Make, make_trainer: Make, duplicate: Callable[[Any], Any], space: SearchSpace
) -> None:
    module = make_module(sampler="sandwich")
    duplicate(module)
    make_trainer(max_epochs=1).fit(module, make_loader(), make_loader())
    module.trainer = None
    twin = duplicate(module)
    images = torch.randn(2, 1, 8, 8)
    module.eval(), twin.eval()
    assert torch.equal(twin(images, space.smallest()), module(images, space.smallest()))
    assert twin.sampler(3) == module.sampler(3)


def test_training_without_end_is_refused(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    with pytest.raises(UserError, match="no end"):
        make_trainer(max_epochs=-1).fit(make_module(), make_loader())


def test_training_without_a_batch_is_refused(make_module: Make, make_trainer: Make) -> None:
    with pytest.raises(UserError, match="no batch"):
        make_trainer().fit(make_module(), torch.utils.data.DataLoader([], batch_size=8))


def test_a_space_of_one_network_has_all_three_labels(make_module: Make) -> None:
    space = spaces.isotropic("one", embed_dim=[16], depth=[1], num_heads=[1], mlp_ratio=[2])
    module = make_module(net=supernet(space, num_classes=4, img_size=8, in_chans=1, patch_size=4), sampler="sandwich")
    assert dict(module.reported()) == dict.fromkeys(("smallest", "middle", "largest"), space.largest())
    assert module.architectures(0) == [space.largest()]


def test_length_in_steps_alone(make_module: Make, make_loader: Make, make_trainer: Make) -> None:
    recorder = Recorder()
    train = TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=0, schedule="step", min_lr=0)
    make_trainer(max_epochs=-1, max_steps=6, callbacks=[recorder]).fit(make_module(train), make_loader())
    rates = [step["train/lr"] for step in recorder.metrics]
    assert rates == pytest.approx([0.5e-3 * (1 + np.cos(np.pi * step / 6)) for step in range(6)])
