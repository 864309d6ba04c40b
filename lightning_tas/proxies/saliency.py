"""One backward pass of the largest network: the gradient that PreNAS shares among all architectures of a supernet.

Everything happens on a private copy in eval mode, whose gradients accumulate over micro-batches; the caller's network,
its mode, gradients and hooks, and the global random state are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.probe import private_copy
from lightning_tas.randomness import numpy_generator

LOSSES = ("logits", "ce")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# (weight, gradient) by parameter name
Saliency = dict[str, tuple[Tensor, Tensor]]
Progress = Callable[[int, int], None]


def gaussian_images(seed: int, batch_size: int, in_chans: int, img_size: tuple[int, int]) -> Tensor:
    """Data-free batch (B, C, H, W): pixels N(mean_c, std_c) of ImageNet, as released; other channel counts average."""
    mean = IMAGENET_MEAN if in_chans == 3 else (sum(IMAGENET_MEAN) / 3,) * in_chans
    std = IMAGENET_STD if in_chans == 3 else (sum(IMAGENET_STD) / 3,) * in_chans
    noise = numpy_generator(seed, "select", "images").standard_normal((batch_size, in_chans, *img_size))
    shape = (1, in_chans, 1, 1)
    images = torch.from_numpy(noise) * torch.tensor(std, dtype=torch.float64, device="cpu").view(shape)
    return (images + torch.tensor(mean, dtype=torch.float64, device="cpu").view(shape)).float()


def gradient_pass(
    net: nn.Module,
    arch: Architecture,
    images: Tensor,
    labels: Tensor | None = None,
    loss: str = "logits",
    micro_batch: int = 4,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Saliency:
    """Weights and gradients of every parameter that `arch` uses, after one accumulated backward pass.

    images (B, C, H, W), labels (B,). loss: "logits" is the sum of all logits over the batch (released, data-free);
    "ce" the mean cross-entropy. Gradients are summed over micro-batches of `micro_batch` images, so memory does not
    grow with B. Raises UserError for images that the network cannot take, missing labels, or a gradient that is not
    finite.
    """
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    if not isinstance(micro_batch, int) or micro_batch < 1:
        raise UserError(f"micro_batch: {micro_batch!r} must be a whole number of at least 1")
    _check_batch(net, images, labels, loss)
    number = len(images)
    # The caller may be inside no_grad, inference mode or autocast (which would also act on the backward pass).
    with torch.inference_mode(False), torch.enable_grad():
        twin = private_copy(net, device)
        where = next(twin.parameters())
        with torch.autocast(where.device.type, enabled=False):
            for start in range(0, number, micro_batch):
                part = slice(start, start + micro_batch)
                logits = twin(images[part].to(where.device, where.dtype, copy=True), arch)
                if loss == "logits":
                    objective = logits.sum()
                else:
                    assert labels is not None
                    objective = F.cross_entropy(logits, labels[part].to(where.device), reduction="sum") / number
                objective.backward()
                if progress is not None:
                    progress(min(start + micro_batch, number), number)
    return dict(_finite(twin))


def _check_batch(net: Any, images: Tensor, labels: Tensor | None, loss: str) -> None:
    expected = (int(net.options.get("in_chans", 3)), *net.img_size)
    if images.ndim != 4 or tuple(images.shape[1:]) != expected or len(images) == 0:
        raise UserError(
            f"images: shape {tuple(images.shape)} is not (B, {', '.join(map(str, expected))}) of the network"
        )
    if loss == "ce":
        if labels is None:
            raise UserError("labels: loss 'ce' needs a label for every image; without labels use loss='logits'")
        if labels.shape != (len(images),):
            raise UserError(f"labels: shape {tuple(labels.shape)}, but there are {len(images)} images")


def _finite(twin: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """The parameters that took part (a block beyond the architecture's depth has no gradient), all checked."""
    for name, parameter in twin.named_parameters():
        if parameter.grad is None:
            continue
        if not (torch.isfinite(parameter.grad).all() and torch.isfinite(parameter).all()):
            raise UserError(f"selection: the weights or gradients of {name} are not finite")
        yield name, (parameter.detach(), parameter.grad)
