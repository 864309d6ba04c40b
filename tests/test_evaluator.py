"""The evaluator against a naive loop, and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.evaluator import Accuracy, Meter, compute_all, evaluate


class Elastic(nn.Module):
    """A stand-in supernet: the first `embed_dim` hidden units of an MLP."""

    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, classes)
        self.drop = nn.Dropout(0.5)

    def forward(self, images: Tensor, arch: Architecture | None = None) -> Tensor:
        width = 16 if arch is None else arch.embed_dim
        hidden = self.drop(torch.relu(self.first(images.flatten(1)))[:, :width])
        return nn.functional.linear(hidden, self.second.weight[:, :width], self.second.bias)


def arch(width: int) -> Architecture:
    return Architecture.vit(width, [1], [1])


def batches(classes: int = 7, sizes: tuple[int, ...] = (8, 8, 3), seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 3, 2, 2, generator=generator), torch.randint(classes, (n,), generator=generator)) for n in sizes
    ]


def naive(net: nn.Module, one: Architecture | None, loader: list[tuple[Tensor, Tensor]]) -> Accuracy:
    """One sample at a time, by sorting."""
    first = five = samples = 0
    losses = []
    net.eval()
    with torch.no_grad():
        for images, targets in loader:
            for image, target in zip(images, targets.tolist(), strict=True):
                if target == -1:
                    continue
                logits = net(image[None], one)[0].tolist()
                order = sorted(range(len(logits)), key=lambda c: -logits[c])
                first += order[0] == target
                five += target in order[:5]
                losses.append(float(np.logaddexp.reduce(logits) - logits[target]))
                samples += 1
    return Accuracy(100 * first / samples, 100 * five / samples, sum(losses) / samples, samples)


def same(got: Accuracy, want: Accuracy) -> None:
    assert (got.samples, got.top1, got.top5) == (want.samples, pytest.approx(want.top1), pytest.approx(want.top5))
    assert got.loss == pytest.approx(want.loss, rel=1e-5)


@pytest.mark.parametrize("classes", [3, 5, 7])
def test_equals_a_naive_loop_for_every_architecture(classes: int) -> None:
    torch.manual_seed(1)
    net, loader = Elastic(classes), batches(classes)
    archs = [arch(4), arch(16), None, arch(9)]
    got = evaluate(net, archs, loader)
    for accuracy, one in zip(got, archs, strict=True):
        same(accuracy, naive(net, one, loader))
    assert got[0] != got[1]
    if classes <= 5:
        assert all(accuracy.top5 == 100 for accuracy in got)


def test_numbers_do_not_depend_on_how_samples_are_batched() -> None:
    torch.manual_seed(2)
    net = Elastic()
    images, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    whole = evaluate(net, [arch(8)], [(images, targets)])[0]
    single = evaluate(net, [arch(8)], list(zip(images.split(1), targets.split(1), strict=True)))[0]
    same(single, whole)


def test_padding_is_not_counted_whatever_it_holds() -> None:
    torch.manual_seed(3)
    net, loader = Elastic(), batches()
    images, targets = loader[-1]
    padded = torch.cat([images, torch.full((5, 3, 2, 2), float("nan"))]), torch.cat([targets, torch.full((5,), -1)])
    same(evaluate(net, [arch(8)], [*loader[:-1], padded])[0], naive(net, arch(8), loader))


def test_logits_that_are_not_finite_are_wrong_and_show_in_the_loss() -> None:
    meter = Meter()
    meter.update(torch.tensor([[float("nan"), 0.0, 1.0], [3.0, 0.0, 0.0]]), torch.tensor([0, 0]))
    accuracy = meter.compute()
    assert (accuracy.top1, accuracy.top5, accuracy.samples) == (50.0, 50.0, 2)
    assert np.isnan(accuracy.loss)


def test_modes_gradients_and_random_states_are_as_before() -> None:
    torch.manual_seed(4)
    np.random.seed(4)
    random.seed(4)
    net = Elastic()
    net.first.eval()  # a frozen part keeps its own mode
    net.first.weight.grad = torch.ones_like(net.first.weight)
    before = torch.random.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy(), random.getstate()

    def noisy() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches():
            torch.rand(3), np.random.rand(), random.random()
            yield batch

    class Loader:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return noisy()

    evaluate(net, [arch(8)], Loader())
    assert (net.training, net.first.training, net.second.training, net.drop.training) == (True, False, True, True)
    assert torch.equal(net.first.weight.grad, torch.ones_like(net.first.weight)) and net.second.weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (
        np.array_equal(np.random.get_state(legacy=False)["state"]["key"], before[1]) and random.getstate() == before[2]
    )


def test_modes_return_after_an_error() -> None:
    net = Elastic()
    with pytest.raises(RuntimeError):
        evaluate(net, [arch(8)], [(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))])
    assert net.training and net.drop.training


def test_runs_under_inference_mode_and_sums_over_its_border() -> None:
    torch.manual_seed(5)
    net, loader, meter = Elastic().eval(), batches(), Meter()
    with torch.inference_mode():
        meter.update(net(loader[0][0]), loader[0][1])
    for images, targets in loader[1:]:
        meter.update(net(images), targets)
    same(meter.compute(), naive(net, None, loader))


def test_max_batches_and_autocast() -> None:
    torch.manual_seed(6)
    net, loader = Elastic(), batches()
    same(evaluate(net, [arch(8)], loader, max_batches=2)[0], naive(net, arch(8), loader[:2]))
    low = evaluate(net, [arch(8)], loader, amp_dtype=torch.bfloat16)[0]
    full = evaluate(net, [arch(8)], loader)[0]
    assert low.loss != full.loss and low.loss == pytest.approx(full.loss, rel=0.02)


def test_each_batch_is_moved_once_and_the_network_returns_home() -> None:
    moves = []

    class Images(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
            moves.append(args)
            return super().to(*args, **kwargs)

    class Traveller(Elastic):
        def to(self, device: Any) -> Traveller:  # type: ignore[override]
            places.append(str(device))
            return self

    places: list[str] = []
    images, targets = batches(sizes=(4,))[0]
    evaluate(Traveller(), [arch(4), arch(8), arch(16)], [(images.as_subclass(Images), targets)])
    assert len(moves) == 1 and places == []
    with pytest.raises(UserError, match="no samples"):
        evaluate(Traveller(), [arch(4)], [], device="meta")
    assert places == ["meta", "cpu"]


def test_nothing_to_evaluate_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no architectures"):
        evaluate(Elastic(), [], batches())
    with pytest.raises(UserError, match="no samples"):
        evaluate(Elastic(), [arch(4)], [])
    meter = Meter()
    meter.update(torch.zeros(2, 3), torch.tensor([0, 1]))
    meter.reset()
    with pytest.raises(UserError, match="no samples"):
        meter.compute()


def test_progress_shows_the_batches_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(Elastic(), [arch(4)], batches(), progress=True, max_batches=2)
    assert capsys.readouterr().err == ""  # a file
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    evaluate(Elastic(), [arch(4)], batches(), progress=True, max_batches=2)
    assert "/2 [" in capsys.readouterr().err


def _rank(rank: int, port: int, queue: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    torch.manual_seed(7)
    net = Elastic()
    shares: list[list[tuple[Tensor, Tensor]]] = [batches()[:2], batches()[2:], []]  # unequal, one rank without any
    queue.put((rank, evaluate(net, [arch(4), arch(16)], shares[rank])))
    dist.destroy_process_group()


@pytest.mark.slow
def test_sums_over_processes(unused_port: int) -> None:
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_rank, args=(rank, unused_port, queue)) for rank in range(3)]
    for worker in workers:
        worker.start()
    results = dict(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(60)
    torch.manual_seed(7)
    net = Elastic()
    for got in results.values():
        for accuracy, one in zip(got, [arch(4), arch(16)], strict=True):
            same(accuracy, naive(net, one, batches()))
    assert results[0] == results[1] == results[2]


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_many_meters_are_computed_together() -> None:
    torch.manual_seed(8)
    meters = [Meter(), Meter()]
    logits, targets = torch.randn(6, 7), torch.randint(7, (6,))
    meters[0].update(logits, targets)
    meters[1].update(-logits, targets)
    assert compute_all(meters) == [meters[0].compute(), meters[1].compute()]
