"""ZeRO 1, 2 and 3 train what DDP trains: AdamW at its full rate, weight decay, depths that alternate, 2 processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.errors import UserError
from lightning_tas.launch.strategies import check_strategy, replace_folder, unused_semantics
from lightning_tas.training.config import TrainConfig

sys.path.insert(0, str(Path(__file__).parent))  # here and in the processes that import this file
import small

ZERO = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
# Four batches an epoch: with three to a step, the second step of an epoch has one. Eight steps, like the plain fit.
ACCUMULATED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "max_epochs": 4, "check_val_every_n_epoch": 4}


def equal_ddp(sampler: str, trainer: dict[str, Any]) -> None:
    """On every rank: fit by each strategy and compare; all draw dropout and drop path alike."""
    options: dict[str, Any] = {
        "sampler": sampler, "trainer": trainer, "net": {"drop_path_rate": 0.2, "drop_rate": 0.1}, "unused": "zero",
    }  # fmt: skip
    ddp = small.fit("ddp", **options)
    start = small.make_net().state_dict()
    assert all((value - start[name]).abs().max() > 1e-4 for name, value in ddp.weights.items())
    assert len(ddp.rates) == 8 and len(set(ddp.rates)) == trainer.get("max_epochs", 2)
    if sampler != "sandwich":
        assert set(ddp.depths) == {1, 2}
    for strategy in ZERO:
        zero = small.fit(strategy, **options)
        assert zero.distance(ddp) < 1e-5, (strategy, zero.distance(ddp))
        assert zero.rates == ddp.rates and zero.depths == ddp.depths
        assert zero.metrics.keys() == ddp.metrics.keys() and {"val/smallest/top1", "val/largest/loss"} <= set(
            zero.metrics
        )
        for name, value in ddp.metrics.items():
            assert zero.metrics[name] == pytest.approx(value, abs=1e-4), (strategy, name)
        assert not zero.warned, (strategy, zero.warned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "trainer"),
    [("uniform", {}), ("sandwich", ACCUMULATED), ("preferred", ACCUMULATED), ("balanced", ACCUMULATED)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_equals_ddp(processes: Any, sampler: str, trainer: dict[str, Any]) -> None:
    processes.run(equal_ddp, 2, sampler, trainer, timeout=240)


def fit_all(cases: dict[str, dict[str, Any]]) -> dict[str, small.Fit]:
    return {name: small.fit(**options) for name, options in cases.items()}


@pytest.mark.slow
def test_both_meanings_of_unused_parameters_do_not_depend_on_the_number_of_processes(processes: Any) -> None:
    """And differ from one another, so that these tests can tell them apart."""
    # The ranks draw drop path differently. And a key's bias has no gradient but rounding, which AdamW would blow up.
    same: dict[str, Any] = {"net": {"drop_path_rate": 0.0}, "eps": 1e-5}
    given = {
        f"{name} {unused}": {"strategy": strategy, "unused": unused, "trainer": options, **same}
        for unused in ("skip", "zero")
        for name, strategy, options in (("plain", "auto", {}), ("accumulated", "auto", ACCUMULATED))
    }
    one = processes.run(fit_all, 1, given, group=False)[0]
    both = processes.run(fit_all, 2, {name: {**case, "strategy": "ddp"} for name, case in given.items()})
    for name, alone in one.items():
        for rank in both:
            assert rank[name].distance(alone) < 1e-5, name
    for name in ("plain", "accumulated"):
        assert one[f"{name} skip"].distance(one[f"{name} zero"]) > 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_resumes_exactly_from_a_folder(processes: Any, tmp_path: Path, ranks: int) -> None:
    strategies = ZERO if ranks > 1 else ZERO[-1:]
    processes.run(resume, ranks, str(tmp_path), strategies, group=ranks > 1)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt*")) == [f"{strategy}.ckpt" for strategy in strategies]
    assert not list(tmp_path.glob(".*")), "hidden leftovers"


def resume(folder: str, strategies: Sequence[str]) -> None:
    options: dict[str, Any] = {"trainer": {"gradient_clip_val": 0.05}, "schedule": "step", "sampler": "balanced"}
    for strategy in strategies:
        path = f"{folder}/{strategy}.ckpt"
        whole = small.fit(strategy, save=path, **options)
        rest = small.fit(strategy, ckpt_path=path, **options)
        assert len(whole.rates) == 8 and rest.rates == whole.rates[4:] and rest.depths == whole.depths[4:]
        assert rest.distance(whole) == 0.0, strategy
        assert rest.metrics == whole.metrics


@pytest.mark.slow
def test_lightning_or_torchrun_may_start_the_processes(processes: Any, tmp_path: Path) -> None:
    script = Path(__file__).parent / "small.py"
    own = processes.command("python", script, "deepspeed_stage_2", 1, 2, tmp_path / "own")
    nodes = processes.torchrun(script, "deepspeed_stage_2", 2, 1, tmp_path / "nodes")
    processes.wait([own, *nodes], timeout=180)
    sys.modules["__main__"].Fit = small.Fit  # type: ignore[attr-defined]  # by that name the scripts pickle it
    results = [
        torch.load(tmp_path / f"{name}-{rank}", weights_only=False) for name in ("own", "nodes") for rank in (0, 1)
    ]
    for result in results[1:]:
        assert result.distance(results[0]) == 0.0
    for output in (own.stdout, nodes[0].stdout, nodes[1].stdout):
        assert not output.strip()


def test_touch_gives_zeros_to_what_networks_leave_out_and_to_nothing_else() -> None:
    net = small.make_net(drop_path_rate=0.5)
    shallow, deep = small.candidates()[:2]
    value = net.touch([shallow])
    value.backward()
    assert value.item() == 0.0
    for name, parameter in net.named_parameters():
        left_out = name.startswith("blocks.1.")
        assert (parameter.grad is not None) == left_out, name
        assert not left_out or not parameter.grad.any(), name  # type: ignore[union-attr]
    assert not net.touch([shallow, deep]).requires_grad


def test_a_folder_replaces_an_older_one_whole(tmp_path: Path) -> None:
    for name, content in (("old", "1"), ("new", "2")):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").write_text(content)
    (tmp_path / "old" / "extra").touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "old",
        "old/inner",
        "old/inner/file",
    ]
    assert (tmp_path / "old" / "inner" / "file").read_text() == "2"


@pytest.mark.parametrize(
    ("strategy", "train", "given", "message"),
    [
        ("deepspeed_stage_1", {"unused": "skip"}, {}, "train.unused: 'skip'"),
        ("deepspeed_stage_3", {"ema": True}, {}, "train.ema"),
        ("deepspeed_stage_3", {"memory_lean": True}, {}, "train.memory_lean"),
        ("deepspeed_stage_3", {"compile": True}, {}, "train.compile"),
        ("ddp", {"memory_lean": True}, {"precision": "16-mixed"}, "train.memory_lean"),
        ("auto", {}, {"precision": "16-mixed"}, "trainer.precision: 16-mixed needs a GPU"),
        ("ddp", {}, {"precision": "16"}, "trainer.precision: 16 needs a GPU"),
        ("auto", {}, {"precision": "16-true", "accelerator": "cuda"}, "second moments vanish"),
        ("deepspeed_stage_2", {}, {"precision": "16-mixed"}, "trainer.precision: 16-mixed needs a GPU"),
        ("deepspeed_stage_2", {}, {"precision": "64-true"}, "64-true"),
        ("deepspeed_stage_2", {}, {"clip_algorithm": "value"}, "clip_algorithm"),
        ("deepspeed_stage_4", {}, {}, "deepspeed_stage_3"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    strategy: str, train: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_strategy(strategy, TrainConfig(**train), **{"accelerator": "cpu", "precision": "32-true", **given})


def test_the_meaning_of_unused_parameters_follows_the_strategy() -> None:
    assert [unused_semantics(TrainConfig(), name) for name in ("auto", "ddp", *ZERO)] == ["skip", "skip", *["zero"] * 3]
    assert unused_semantics(TrainConfig(unused="zero"), "ddp") == "zero"
    for name in ("auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2"):
        check_strategy(name, TrainConfig(ema=True, memory_lean=True), "cpu", "bf16-mixed")
    check_strategy("deepspeed_stage_3", TrainConfig(checkpoint_activations=True), "cpu", "32-true")
