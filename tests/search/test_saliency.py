"""The gradient pass: equal to autograd done plainly, and without a trace on the caller's network."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies.saliency import gaussian_images, gradient_pass
from lightning_tas.spaces import isotropic

SPACE = isotropic("toy", embed_dim=[24, 40], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2.5])


def network(**options: Any) -> Any:
    net = tas.supernet(SPACE, **{"img_size": 32, "patch_size": 16, "num_classes": 5, "drop_rate": 0.3, **options})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net


def plain_gradients(net: Any, loss: str, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    net.eval()
    logits = net(images, SPACE.largest())
    value = logits.sum() if loss == "logits" else F.cross_entropy(logits, labels)
    names, parameters = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


@pytest.mark.parametrize("loss", ["logits", "ce"])
@pytest.mark.parametrize("micro_batch", [2, 64])
def test_equals_one_plain_backward(loss: str, micro_batch: int) -> None:
    net = network().double()
    images, labels = torch.randn(5, 3, 32, 32).double(), torch.arange(5)
    reports: list[tuple[int, int]] = []
    found = gradient_pass(
        net, SPACE.largest(), images, labels, loss, micro_batch, progress=lambda *r: reports.append(r)
    )
    expected = plain_gradients(net, loss, images, labels)
    assert set(found) == set(expected)
    for name, (weight, grad) in found.items():
        torch.testing.assert_close(weight, net.get_parameter(name).detach(), rtol=0, atol=0)
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12)
        assert grad.abs().sum() > 0
    assert reports == ([(2, 5), (4, 5), (5, 5)] if micro_batch == 2 else [(5, 5)])


def test_no_trace() -> None:
    net = network()
    net.train()
    net.blocks[0].eval()
    for i, parameter in enumerate(net.parameters()):
        parameter.requires_grad_(i % 3 != 0)
        parameter.grad = torch.full_like(parameter, float(i)) if i % 2 else None
    calls: list[str] = []
    net.blocks[1].register_forward_hook(lambda *_: calls.append("forward"))
    net.head.register_full_backward_hook(lambda *_: calls.append("backward"))
    net.norm.bias.requires_grad_().register_post_accumulate_grad_hook(lambda *_: calls.append("accumulate"))

    def state() -> list[Any]:
        modes = [m.training for m in net.modules()]
        hooks = [len(m._forward_hooks) + len(m._backward_hooks) for m in net.modules()]
        tensors = [(p.clone(), p.requires_grad, p.grad, p._version) for p in net.parameters()]
        return [modes, hooks, tensors, list(net.buffers())]

    before = state()
    grads = [p.grad.clone() if p.grad is not None else None for p in net.parameters()]
    rng = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    gradient_pass(net, SPACE.largest(), gaussian_images(0, 3, 3, (32, 32)), micro_batch=2)
    after = state()

    assert calls == []
    assert before[0] == after[0] and before[1] == after[1] and before[3] == after[3]
    for (w, needs, g, version), (w2, needs2, g2, version2), kept in zip(before[2], after[2], grads, strict=True):
        assert torch.equal(w, w2) and needs == needs2 and g is g2 and version == version2
        assert g is None or (kept is not None and torch.equal(g, kept))
    assert torch.equal(rng[0], torch.get_rng_state())
    assert rng[1] == np.random.get_state()[1].tolist() and rng[2] == random.getstate()  # type: ignore[index]


def test_context_mode_and_random_state_do_not_matter() -> None:
    net = network(drop_path_rate=0.5)
    images = gaussian_images(3, 4, 3, (32, 32))
    expected = gradient_pass(net.eval(), SPACE.largest(), images)

    def same() -> None:
        torch.rand(1)
        found = gradient_pass(net, SPACE.largest(), images)
        assert all(torch.equal(found[name][1], grad) for name, (_, grad) in expected.items())

    net.train()
    same()
    with torch.no_grad():
        same()
    with torch.inference_mode():
        images = images.clone()  # an inference tensor, which autograd refuses to keep
        same()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same()


def test_blocks_beyond_the_architecture_have_no_gradient() -> None:
    found = gradient_pass(network(), SPACE.smallest(), gaussian_images(0, 2, 3, (32, 32)))
    assert not any(name.startswith("blocks.1.") for name in found) and "blocks.0.attn.qkv.weight" in found
    weight, grad = found["blocks.0.mlp.fc1.weight"]
    assert weight.shape == (100, 40) and grad[:24, :24].abs().min() > 0
    assert not grad[24:].any() and not grad[:, 24:].any()


def test_images_are_those_of_the_reference() -> None:
    images = gaussian_images(0, 4000, 3, (4, 5))
    assert images.shape == (4000, 3, 4, 5) and images.dtype == torch.float32
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.tensor([0.485, 0.456, 0.406]), atol=0.005, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.tensor([0.229, 0.224, 0.225]), atol=0.005, rtol=0)
    assert torch.equal(images, gaussian_images(0, 4000, 3, (4, 5)))
    assert not torch.equal(images, gaussian_images(1, 4000, 3, (4, 5)))
    assert gaussian_images(0, 2, 1, (8, 8)).shape == (2, 1, 8, 8)


def test_mistakes() -> None:
    net = network()
    images = torch.zeros(2, 3, 32, 32)
    arch = SPACE.largest()
    with pytest.raises(UserError, match="needs a label"):
        gradient_pass(net, arch, images, loss="ce")
    with pytest.raises(UserError, match="2 images"):
        gradient_pass(net, arch, images, torch.zeros(3, dtype=torch.long), loss="ce")
    with pytest.raises(UserError, match=r"not \(B, 3, 32, 32\)"):
        gradient_pass(net, arch, torch.zeros(2, 1, 32, 32))
    with pytest.raises(UserError, match="Did you mean 'logits'"):
        gradient_pass(net, arch, images, loss="logit")
    with pytest.raises(UserError, match="micro_batch"):
        gradient_pass(net, arch, images, micro_batch=0)
    with torch.no_grad():
        net.blocks[1].mlp.fc1.weight[3, 4] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        gradient_pass(net, arch, images)
