"""Scores of a whole space from one gradient: every network inherits the slices of the widest one's.

PreNAS (https://arxiv.org/abs/2304.14636, section 3.2) takes the gradients of one backward pass of the supernet's
largest network for those of all sub-networks. A proxy that is a sum over layers of a function of weights and gradients
then is a sum of table entries: |g * w| of all slices by 2-D prefix sums, the norms of dss for each of the few different
slices of a layer. Scores of codes are exact under that shared gradient; how well it ranks networks, compared with each
network's own gradients, says `agreement`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.costs import cost
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.block_sums import BlockSums
from lightning_tas.proxies.cuts import Cuts, Total, widest
from lightning_tas.proxies.dss import Choice
from lightning_tas.proxies.nuclear import nuclear_norms
from lightning_tas.proxies.options import COSTS, Options
from lightning_tas.proxies.passes import Pass
from lightning_tas.proxies.probe import Probe, quiet
from lightning_tas.proxies.registry import Proxy
from lightning_tas.proxies.roles import Layer, block_names
from lightning_tas.proxies.score import INVALID
from lightning_tas.proxies.scorer import labelled, make_probe
from lightning_tas.proxies.snip_norm import LOSSES, NORMS
from lightning_tas.proxies.synflow import ones_pass
from lightning_tas.proxies.table import Column, Scores

Codes = npt.NDArray[np.integer[Any]]
Tables = Mapping[str, Total]
"""Of one proxy: what is summed under "value" and under the names of its extras."""


@dataclass(frozen=True)
class Lookup:
    """How one proxy becomes tables: the pass it needs, and what it makes of its weights and gradients."""

    source: Pass
    tables: Callable[[], Tables]
    blocks: dict[str, BlockSums] = field(default_factory=dict)  # of some of the extras, once there are tables


# --- which proxies have tables ----------------------------------------------------------------------------------------


def _elementwise(
    cuts: Cuts, source: Pass, layers: Sequence[Layer], values: Callable[[Tensor, Tensor], Tensor], root: bool = False
) -> Lookup:
    """The sum of ``values(gradient, weight)`` over slices; with `root` the square root of every layer's sum."""
    source.want_gradients(layer.weight for layer in layers)

    def tables() -> Tables:
        found = {}
        for layer in layers:
            sums = cuts.sums(layer, values(source.gradients[layer.weight], source.weights[layer.weight]))
            found[layer] = np.sqrt(sums) if root else sums
        return {"value": cuts.total(found)}

    return Lookup(source, tables)


