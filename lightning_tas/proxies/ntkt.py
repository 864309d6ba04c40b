"""NTKT (ETAS): trace of the neural tangent kernel of the tokens that leave the last block.

With z (B, T, d) the output of the last block, before the final norm (or after it, `output`), and w all weights of
embeddings and blocks:

    eq. 13 ("eq13"):  NTKT = (1 / T^2) sum_{a,t,j} ||dz_{a,t,j}/dw||^2
    eq. 12 ("mean"):  the trace of the mean NTK itself, sum_{a,j} ||d mean_t z_{a,t,j} / dw||^2

Equation 13 drops the products of different tokens that equation 12 contains, so the two differ; eq. 13 is what is
published as the indicator. Neither Jacobian is formed: for signs v drawn at random E||v^T J||^2 = tr(J J^T) (Hutchinson
1989), so one backward pass of <v_a, z_a>, image by image, estimates the trace of all.

Every parameter is counted exactly for the v drawn: weights by `sample_norms`, biases and norms from what their layers
see, and those that belong to no layer (class token, positions, relative position tables) by giving each image its own
copy, whose gradient is that image's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_tas.errors import UserError
from lightning_tas.proxies.passes import Pass, Watcher
from lightning_tas.proxies.probe import Measured, Probe, parts_by_name, per_block
from lightning_tas.proxies.registry import Needs, least, one_of, register
from lightning_tas.proxies.roles import NORM, Layer
from lightning_tas.proxies.sample_norms import bias_gradients, dead_layer, squared, weight_norms

VARIANTS = ("eq13", "mean")
PARAMS = ("all", "paper")
OUTPUTS = ("block", "norm")
# ETAS's own list of w: the embedding matrix and q, k, v, o and both matrices of the feed-forward network.
PAPER_ROLES = frozenset({"patch_embed", "qkv", "proj", "fc1", "fc2"})
_TOKENS = re.compile(r"^(cls_token|pos_embed)$")
_TABLES = re.compile(r"\.rel_pos_[kv]\.(vertical|horizontal)$")


class _Norms(Watcher):
    """Squared norms of the images' gradients by the parameters of each layer, summed over images."""

    def __init__(self, everything: bool) -> None:
        self.everything = everything
        self.weights: dict[Layer, Tensor] = {}
        self.small: dict[Layer, Tensor] = {}

    def wants(self, layer: Layer) -> bool:
        return layer.role != "head" if self.everything else layer.role in PAPER_ROLES

    def flow(self, layer: Layer, x: Tensor, grad_y: Tensor) -> None:
        module = layer.module
        if layer.role != NORM:
            self.weights[layer] = weight_norms(module, x, grad_y).sum()
        elif isinstance(module, nn.LayerNorm):
            scaled = F.layer_norm(x, module.normalized_shape, eps=module.eps) * grad_y  # (B, T, d)
            self.weights[layer] = squared(scaled.flatten(1, -2).sum(1)).sum()
        else:
            raise UserError(f"ntkt: {layer.name} is a {type(module).__name__}; of norms, only LayerNorm is supported")
        if self.everything and getattr(module, "bias", None) is not None:
            self.small[layer] = squared(bias_gradients(module, grad_y)).sum()


class _Copies:
    """Parameters of no layer, one copy per image: (B, *shape), or (B, *shape[1:]) where the first size is 1."""

    def __init__(self, probe: Probe) -> None:
        of_layers = {f"{layer.name}.{kind}" for layer in probe.layers for kind in ("weight", "bias")}
        self.images = len(probe.images)
        self.norms: dict[str, Tensor] = {}
        for name, _ in probe.net.named_parameters():
            if name not in of_layers and not (_TOKENS.search(name) or _TABLES.search(name)):
                raise UserError(f"ntkt: no rule for parameter {name!r}; params='paper' counts weight matrices only")
        self.names = {name for name, _ in probe.net.named_parameters() if name not in of_layers}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if name not in self.names:
            return value
        own = value if _TOKENS.search(name) else value[None]
        leaf = own.expand(self.images, *own.shape[1:]).clone().requires_grad_()
        leaf.register_hook(lambda gradient: self._see(name, gradient))
        return leaf

    @torch.no_grad()
    def _see(self, name: str, gradient: Tensor) -> None:
        self.norms[name] = squared(gradient).sum()


