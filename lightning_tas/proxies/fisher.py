"""Fisher information of the layers' outputs (Theis et al. 2018, "Faster gaze prediction ... and Fisher pruning").

Removing output channel c of a layer changes the loss by about (b images, a the activation)

    Delta_c = 1/2 mean_b ( sum_t a_btc dL/da_btc )^2

where t runs over everything that shares the channel: the tokens of a sequence, the positions of a map. The score sums
Delta over the channels of all layers. The reference for token sequences sums over the *channels* instead and so has one
Delta for each token (`ref_axis`), and counts each Delta once for each weight behind it (`broadcast`: times the fan-in).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_tas.proxies.passes import Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register
from lightning_tas.proxies.roles import Layer


class _Fisher(Watcher):
    def __init__(self, ref_axis: bool, broadcast: bool) -> None:
        self.ref_axis, self.broadcast = ref_axis, broadcast
        self.terms: dict[Layer, Tensor] = {}

    def backward(self, layer: Layer, x: Tensor, y: Tensor, grad_y: Tensor) -> None:
        effect = y * grad_y  # (B, out), (B, T, out) or (B, C, H, W)
        if effect.ndim > 3 or self.ref_axis:
            effect = effect.flatten(2).sum(2) if effect.ndim > 2 else effect  # over positions; ref_axis: over channels
        elif effect.ndim == 3:
            effect = effect.sum(1)  # over tokens
        term = 0.5 * effect.double().square().mean(0).sum()
        weight = layer.module.weight
        assert isinstance(weight, Tensor)
        self.terms[layer] = term * weight[0].numel() if self.broadcast else term


@register(
    "fisher",
    needs=Needs(data=True, labels=True, backward=True),
    paper="Theis et al. 2018, https://arxiv.org/abs/1801.05787",
    equation="sum over channels of 1/2 mean_b (sum_t a * dL/da)^2",
    cost="1 forward and backward (shared with snip)",
    layers="outputs of weight matrices",
)
def fisher(probe: Probe, ref_axis: bool = False, broadcast: bool = False) -> Callable[[], Measured]:
    """Effect on the loss of removing output channels, to second order; a the output of a layer."""
    watcher = _Fisher(ref_axis, broadcast)
    probe.loss.watch(watcher)

    def measure() -> Measured:
        return per_block(probe, {layer: watcher.terms[layer] for layer in probe.weighted})

    return measure
