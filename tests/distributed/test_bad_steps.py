"""A loss or gradient that is not finite on one rank: all ranks leave the same step out, or stop together."""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tas import spaces
from lightning_tas.errors import Stopped
from lightning_tas.supernets import ElasticViT, supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.optim import build_optimiser
from lightning_tas.training.schedule import plan
from lightning_tas.training.supernet_module import SupernetModule

RANKS, STEPS, BATCH, LIMIT = 2, 5, 4, 3
CLIP = 0.3  # below the norms of all steps: always at work


class Case(NamedTuple):
    """What goes wrong, on rank 1 only, during the listed batches."""

    strategy: str
    fault: str  # "loss" or "gradient"
    batches: tuple[int, ...] = (2,)
    accumulate: int = 1
    unused: str = "skip"
    precision: str = "32-true"


class Alternating:
    """Deep and shallow networks by turns."""

    covers_all_parameters = False

    def __init__(self, net: ElasticViT) -> None:
        self.archs = (net.space.largest(), net.space.smallest())

    def __call__(self, step: int) -> list[Any]:
        return [self.archs[step % len(self.archs)]]


class Spoil(torch.autograd.Function):
    """The identity with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * math.inf


class Faulty(SupernetModule):
    """Goes wrong as its case says; remembers the weights at the end, whole."""

    case: Case
    batch = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.batch = batch_idx

    def mean_loss(self, *given: Any) -> Tensor:
        loss = super().mean_loss(*given)
        if self.global_rank == 1 and self.batch in self.case.batches:
            loss = loss * math.nan if self.case.fault == "loss" else Spoil.apply(loss)
        return loss

    def on_train_batch_end(self, *given: Any) -> None:
        logged = self.trainer.callback_metrics
        if (self.batch + 1) % self.case.accumulate == 0:
            self.logged.append((float(logged["train/grad_norm"]), float(logged["train/bad_steps"])))

    def on_train_start(self) -> None:
        self.logged: list[tuple[float, float]] = []

    def on_train_end(self) -> None:
        from lightning_tas.launch.strategies import gathered

        with gathered(self.net):
            self.final = {name: value.float().clone() for name, value in self.net.state_dict().items()}


def settings() -> TrainConfig:
    return TrainConfig(
        lr=1e-3, lr_batch=None, warmup_epochs=0, schedule="step", mixup=0.0, cutmix=0.0, max_bad_steps=LIMIT
    )


def make_net() -> ElasticViT:
    torch.manual_seed(0)
    space = spaces.isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1], mlp_ratio=[1, 2])
    net = supernet(space, num_classes=4, img_size=8, in_chans=1, patch_size=4, drop_path_rate=0.0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return net


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(BATCH, 1, 8, 8, generator=torch.Generator().manual_seed(100 * rank + index))
    return images, torch.arange(BATCH) % 4


def fit(case: Case) -> dict[str, Any]:
    """Train on this rank; its weights, what it logged, and how it was stopped."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_tas.launch.strategies import build_strategy

    net = make_net()
    module = Faulty(net, Alternating(net), settings(), BATCH * RANKS)
    module.case = case
    module.unused = case.unused
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=build_strategy(case.strategy, RANKS, "cpu", True), max_epochs=1,
        accumulate_grad_batches=case.accumulate, gradient_clip_val=CLIP, precision=case.precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    batches = [batch_of(trainer.global_rank, index) for index in range(STEPS * case.accumulate)]
    try:
        images, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        trainer.fit(module, DataLoader(TensorDataset(images, targets), BATCH))
    except Stopped as stopped:
        return {"status": stopped.status, "message": str(stopped), "weights": net.state_dict(), "logged": module.logged}
    return {"weights": module.final, "logged": module.logged, "guard": module.guard.state_dict()}


def fit_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [fit(case) for case in cases]


def by_construction(case: Case, skipped: bool = True) -> tuple[dict[str, Tensor], list[float]]:
    """One process, a plain loop over both ranks' batches that passes over the bad step; the norms of the others."""
    net = make_net()
    sampler = Alternating(net)
    optimiser = build_optimiser(net, settings(), 1e-3)
    curve, norms = plan(settings(), 1e-3, STEPS, STEPS), []
    for step in range(STEPS):
        batches = range(step * case.accumulate, (step + 1) * case.accumulate)
        if skipped and set(batches) & set(case.batches):
            continue
        optimiser.zero_grad()
        losses = [
            F.cross_entropy(net(images, sampler(step)[0]), targets, label_smoothing=0.1)
            for images, targets in (batch_of(rank, index) for rank in range(RANKS) for index in batches)
        ]
        torch.stack(losses).mean().backward()
        for parameter in net.parameters():
            if parameter.grad is None and case.unused == "zero":
                parameter.grad = torch.zeros_like(parameter)
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        for group in optimiser.param_groups:
            group["lr"] = curve.lr(step)
        optimiser.step()
    return net.state_dict(), norms