@register(
    "ntkt",
    needs=Needs(data=True, backward=True, per_sample=True),
    deterministic=False,
    paper="ETAS: Zero-Shot Transformer Architecture Search via Network Trainability and Expressivity, eq. 12 and 13",
    equation="(1 / T^2) sum_{a,t,j} ||dz_{a,t,j}/dw||^2",
    cost="1 forward and backward per probe, with norms of gradients per image",
    layers="all parameters before the classifier",
)
def ntkt(
    probe: Probe,
    variant: Annotated[str, one_of(VARIANTS)] = "eq13",
    params: Annotated[str, one_of(PARAMS)] = "all",
    probes: Annotated[int, least(1)] = 1,
    output: Annotated[str, one_of(OUTPUTS)] = "block",
) -> Callable[[], Measured]:
    """Trace of the NTK of the last block's tokens, estimated by `probes` random vectors, the same for one seed.

    variant: "eq13" or "mean" (equation 12). params: "all", or "paper" for the weight matrices that ETAS lists. output:
    tokens of the last "block", or those after the final "norm", whose parameters then count among all: a block of ETAS
    ends with a norm, one of a ViT does not.
    """
    last = _last(probe, output)
    seen = [_watch(probe, variant, params == "all", last, i) for i in range(probes)]
    expected = tuple(layer for layer in probe.of(*PAPER_ROLES))

    def measure() -> Measured:
        totals = [_total(probe, norms, copies) for norms, copies in seen]
        value = torch.stack([value for value, _ in totals]).mean()
        parts = torch.stack([parts for _, parts in totals]).mean(0)
        return Measured(value, parts, reason=dead_layer(seen[0][0].weights, expected))

    return measure


def _last(probe: Probe, output: str) -> nn.Module:
    """The module whose output counts."""
    if output == "block":
        return probe.blocks[-1]
    norm = getattr(probe.net, "norm", None)
    if not isinstance(norm, nn.Module):
        raise UserError(f"ntkt: output 'norm' needs a final norm (net.norm), which {type(probe.net).__name__} has not")
    return norm


def _watch(probe: Probe, variant: str, everything: bool, last: nn.Module, index: int) -> tuple[_Norms, _Copies | None]:
    """Announce the pass of random vector number `index`."""
    norms, copies = _Norms(everything), _Copies(probe) if everything else None
    one = Pass(probe, _projection(probe, variant, index), probe.images, weights=copies, call=_until(last))
    one.watch(norms)
    return norms, copies


def _projection(probe: Probe, variant: str, index: int) -> Callable[[Tensor], Tensor]:
    def objective(z: Tensor) -> Tensor:
        outputs = z / z.shape[1] if variant == "eq13" else z.mean(1)
        return (outputs * signs(probe, outputs.shape, index)).sum()

    return objective


def signs(probe: Probe, shape: torch.Size, index: int) -> Tensor:
    """Random vector number `index`: +-1 with equal probability. Drawn on the CPU, so a seed means the same anywhere."""
    drawn = torch.randint(0, 2, shape, generator=probe.generator("ntkt", index), dtype=torch.int8, device="cpu")
    return (drawn.to(probe.device, torch.float32) * 2) - 1


def _until(last: nn.Module) -> Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]:
    """Run the network for what leaves the module `last`."""

    def call(net: nn.Module, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        caught: list[Tensor] = []
        handle = last.register_forward_hook(lambda module, inputs, output: caught.append(output))
        try:
            functional_call(net, weights, (images,))
        finally:
            handle.remove()
        return caught[0]

    return call


def _total(probe: Probe, norms: _Norms, copies: _Copies | None) -> tuple[Tensor, Tensor]:
    """Sum over all parameters, and by block."""
    terms = {layer: term + norms.small.get(layer, 0.0) for layer, term in norms.weights.items()}
    found = per_block(probe, terms)
    value, parts = found.value, found.parts
    assert isinstance(value, Tensor) and isinstance(parts, Tensor)
    alone = copies.norms if copies is not None else {}
    for norm in alone.values():
        value = value + norm
    return value, parts + parts_by_name(probe, alone)
