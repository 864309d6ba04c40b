"""MeCo (Jiang et al. 2023, "MeCo: Zero-Shot NAS with One Data and Single Forward Pass via Minimum Eigenvalue ...").

    MeCo = sum_layers lambda_min( P(f) )

P the Pearson correlation of the rows of one image's feature map f, the first of the batch. The paper's rows are the
channels of a convolution's map. Its code takes whatever axis comes first, which in a token sequence (N, C) is the
tokens (`rows`), and looks at every module of the network, containers too (`modules="all"`).

Rows as many as observations, or more, are linearly dependent once centred: lambda_min is 0 without computing. A single
row (a PiT pools its class token alone) is correlated with nothing but itself, which says nothing: 0 as well, not 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, one_of, register
from lightning_tas.proxies.roles import Layer

ROWS = ("tokens", "channels", "min")
MODULES = ("layers", "all")


def least_eigenvalue(rows: Tensor) -> Tensor:
    """Least eigenvalue of the correlation of `rows` (R, observations), in float64; 0 for one row or constant ones."""
    if len(rows) == 1 or len(rows) >= rows.shape[1]:
        return rows.new_zeros((), dtype=torch.float64)
    centred = rows.double() - rows.double().mean(1, keepdim=True)
    unit = torch.nan_to_num(centred / centred.norm(dim=1, keepdim=True), nan=0.0)
    return torch.linalg.eigvalsh(unit @ unit.t())[0]


def arrange(output: Tensor, rows: str) -> Tensor:
    """One image's output as (rows, observations): a map (C, H, W), tokens (N, C) or a vector (C,)."""
    if output.ndim == 1:
        return output[:, None]
    found = output.flatten(1)
    across = (rows == "channels" and output.ndim == 2) or (rows == "min" and len(found) > found.shape[1])
    return found.t() if across else found


class _Correlations(Watcher):
    def __init__(self, rows: str) -> None:
        self.rows = rows
        self.terms: dict[Layer, Tensor] = {}

    def forward(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        self.terms[layer] = least_eigenvalue(arrange(y[0], self.rows))


@register(
    "meco",
    needs=Needs(data=True),
    paper="Jiang et al. 2023, https://neurips.cc/virtual/2023/poster/72017",
    equation="sum over layers of the least eigenvalue of the correlation of one image's features",
    cost="1 forward (shared with snip) and an eigenvalue problem per layer",
    layers="outputs of weight matrices",
)
def meco(
    probe: Probe, rows: Annotated[str, one_of(ROWS)] = "tokens", modules: Annotated[str, one_of(MODULES)] = "layers"
) -> Callable[[], Measured]:
    """Least eigenvalues of feature correlations; rows of a sequence: tokens, channels, or the fewer of both (min)."""
    if modules == "all":
        return lambda: _every_module(probe, rows)
    watcher = _Correlations(rows)
    probe.loss.watch(watcher)
    return lambda: per_block(probe, {layer: watcher.terms[layer] for layer in probe.weighted})


@torch.no_grad()
def _every_module(probe: Probe, rows: str) -> Measured:
    found: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            found.append(least_eigenvalue(arrange(output[0], rows)))

    handles = [module.register_forward_hook(look) for module in probe.net.modules()]
    try:
        output = probe.net(probe.images)
    finally:
        for handle in handles:
            handle.remove()
    # What is not a number counts as constant above, and must not pass for a score.
    return Measured(torch.where(output.isfinite().all(), torch.stack(found).sum(), torch.nan))
