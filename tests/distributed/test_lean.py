"""`train.memory_lean`: one sub-network at a time gives the gradients of the summed loss, in less memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.training.lean import lean_mean

sys.path.insert(0, str(Path(__file__).parent))  # here and in the processes that import this file
import small

LEAN = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2")


class Held:
    """What a graph keeps in a tensor's place."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Saved:
    """Bytes of the activations that graphs hold: now and at most."""

    def __init__(self, module: nn.Module) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor | Held:
        if tensor.untyped_storage().data_ptr() in self.own:
            return tensor
        size = tensor.numel() * tensor.element_size()
        held = Held(tensor)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(held, self.free, size)
        return held

    def free(self, size: int) -> None:
        self.now -= size

    @staticmethod
    def unpack(held: Tensor | Held) -> Tensor:
        return held.value if isinstance(held, Held) else held


def archs() -> list[Architecture]:
    """Largest, smallest and two between."""
    space = small.space()
    return [space.largest(), space.smallest(), *small.candidates()[:2]]


def step(lean: bool, dtype: torch.dtype, **net: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    module = small.make_module(small.make_net(dtype, **net), memory_lean=lean)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.manual_seed(5)
    loss = module.mean_loss(images, torch.arange(6) % 4, archs())
    (loss * 0.25).backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("net", [{}, {"drop_path_rate": 0.5, "drop_rate": 0.2}], ids=["plain", "dropout"])
def test_gradients_are_those_of_the_summed_loss(net: dict[str, Any]) -> None:
    (lean_loss, lean), (summed_loss, summed) = (step(way, torch.float64, **net) for way in (True, False))
    # The loss itself is computed in float32.
    torch.testing.assert_close(lean_loss, summed_loss, rtol=1e-6, atol=0)
    for name, gradient in summed.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(lean[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


def test_autocast_and_recomputed_activations_change_nothing() -> None:
    gradients = []
    for lean in (True, False):
        net = small.make_net()
        net.set_grad_checkpointing(lean)
        module = small.make_module(net, memory_lean=lean)
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module.mean_loss(torch.ones(6, 1, 8, 8), torch.arange(6) % 4, archs())
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_sums_are_exact_and_blocks_left_out_have_no_gradient() -> None:
    """In float64 throughout: a loss of our own, of which some parameters know nothing."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    losses: list[Callable[[], Tensor]] = [lambda: net[0](x).pow(2).mean(), lambda: net[:3](x).sin().sum()]
    torch.stack([loss() for loss in losses]).mean().backward()
    wanted = [p.grad for p in net.parameters()]
    net.zero_grad()
    lean_mean(losses, net.parameters()).backward()
    for p, gradient in zip(net.parameters(), wanted, strict=True):
        if gradient is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, gradient, rtol=0, atol=1e-12)
    assert net[3].weight.grad is None and net[2].weight.grad is not None


def test_tied_gradients_do_not_mix() -> None:
    """Autograd hands both parameters of a sum the same tensor; adding to it in place would count twice."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    lean_mean([lambda: (a + b).sum(), lambda: (2 * a).sum(), lambda: (a + b).sum()], [a, b]).backward()
    assert a.grad is not None and b.grad is not None
    assert torch.allclose(a.grad, torch.full((3,), 4 / 3)) and torch.allclose(b.grad, torch.full((3,), 2 / 3))


def test_activations_of_one_network_are_held_at_a_time() -> None:
    peaks = {}
    for lean in (False, True):
        module = small.make_module(small.make_net(), memory_lean=lean)
        saved = Saved(module)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            loss = module.mean_loss(torch.randn(16, 1, 8, 8), torch.arange(16) % 4, archs())
        assert (saved.now == 0) == lean
        peaks[lean] = saved.peak
        loss.backward()
    largest = small.make_module(small.make_net())
    alone = Saved(largest)
    with torch.autograd.graph.saved_tensors_hooks(alone.pack, alone.unpack):
        largest.mean_loss(torch.randn(16, 1, 8, 8), torch.arange(16) % 4, archs()[:1])
    assert peaks[True] == alone.peak < 0.6 * peaks[False], (peaks, alone.peak)


def fits(sampler: str) -> dict[str, small.Fit]:
    options: dict[str, Any] = {
        "sampler": sampler, "trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}, "unused": "zero",
        "net": {"drop_path_rate": 0.2},
    }  # fmt: skip
    made = {"summed": small.fit("ddp", **options)}
    for strategy in LEAN:
        made[strategy] = small.fit(strategy, memory_lean=True, **options)
    return made


@pytest.mark.slow
def test_training_equals_the_summed_loss_on_two_processes(processes: Any) -> None:
    for made in processes.run(fits, 2, "sandwich", timeout=180):
        for strategy in LEAN:
            assert made[strategy].distance(made["summed"]) < 1e-5, strategy
            assert not made[strategy].warned


def test_idle_and_impossible_settings_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    module = small.make_module(small.make_net(), sampler="uniform", memory_lean=True)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(zero_stage_3=False), global_step=0)
    with pytest.warns(UserWarning, match="memory_lean is ignored"):
        module.on_fit_start()
    module._trainer.strategy.zero_stage_3 = True
    monkeypatch.delattr(next(one for one in type(module.net).__mro__ if "touch" in vars(one)), "touch")
    with pytest.raises(UserError, match="touch"):
        module.on_fit_start()
