"""Normalised SNIP (PreNAS, Wang et al. 2023): what share of the supernet's saliency each block keeps.

    sum over blocks l of  sum_{w in block l of the network} |g w|  /  sum_{w in block l of the largest network} |g w|
                                                                                                            (eq. 13)

g are gradients of the sum of the logits. PreNAS takes the largest network's for all; here a network's numerators are
its own, and ``score_many(mode="inherited")`` and `search` have the shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch import Tensor

from lightning_tas.architecture import Architecture, Block, Stage
from lightning_tas.errors import UserError
from lightning_tas.proxies.cuts import widest
from lightning_tas.proxies.options import SpaceName
from lightning_tas.proxies.passes import Pass
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import Needs, one_of, register
from lightning_tas.proxies.roles import block_names
from lightning_tas.spaces import space as resolve_space
from lightning_tas.spaces import space_names

NORMS, LOSSES = ("paper", "l1l1"), ("logits", "ce")
_MATRICES = ("attn.qkv.weight", "mlp.fc1.weight", "mlp.fc2.weight")
Sums = Mapping[tuple[str, str], Tensor]
"""By (block, "" or a matrix in it): a float64 scalar."""


@register(
    "snip_norm",
    needs=Needs(data=True, backward=True),
    paper="Wang et al. 2023, https://arxiv.org/abs/2304.14636",
    equation="sum over blocks of |g w| of the network / |g w| of the largest network",
    cost="1 forward and backward, and once per source of weights 1 of the largest network",
    layers="all parameters of blocks",
    changes=lambda options: {"labels": options["loss"] == "ce"},
)
def snip_norm(
    probe: Probe,
    norm: Annotated[str, one_of(NORMS)] = "paper",
    loss: Annotated[str, one_of(LOSSES)] = "logits",
    space: SpaceName = None,
) -> Callable[[], Measured]:
    """SNIP of every block, norms and biases included, in units of the same block of the space's largest network.

    That is the supernet's largest, or for a stand-alone network that of the smallest registered space that holds it,
    drawn from the same seed. In no known space it is the network whose blocks all have the greatest of this one's own
    choices; such values say little beside those of other networks, so name the space. So do for networks of several
    spaces, each of which would be measured against its own largest.

    Options:
        norm: "paper", or "l1l1" as released: qkv, fc1 and fc2 each divided by its sum |w| * sum |g|, others left out.
        loss: "logits" as released, free of labels (and of data, with Gaussian images); "ce" as in the paper's text.
        space: name of the space whose largest network is meant.
    """
    source = _objective(probe, loss)
    source.want_gradients()
    return lambda: _measure(probe, source, norm, loss, space)


def _objective(probe: Probe, loss: str) -> Pass:
    return probe.logits if loss == "logits" else probe.loss


def _measure(probe: Probe, source: Pass, norm: str, loss: str, space: str | None) -> Measured:
    arch = getattr(probe.net, "arch", None)
    if not isinstance(arch, Architecture) or probe.sibling is None:
        return Measured(0.0, reason="the largest network is not known: the network has no architecture")
    largest = _largest(probe, arch, space)
    key = ("snip_norm", norm, loss, largest.id)
    if key not in probe.memo:
        other = Probe(probe.sibling(largest), probe.images, probe.labels, probe.seed)
        reference = _objective(other, loss)
        reference.want_gradients()
        if reference.flaw is not None:
            return Measured(0.0, reason=f"largest network: {reference.flaw}")
        probe.memo[key] = _denominators(other, reference, norm)
    totals: Sums = probe.memo[key]
    own = _saliencies(probe, source, norm)
    if not own.keys() <= totals.keys():
        raise UserError(f"space of snip_norm: no network of {space!r} has the {probe.depth} blocks of this one")
    terms = {name: value / totals[name] for name, value in own.items()}
    parts = [torch.stack([t for (b, _), t in terms.items() if b == name]).sum() for name in block_names(probe.net)]
    stacked = torch.stack(parts)
    return Measured(stacked.sum(), stacked)


def _saliencies(probe: Probe, source: Pass, norm: str) -> Sums:
    """sum |g w| of every block, or of each of its matrices."""

    def saliency(name: str) -> Tensor:
        return (source.gradients[name] * source.weights[name]).abs().sum(dtype=torch.float64)

    blocks = block_names(probe.net)
    if norm == "l1l1":
        return {(block, matrix): saliency(f"{block}.{matrix}") for block in blocks for matrix in _MATRICES}
    return {
        (block, ""): torch.stack([saliency(name) for name in source.gradients if name.startswith(f"{block}.")]).sum()
        for block in blocks
    }


def _denominators(probe: Probe, source: Pass, norm: str) -> Sums:
    if norm == "paper":
        return _saliencies(probe, source, norm)

    def size(values: Tensor) -> Tensor:
        return values.abs().sum(dtype=torch.float64)

    return {
        (block, matrix): size(source.weights[f"{block}.{matrix}"]) * size(source.gradients[f"{block}.{matrix}"])
        for block in block_names(probe.net)
        for matrix in _MATRICES
    }


def _largest(probe: Probe, arch: Architecture, name: str | None) -> Architecture:
    """Of the space called `name`, of the supernet's, or of the smallest registered one that has `arch`."""
    given = probe.space if name is None else resolve_space(name)
    if given is None:
        known = [resolve_space(each) for each in space_names()]
        holding = [each for each in known if each.family == arch.family and arch in each]
        given = min(holding, key=lambda each: each.size()) if holding else None
    if given is None:
        return _spanned(arch)
    if given.family != arch.family:
        raise UserError(f"space of snip_norm: {given.name!r} is of family {given.family!r}, not {arch.family!r}")
    return widest(given)


def _spanned(arch: Architecture) -> Architecture:
    """`arch` with each block value of a stage at the stage's greatest."""
    stages = []
    for stage in arch.stages:
        most = {key: max(block[key] for block in stage.blocks) for key, _ in stage.blocks[0].items()}
        stages.append(Stage([Block(**most)] * stage.depth, **dict(stage.items())))
    return Architecture(arch.family, stages, **arch.extras)