def check(case: Case, results: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    (wanted, norms), (unskipped, _) = by_construction(case), by_construction(case, skipped=False)
    assert max(float((wanted[name] - unskipped[name]).abs().max()) for name in wanted) > 20 * tolerance
    for result in results:
        assert result["guard"] == {"total": 1, "in_a_row": 0}, case
        for name, value in result["weights"].items():
            assert torch.equal(value, results[0]["weights"][name])
            assert case.precision != "32-true" or float((value - wanted[name]).abs().max()) < tolerance, (case, name)
        per_step = result["logged"]
        assert [count for _, count in per_step] == [0, 1, 1, 1, 1] if case.accumulate > 1 else [0, 0, 1, 1, 1]
        assert min(norms) > CLIP
        assert [norm for norm, _ in per_step if math.isfinite(norm)] == pytest.approx(
            norms, rel=1e-4 if case.precision == "32-true" else 0.05
        )


def check_stopped(result: dict[str, Any]) -> None:
    arch = make_net().space.smallest()
    assert result["status"] == 3
    for part in ("step 3 (epoch 0, batch 3 of rank 1)", "loss", f"train.max_bad_steps={LIMIT}", f"{arch.id} {arch!r}"):
        assert part in result["message"]
    assert all(torch.isfinite(value).all() for value in result["weights"].values())


def run(processes: Any, cases: list[Case]) -> None:
    """All cases, then one that has to be stopped, in the same processes: starting them takes the longest."""
    endless = cases[0]._replace(fault="loss", batches=(1, 2, 3), accumulate=1)
    results = processes.run(fit_all, RANKS, [*cases, endless], timeout=240)
    for index, case in enumerate(cases):
        check(case, [rank[index] for rank in results])
    for rank in results:
        check_stopped(rank[-1])


@pytest.mark.slow
def test_ddp_leaves_the_same_step_out_or_stops_everywhere(processes: Any) -> None:
    run(
        processes,
        [
            Case("ddp", "loss"),
            Case("ddp", "gradient"),
            Case("ddp", "loss", accumulate=2),  # in the first of the two batches of step 1
            Case("ddp", "gradient", unused="zero"),
        ],
    )


@pytest.mark.slow
def test_zero_leaves_the_same_step_out_or_stops_everywhere(processes: Any) -> None:
    run(
        processes,
        [
            Case("deepspeed_stage_2", "loss", unused="zero"),
            Case("deepspeed_stage_2", "gradient", unused="zero"),
            Case("deepspeed_stage_2", "loss", accumulate=2, unused="zero"),
            Case("deepspeed_stage_2", "gradient", unused="zero", precision="bf16-mixed"),
            Case("deepspeed_stage_1", "gradient", unused="zero"),
            Case("deepspeed_stage_3", "loss", unused="zero"),
            Case("deepspeed_stage_3", "gradient", unused="zero"),
        ],
    )


@pytest.mark.slow
def test_fit_ends_with_status_3_on_every_rank(processes: Any, tmp_path: Path) -> None:
    """A learning rate that makes weights infinite at the first step."""
    arguments = [
        "recipe=quickstart", "phases=[supernet]", "sampler.name=uniform", "data.train_subset=256", "data.num_workers=0",
        "train.lr=1e30", "train.warmup_epochs=0", f"train.max_bad_steps={LIMIT}", "trainer.devices=2",
        "trainer.accelerator=cpu", f"output_dir={tmp_path}", "run=diverges",
    ]  # fmt: skip
    place = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = sys.modules["processes"].free_port()
    run, started = tmp_path / "quickstart" / "diverges", []
    for rank in range(RANKS):
        here = {**place, "RANK": rank, "LOCAL_RANK": rank}
        env = {key: str(value) for key, value in here.items()}
        started.append(processes.command("python", "-m", "lightning_tas.fit", *arguments, env=env, fork=True))
        end = time.monotonic() + 90
        while not (run / "config.yaml").exists():  # rank 1 comes late: to a folder that is no longer empty
            assert started[0].status is None and time.monotonic() < end, started[0].report()
            time.sleep(0.02)
    assert processes.wait(started, timeout=180, check=False) == [3, 3]
    messages = [len(re.findall("lightning_tas.fit: (?!warning: )", process.stderr)) for process in started]
    assert messages == [1, 0] and f"train.max_bad_steps={LIMIT}" in started[0].stderr
    assert "Traceback" not in started[0].stderr + started[1].stderr
