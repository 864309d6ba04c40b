"""Length distortion (Chen et al. 2022, "Auto-scaling Vision Transformers without Training", As-ViT).

How much longer a network makes a curve. The curve is the unit circle in a random plane of the images' space,

    x(theta) = U [cos theta, sin theta]^T,   U (C H W x 2) orthonormal,   theta = 0 .. 2 pi in 500 points

and the score the length of its image z(x(theta)), z the features that the head gets (the circle's own length is the
same for every network):

    LE = sum_theta || dz(x(theta)) / d theta ||_2

averaged over `repeat` planes. One forward-mode derivative along x'(theta) for all points at once gives every summand;
the released code runs a backward pass for each coordinate of z instead. As there, images are one patch in size
(positions are resampled) and norms are the identity, for they would hide how lengths grow (`norms`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_tas.errors import UserError
from lightning_tas.proxies.features import features
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import Needs, least, one_of, register
from lightning_tas.proxies.roles import NORM, find_layers
from lightning_tas.supernets import network
from lightning_tas.supernets.checkpoints import adapt_weights

NORMS = ("identity", "keep")


@register(
    "length_distortion",
    deterministic=False,
    needs=Needs(),
    paper="Chen et al. 2022, https://arxiv.org/abs/2202.11921",
    equation="sum over theta of ||dz(x(theta))/d theta||_2, x a circle in image space",
    cost="2 forwards of 500 images of one patch per repeat",
    layers="features before the classifier",
)
def length_distortion(
    probe: Probe,
    points: Annotated[int, least(1)] = 500,
    repeat: Annotated[int, least(1)] = 3,
    norms: Annotated[str, one_of(NORMS)] = "identity",
) -> Callable[[], Measured]:
    """Length of the image of a circle of images; `norms`: replaced by the identity, or "keep"."""

    def measure() -> Measured:
        net, side = one_patch_twin(probe.net)
        if norms == "identity":
            remove_norms(net)
        shape = (probe.images.shape[1], *side)
        curves = [circle(probe.generator("length_distortion", turn), points, shape) for turn in range(repeat)]
        x, dx = (torch.cat(part).to(probe.device) for part in zip(*curves, strict=True))
        length = curve_length(net, x.float(), dx.float())
        if not length.isfinite():  # large weights without norms exceed float32
            length = curve_length(net.double(), x, dx)
        return Measured(length / repeat, reason=None if length else "the features do not depend on the image")

    return measure


def circle(generator: torch.Generator, points: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Images x(theta) and their derivatives by theta, (points, C, H, W) each, float64."""
    drawn = torch.randn(math.prod(shape), 2, generator=generator, dtype=torch.float64, device="cpu")
    plane = torch.linalg.qr(drawn)[0]  # (CHW, 2)
    theta = torch.linspace(0, 2 * math.pi, points, dtype=torch.float64, device="cpu")
    x = torch.stack([theta.cos(), theta.sin()], 1) @ plane.t()
    dx = torch.stack([-theta.sin(), theta.cos()], 1) @ plane.t()
    return x.view(points, *shape), dx.view(points, *shape)


def curve_length(net: nn.Module, x: Tensor, dx: Tensor) -> Tensor:
    """Sum over the images `x` of the norm of the features' derivative along `dx`, float64."""
    weights = {name: value.detach() for name, value in net.named_parameters()}
    # Fused attention kernels have no forward-mode derivative; torch warns of itself when it first takes one.
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        speed = jvp(lambda images: features(net, weights, images, pooled=True), (x,), (dx,))[1]
    return speed.double().norm(dim=1).sum()


def one_patch_twin(net: Any) -> tuple[nn.Module, tuple[int, int]]:
    """A copy of `net` for images of one patch, its positions resampled, and their height and width."""
    if hasattr(net, "arch") and hasattr(net, "options"):
        side = int(net.options["patch_size"])
        with torch.device("meta"):
            twin = network(net.arch, **{**net.options, "img_size": side})
        own = twin.state_dict().keys()
        given = {name: value for name, value in net.state_dict().items() if name in own}  # no buffers of the user's
        state = adapt_weights(given, twin, net.grid_size)
        twin.load_state_dict(state, assign=True)
        return twin.eval(), (side, side)
    if not hasattr(net, "set_input_size"):
        raise UserError(f"length_distortion: {type(net).__name__} has no set_input_size to change its image size by")
    twin = copy.deepcopy(net)
    high, wide = twin.patch_embed.patch_size
    twin.set_input_size(img_size=(high, wide))
    return twin, (high, wide)


def remove_norms(net: nn.Module) -> None:
    """Replace every norm of `net` by the identity."""
    for layer in find_layers(net):
        if layer.role == NORM:
            parent, _, name = layer.name.rpartition(".")
            setattr(net.get_submodule(parent), name, nn.Identity())
