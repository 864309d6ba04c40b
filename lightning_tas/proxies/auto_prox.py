"""Auto-Prox (Wei et al. 2023): three proxies that evolution found, each a formula on the statistics of single blocks.

    AutoProxA = |dL/dW_qkv| + 1/(n + eps) sum_i sigmoid(dL/dW_mlp)_i                                         (eq. 2)
    AutoProxP = ||sigmoid(W_qkv)||_F - log(exp ||W_mlp|| / sum_i exp ||W_mlp||)                              (eq. 3)
    released:   mean(||minmax(W_fc1)||_F + sqrt(sigmoid(dL/dA_mlp)))           (the genotype in the released configs)

L is the mean cross-entropy. The paper leaves open what is printed ambiguously; each function says how it is read.
W_mlp are the weights of both MLP layers where all their entries count, A_mlp is the output of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import Needs, one_of, register
from lightning_tas.proxies.roles import Layer

PAPER = "Wei et al. 2023, https://arxiv.org/abs/2312.09059"
REDUCTIONS = ("mean", "sum")
Reduction = Annotated[str, one_of(REDUCTIONS)]
_EPS = 1e-9


def _over_blocks(blocks: list[Tensor], layer_reduce: str, **extras: Tensor) -> Measured:
    """The mean over blocks (paper) or the sum, with the blocks' shares in it as parts."""
    stacked = torch.stack([block.to(torch.float64) for block in blocks])
    parts = stacked / len(blocks) if layer_reduce == "mean" else stacked
    return Measured(parts.sum(), parts, extras)


def _by_block(probe: Probe, role: str) -> list[Layer]:
    """The layers of one role, block by block."""
    layers = probe.of(role)
    assert [layer.block for layer in layers] == list(range(probe.depth)), f"one {role} layer a block"
    return list(layers)


@register(
    "auto_prox_a",
    needs=Needs(data=True, labels=True, backward=True),
    paper=PAPER,
    equation="|dL/dW_qkv| + mean sigmoid(dL/dW_mlp), per block",
    cost="1 forward and backward",
    layers="qkv, fc1, fc2",
)
def auto_prox_a(probe: Probe, reduce: Reduction = "sum", layer_reduce: Reduction = "mean") -> Callable[[], Measured]:
    """The proxy found on AutoFormer: size of the qkv gradient plus a term that stays near 1/2 at initialisation.

    Options:
        reduce: the first term is printed as a matrix; "sum" or "mean" of its absolute entries.
        layer_reduce: "mean" over blocks (paper), or "sum", which is nearer to the published correlations.
    """
    probe.loss.want_gradients()

    def measure() -> Measured:
        g = probe.loss.gradients
        blocks = []
        for qkv, fc1, fc2 in zip(*(_by_block(probe, role) for role in ("qkv", "fc1", "fc2")), strict=True):
            size = g[qkv.weight].abs().double()
            mlp = torch.cat([g[fc1.weight].flatten(), g[fc2.weight].flatten()])
            squashed = torch.sigmoid(mlp).sum(dtype=torch.float64) / (mlp.numel() + _EPS)
            blocks.append((size.sum() if reduce == "sum" else size.mean()) + squashed)
        return _over_blocks(blocks, layer_reduce)

    return measure


@register(
    "auto_prox_p",
    paper=PAPER,
    equation="||sigmoid(W_qkv)||_F - mean log softmax(row norms of W_mlp), per block",
    cost="the weights alone",
    layers="qkv, fc1, fc2",
    function=True,
    light=True,
)
def auto_prox_p(probe: Probe, layer_reduce: Reduction = "mean") -> Measured:
    """The proxy found on PiT, hardly more than a count of parameters: ||sigmoid(W)||_F is about sqrt(numel) / 2.

    ||W_mlp|| is read as the Euclidean norms of the rows (output channels), since the softmax of a single number is 1;
    of both layers, and the vector that results is averaged: logsumexp(n) - mean(n).

    Options:
        layer_reduce: "mean" over blocks (paper) or "sum".
    """
    weights = dict(probe.net.named_parameters())
    blocks = []
    for qkv, fc1, fc2 in zip(*(_by_block(probe, role) for role in ("qkv", "fc1", "fc2")), strict=True):
        mlp = (weights[fc.weight].detach().double() for fc in (fc1, fc2))
        rows = torch.cat([torch.linalg.vector_norm(weight, dim=1) for weight in mlp])
        size = torch.linalg.vector_norm(torch.sigmoid(weights[qkv.weight].detach().double()))
        blocks.append(size - torch.log_softmax(rows, 0).mean())
    return _over_blocks(blocks, layer_reduce)


class _Activations(Watcher):
    """mean sqrt(sigmoid(dL/dA)) of every fc1, A its output."""

    roles = frozenset({"fc1"})

    def __init__(self) -> None:
        self.means: dict[Layer, Tensor] = {}

    def backward(self, layer: Layer, x: Tensor, y: Tensor, grad_y: Tensor) -> None:
        self.means[layer] = torch.sigmoid(grad_y).sqrt().mean(dtype=torch.float64)


@register(
    "auto_prox_released",
    needs=Needs(data=True, labels=True, backward=True),
    paper=PAPER,
    equation="||minmax(W_fc1)||_F + mean sqrt(sigmoid(dL/dA_mlp)), per block",
    cost="1 forward and backward",
    layers="fc1 and its output",
)
def auto_prox_released(probe: Probe, layer_reduce: Reduction = "mean") -> Callable[[], Measured]:
    """The winner in the released configurations, which is neither of the paper's two and serves both spaces there.

    Its inputs are called t2 and t4g. With four tensors and their gradients as the eight statistics, in the order W_qkv,
    W_fc1, W_fc2, A_mlp, these are W_fc1 and dL/dA_mlp; the release does not say, for it lacks the package.

    Options:
        layer_reduce: "mean" over blocks (paper) or "sum".
    """
    activations = _Activations()
    probe.loss.watch(activations)

    def measure() -> Measured:
        blocks = []
        for layer in _by_block(probe, "fc1"):
            weight = probe.loss.weights[layer.weight].double()
            low, high = weight.aminmax()
            blocks.append(torch.linalg.vector_norm((weight - low) / (high - low)) + activations.means[layer])
        return _over_blocks(blocks, layer_reduce)

    return measure
