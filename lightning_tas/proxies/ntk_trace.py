"""NTK trace (NASI, Shu et al. 2022): sqrt(tr(J J^T) / B), row b of J being dy_b/dw of image b's own class."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_tas.proxies.passes import Pass, Watcher
from lightning_tas.proxies.probe import Measured, Probe, per_block
from lightning_tas.proxies.registry import Needs, register
from lightning_tas.proxies.roles import Layer
from lightning_tas.proxies.sample_norms import dead_layer, weight_norms


class _Norms(Watcher):
    def __init__(self) -> None:
        self.trace: dict[Layer, Tensor] = {}

    def flow(self, layer: Layer, x: Tensor, grad_y: Tensor) -> None:
        self.trace[layer] = weight_norms(layer.module, x, grad_y).sum()


@register(
    "ntk_trace",
    needs=Needs(data=True, labels=True, backward=True, per_sample=True),
    paper="Shu et al. 2022, https://arxiv.org/abs/2109.00817",
    equation="sqrt(tr(J J^T) / B)",
    cost="1 forward and backward with norms of gradients per image",
)
def ntk_trace(probe: Probe) -> Callable[[], Measured]:
    """Trace of the neural tangent kernel of the true classes' logits.

    The trace is a sum over blocks, its root is not: parts are the value, shared out as the trace is.
    """
    norms = _Norms()
    probe.shared("true logits", lambda: _true_logits(probe)).watch(norms)

    def measure() -> Measured:
        trace = per_block(probe, norms.trace)
        assert isinstance(trace.value, Tensor) and isinstance(trace.parts, Tensor)
        value = (trace.value / len(probe.images)).sqrt()
        return Measured(value, value * trace.parts / trace.value, reason=dead_layer(norms.trace, probe.weighted))

    return measure


def _true_logits(probe: Probe) -> Pass:
    return Pass(probe, lambda y: y.gather(1, probe.labels[:, None]).sum(), probe.images)
