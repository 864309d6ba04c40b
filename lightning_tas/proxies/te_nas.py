"""TE-NAS (Chen et al. 2021): trainability, kappa = lambda_max / lambda_min of the NTK; expressivity, linear regions.

The NTK is that of TF-TAS's code: B x B, row b being the gradient of the sum of image b's logits. TF-TAS scores by
-kappa alone, which is the proxy `te_ntk` here; TE-NAS ranks both in the comparison set, rank(-kappa) + rank(regions).
Regions are counted where a ViT has something like ReLU's: the signs of the MLPs' GELU inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from scipy.stats import rankdata
from torch import Tensor

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import FloatArray, Needs, register
from lightning_tas.proxies.roles import Layer

PAPER = "Chen et al. 2021, https://arxiv.org/abs/2102.11535"
# Products of float64 take their operands in pieces, so that memory does not grow with the largest layer.
CHUNK = 1 << 18


class _Gram(Watcher):
    """sum over layers of <g_a, g_b> for all pairs of images, in float64."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def samples(self, layer: Layer, grads: Tensor) -> None:
        for piece in grads.flatten(1).split(CHUNK, dim=1):
            rows = piece.double()  # (B, entries)
            product = rows @ rows.t()
            self.total = product if self.total is None else self.total + product


@register(
    "te_ntk",
    needs=Needs(data=True, backward=True, per_sample=True),
    higher_is_better=False,
    paper=PAPER,
    equation="kappa = lambda_max / lambda_min of the NTK",
    cost="1 forward and backward with gradients per image",
)
def te_ntk(probe: Probe) -> Callable[[], Measured]:
    """Condition number of the tangent kernel; its smallest eigenvalue counts as at least 1e-12 of the largest."""
    gram = _Gram()
    probe.logits.watch(gram)

    def measure() -> Measured:
        assert gram.total is not None
        return Measured(condition_number(gram.total))

    return measure


def condition_number(kernel: Tensor) -> Tensor:
    """lambda_max / lambda_min of a symmetric (B, B) float64 matrix; NaN where it is not finite."""
    finite = kernel.isfinite().all()
    # An eigensolver raises on NaN; the score has to say instead that there is none.
    found = torch.linalg.eigvalsh(
        torch.where(finite, kernel, torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device))
    )
    largest = found[-1]
    return torch.where(finite & (largest > 0), largest / found[0].clamp(min=1e-12 * largest), torch.nan)


class _Patterns(Watcher):
    """Which pairs of images differ in the sign of any GELU input."""

    roles = frozenset({"fc1"})

    def __init__(self) -> None:
        self.differ: Tensor | None = None

    def forward(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        for piece in (y > 0).flatten(1).split(CHUNK, dim=1):
            signs = piece.to(torch.float32) * 2 - 1  # (B, entries)
            # +-1 sums to the number of entries only for equal rows; below 2^24 float32 counts exactly.
            differ = signs @ signs.t() < signs.shape[1]
            self.differ = differ if self.differ is None else self.differ | differ


@register(
    "te_regions",
    needs=Needs(data=True),
    paper=PAPER,
    equation="number of distinct sign patterns in the batch",
    cost="1 forward",
    layers="inputs of the MLPs' GELU (fc1)",
)
def te_regions(probe: Probe) -> Callable[[], Measured]:
    """Linear regions: distinct sign patterns of GELU inputs. On ViTs every image has its own: no more than B."""
    patterns = _Patterns()
    probe.logits.watch(patterns)

    def measure() -> Measured:
        assert patterns.differ is not None
        # An image opens a region unless it equals an earlier one.
        repeats = torch.tril(~patterns.differ, diagonal=-1).any(1)
        return Measured((~repeats).sum())

    return measure


@register(
    "te_nas",
    needs=Needs(data=True, backward=True, per_sample=True),
    paper=PAPER,
    equation="rank(-kappa) + rank(regions)",
    cost="1 forward and backward with gradients per image",
    combines=("te_ntk", "te_regions"),
)
def te_nas(table: Mapping[str, FloatArray]) -> FloatArray:
    """Sum of the ranks, in the comparison set, of trainability and expressivity; equal values share the mean rank.

    A single network, which has no rank, has its trainability -kappa as value.
    """
    if len(table["te_ntk.value"]) == 1:
        return table["te_ntk.value"].copy()
    ranks: FloatArray = rankdata(table["te_ntk.value"]) + rankdata(table["te_regions.value"])
    return ranks