def _product(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.double() * weight


def _snip(cuts: Cuts, probe: Probe) -> Lookup:
    return _elementwise(cuts, probe.loss, probe.weighted, lambda g, w: _product(g, w).abs_())


def _plain(cuts: Cuts, probe: Probe) -> Lookup:
    return _elementwise(cuts, probe.loss, probe.weighted, _product)


def _grad_norm(cuts: Cuts, probe: Probe) -> Lookup:
    return _elementwise(cuts, probe.loss, probe.weighted, lambda g, _: g.double().square_(), root=True)


def _synflow(cuts: Cuts, probe: Probe) -> Lookup:
    ones = ones_pass(probe, dtype=torch.float64)
    return _elementwise(cuts, ones, probe.weighted, lambda g, w: _product(g, w).abs_())


def _dss(cuts: Cuts, probe: Probe, **options: Any) -> Lookup:
    choice = Choice(**options)
    if choice.layers != "paper" and probe.of("pool_fc"):
        raise UserError("layers of dss: 'autoprox' tells pooling layers by each network's shapes; use mode='exact'")
    ones = choice.objective(probe)
    diverse, salient = choice.diverse(probe), choice.salient(probe)
    ones.want_gradients(layer.weight for layer in (*diverse, *salient))
    blocks: dict[str, BlockSums] = {}

    def tables() -> Tables:
        def product(layer: Layer) -> npt.NDArray[np.float64]:
            def norms(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
                both = [m for slices in (gradients, weights) for s in slices for m in choice.matrices(layer, s)]
                g, w = nuclear_norms(both).unflatten(0, (2, len(gradients), -1))
                return (g * w).sum(1)

            return cuts.each(layer, [ones.gradients[layer.weight], ones.weights[layer.weight]], norms)

        def saliency(layer: Layer, factor: float) -> npt.NDArray[np.float64]:
            values = _product(ones.gradients[layer.weight], ones.weights[layer.weight])
            signed = choice.signed and not choice.released
            return factor * cuts.sums(layer, values if signed else values.abs_())

        found = {
            "diversity": {layer: product(layer) for layer in diverse},
            "saliency": {layer: saliency(layer, factor) for layer, factor in salient.items()},
        }
        blocks.update({key: BlockSums(cuts, own) for key, own in found.items()})
        totals = {key: cuts.total(own) for key, own in found.items()}
        return {"value": totals["diversity"] + totals["saliency"], **totals}

    return Lookup(ones, tables, blocks)


def _snip_norm(cuts: Cuts, probe: Probe, norm: str, loss: str, space: str | None) -> Lookup:
    """PreNAS, eq. 13, as it is meant there: numerators, too, are of the widest network's gradients."""
    if space is not None:
        raise UserError(f"space of snip_norm: {space!r} has no effect with mode='inherited': it is the supernet's")
    for key, value, valid in (("norm", norm, NORMS), ("loss", loss, LOSSES)):
        if value not in valid:
            raise unknown(f"{key} of snip_norm", value, valid)
    source = probe.logits if loss == "logits" else probe.loss
    source.want_gradients()

    def saliency(name: str) -> Tensor:
        return _product(source.gradients[name], source.weights[name]).abs_()

    def tables() -> Tables:
        found: dict[Layer, npt.NDArray[np.float64]] = {}
        # Summed in the units of each block, or of each matrix as released.
        if norm == "l1l1":
            for layer in probe.of("qkv", "fc1", "fc2"):
                g, w = source.gradients[layer.weight], source.weights[layer.weight]
                size = float(g.abs().sum(dtype=torch.float64) * w.abs().sum(dtype=torch.float64))
                found[layer] = cuts.sums(layer, saliency(layer.weight)) / size
            return {"value": cuts.total(found)}
        for number, block in enumerate(block_names(probe.net)):
            inside = [name for name in source.gradients if name.startswith(f"{block}.")]
            whole = float(torch.stack([saliency(name).sum() for name in inside]).sum())
            for layer in (one for one in probe.layers if one.block == number):
                own = [f"{layer.name}.{kind}" for kind in ("weight", "bias")]
                sums = [cuts.sums(layer, saliency(name)) for name in own if name in inside]
                found[layer] = np.sum(sums, axis=0) / whole
                inside = [name for name in inside if name not in own]
            for name in inside:  # never cut: relative position tables
                found[layer] = found[layer] + float(saliency(name).sum()) / whole
        return {"value": cuts.total(found)}

    return Lookup(source, tables)


LOOKUPS: dict[str, Callable[..., Lookup]] = {
    "snip": _snip,
    "plain": _plain,
    "grad_norm": _grad_norm,
    "synflow": _synflow,
    "dss": _dss,
    "snip_norm": _snip_norm,
}


# --- the tables of a supernet -----------------------------------------------------------------------------------------


class InheritedTables:
    """Tables of some proxies for all networks of a supernet's space, under its weights of now.

    ``tables.scores(codes)`` is all that a search needs; `seconds` is what building took, by proxy (passes included).
    """

    def __init__(self, parts: Sequence[Proxy], probe: Probe, net: nn.Module, options: Options) -> None:
        self.space: Any = net.space
        self._net, self._parts = net, parts
        self._tables: dict[str, Tables] = {}
        self._blocks: dict[str, Mapping[str, BlockSums]] = {}
        self._flaws: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        cuts = Cuts(net.space)  # type: ignore[arg-type]
        made = {
            p.name: LOOKUPS[p.name](cuts, probe, **{**p.options, **options.get(p.name, {})})
            for p in parts
            if p.name not in COSTS
        }
        for name, lookup in made.items():
            began = time.perf_counter()
            if lookup.source.flaw is not None:
                self._flaws[name] = lookup.source.flaw
            self._tables[name] = lookup.tables()
            self._blocks[name] = lookup.blocks
            self.seconds[name] = time.perf_counter() - began

    def scores(self, archs: Codes | Iterable[Architecture], wanted: Sequence[Proxy], by_block: bool = False) -> Scores:
        """Scores of architectures of the space, or of their codes (N, K), by the proxies `wanted`.

        by_block: also the sums by block where a proxy has some; that is slow for a million networks.
        """
        codes: Codes = archs if isinstance(archs, np.ndarray) else self.space.encode(archs)
        if isinstance(archs, np.ndarray):
            self._check(codes)
        params, macs = cost(codes, self._net)
        costs = {"params": params, "macs": macs}
        columns = {}
        for part in self._parts:
            if part.name in costs:
                columns[part.name] = _column(costs[part.name].astype(np.float64), 0.0)
            else:
                columns[part.name] = self._look_up(part, codes)
                own = {key: sums(codes) for key, sums in self._blocks[part.name].items()} if by_block else {}
                if own:
                    rows = (dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True))
                    columns[part.name].blocks.update(enumerate(rows))
                    # The value of dss is the sum of both, in its blocks as in the network.
                    both = zip(*own.values(), strict=True)
                    parts = (tuple(map(sum, zip(*row, strict=True))) for row in both)
                    columns[part.name].parts.update(enumerate(parts))
        return Scores(wanted, columns, params, macs, lambda: self.space.decode(codes))  # type: ignore[no-any-return]

    def total(self, name: str) -> Total:
        """The score by the proxy `name` as a sum of tables over codes, of which more is better.

        `UserError` where the pass behind it went wrong, so that all of its scores are invalid.
        """
        if name not in self._tables:
            raise unknown("proxy", name, self._tables)
        if name in self._flaws:
            raise UserError(f"{name}: no network has a valid score: {self._flaws[name]}")
        part = next(part for part in self._parts if part.name == name)
        value = self._tables[name]["value"]
        return value if part.higher_is_better else value.scaled(-1.0)

    def _check(self, codes: Codes) -> None:
        count = len(self.space.columns)
        if codes.ndim != 2 or codes.shape[1] != count or not np.issubdtype(codes.dtype, np.integer):
            raise UserError(f"archs: codes of shape {codes.shape} are not integers (N, {count}) of {self.space.name!r}")
        wrong = np.flatnonzero(~self.space.valid(codes))
        if len(wrong):
            raise UserError(f"archs: row {wrong[0]} is no code of {self.space.name!r}: {codes[wrong[0]].tolist()}")

    def _look_up(self, part: Proxy, codes: Codes) -> Column:
        began = time.perf_counter()
        tables = self._tables[part.name]
        sign = 1.0 if part.higher_is_better else -1.0
        found = {key: total(codes) for key, total in tables.items()}
        value = sign * found.pop("value")
        column = _column(value, (time.perf_counter() - began) / max(len(codes), 1), self._flaws.get(part.name))
        column.extras.update(found)
        return column


def _column(value: npt.NDArray[np.float64], seconds: float, flaw: str | None = None) -> Column:
    valid = np.isfinite(value) & (flaw is None)
    reasons = {int(i): flaw or f"the value is {value[i]}" for i in np.flatnonzero(~valid)}
    return Column(np.where(valid, value, INVALID), valid, np.full(len(value), seconds), reasons)


def build_tables(
    parts: Sequence[Proxy],
    net: nn.Module | None,
    options: Options,
    seed: int = 0,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    batch_size: int = 16,
    init: str | None = None,
    device: torch.device | str | None = None,
) -> InheritedTables:
    """One pass per objective through the widest network of the supernet `net`, and the tables of `parts`.

    Arguments as of `score_many`. `UserError` without a supernet, and for proxies that have no tables.
    """
    if net is None or not hasattr(net, "subnet"):
        raise UserError("mode: 'inherited' needs a supernet, whose weights are inherited; valid here: 'exact'")
    valid = [*COSTS, *LOOKUPS]
    for part in parts:
        if part.name not in valid:
            raise UserError(
                f"proxies: {part.name!r} has no tables of inherited weights; valid with mode='inherited': "
                f"{', '.join(valid)} and what is combined from them; others with mode='exact'"
            )
    with quiet():
        arch = widest(net.space)  # type: ignore[arg-type]
        matter = labelled(parts, options)
        probe = make_probe(net, arch, seed, images, labels, batch_size, init, device, labels_matter=matter)
        tables = InheritedTables(parts, probe, net, options)
        probe.release()
        return tables


def agreement(exact: Scores, inherited: Scores, name: str) -> float:
    """Kendall's tau-b between two scorings of the same networks, over those valid in both; NaN where undefined."""
    if [arch.id for arch in exact.archs] != [arch.id for arch in inherited.archs]:
        raise UserError("agreement: the two scorings are of different networks")
    both = exact.valid(name) & inherited.valid(name)
    return float(kendalltau(exact.value(name)[both], inherited.value(name)[both]).statistic)
