"""Parameters and multiply-accumulates: the baselines that every proxy is compared with."""

from __future__ import annotations

from lightning_tas.costs import cost
from lightning_tas.proxies.probe import Measured, Probe
from lightning_tas.proxies.registry import register


@register(
    "params",
    paper="-",
    equation="number of parameters",
    cost="none",
    layers="all parameters",
    function=True,
    light=True,
)
def params(probe: Probe) -> Measured:
    """Number of parameters: the simplest baseline, and a strong one."""
    return Measured(float(sum(parameter.numel() for parameter in probe.net.parameters())))


@register(
    "macs",
    paper="-",
    equation="multiply-accumulates for one image",
    cost="none",
    layers="products of matrices and convolutions",
    function=True,
    light=True,
)
def macs(probe: Probe) -> Measured:
    """Multiply-accumulates for one image, relative position excluded as in published tables."""
    arch = getattr(probe.net, "arch", None)
    if arch is None:
        return Measured(0.0, reason="the network does not say its architecture (net.arch)")
    return Measured(float(cost(arch, probe.net).macs))
