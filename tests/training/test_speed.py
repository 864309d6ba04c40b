"""Options that change how fast or with how much memory a step runs, and nothing that it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.supernets import network
from lightning_tas.training.checkpoint import load_network
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.retrain import RetrainModule

Make = Callable[..., Any]
ARCH = Architecture.vit(32, [1, 2, 1], [2, 1, 2])
RANDOM = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.5}


def retrain(**train: Any) -> RetrainModule:
    torch.manual_seed(0)
    net = network(ARCH, num_classes=4, img_size=8, in_chans=1, patch_size=4, **RANDOM)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return RetrainModule(
        net, TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=1, **train), 8, class_names=list("abcd")
    )


def kept(module: Any, *archs: Any) -> tuple[dict[str, Tensor], int]:
    """Gradients of one step, and the bytes of the tensors that its graph kept."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(1)
    images, targets = torch.randn(16, 1, 8, 8), torch.randint(4, (16,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = module.mean_loss(images, targets, archs)
    size = sum(sizes.values())
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, size


@pytest.mark.parametrize("kind", ["supernet", "network"])
def test_recomputed_activations_give_the_same_gradients(make_module: Make, make_net: Make, kind: str) -> None:
    def make(**train: Any) -> tuple[Any, ...]:
        if kind == "network":
            return retrain(**train), None
        module = make_module(TrainConfig(**train), net=make_net(**RANDOM))
        return module, module.space.largest(), module.space.sample(seed=3)

    plain, memory = kept(*make())
    again, less = kept(*make(checkpoint_activations=True))
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():  # dropout and drop path drew the same masks when recomputed
        assert torch.equal(gradient, again[name]), name
    assert less < 0.6 * memory


def test_training_with_recomputed_activations_is_the_same(make_loader: Make, make_trainer: Make) -> None:
    states = []
    for on in (False, True):
        module = retrain(checkpoint_activations=on)
        make_trainer(max_epochs=1).fit(module, make_loader())
        states.append(module.net.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_only_networks_of_their_own_are_compiled(make_module: Make) -> None:
    with pytest.raises(UserError, match=r"^train\.compile: .*supernet"):
        make_module(TrainConfig(compile=True))


@pytest.mark.slow  # tracing takes long
def test_compiling_keeps_the_names_of_weights_and_breaks_no_graph(
    make_loader: Make, make_trainer: Make, tmp_path: Path
) -> None:
    plain, module = retrain(ema=True), retrain(compile=True, ema=True)
    assert module.net._compiled_call_impl is not None and plain.net._compiled_call_impl is None
    assert list(module.state_dict()) == list(plain.state_dict())
    counter = CompileCounter()
    torch._dynamo.reset()
    module.net.compile(backend=counter)  # tracing as always, without a C++ compiler
    trainer = make_trainer(max_epochs=1, callbacks=module.callbacks())
    trainer.fit(module, make_loader(), make_loader())
    assert counter.frame_count == 2  # one graph to train, one to validate: whole networks, at all steps
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert list(state) == list(plain.state_dict())
    loaded = load_network(tmp_path / "a.ckpt").net
    assert loaded._compiled_call_impl is None
    make_trainer(max_epochs=1, callbacks=plain.callbacks()).fit(plain, make_loader(), make_loader())
    for name, value in plain.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, rtol=0, atol=1e-5)
