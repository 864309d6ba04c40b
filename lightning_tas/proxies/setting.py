"""What scores of many networks depend on besides the architectures, read and checked once: proxies, options, batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.config import DEFAULT, INHERITED, check_method
from lightning_tas.proxies.inherited import InheritedTables, build_tables
from lightning_tas.proxies.options import Options, components
from lightning_tas.proxies.probe import Probe, bare
from lightning_tas.proxies.registry import Proxy, chosen
from lightning_tas.proxies.scorer import check_arguments, labelled, make_probe

MODES = ("exact", "inherited")


@dataclass
class Setting:
    """What scores depend on besides the architecture and the proxies; see `prepare`."""

    net: nn.Module | None
    seed: int
    images: Tensor | None
    labels: Tensor | None
    batch_size: int
    init: str | None
    device: torch.device | str | None
    build: Mapping[str, Any] | None
    labels_matter: bool = True
    _drawn: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def probe(self, arch: Architecture) -> Probe:
        """The network of `arch` with the batch, which is drawn once per family."""
        images, labels = self._drawn.get(arch.family, (self.images, self.labels))
        probe = make_probe(
            self.net,
            arch,
            self.seed,
            images,
            labels,
            self.batch_size,
            self.init,
            self.device,
            self.build,
            self.labels_matter,
        )
        self._drawn[arch.family] = (probe.images, probe.labels)
        return probe

    @property
    def on_cpu(self) -> bool:
        """Whether networks are scored on the CPU."""
        place = self.device or (next(self.net.parameters()).device if self.net is not None else "cpu")
        return torch.device(place).type == "cpu"

    def tables(self, parts: Sequence[Proxy], options: Options) -> InheritedTables:
        """The tables of the supernet's inherited weights."""
        if self.build:
            raise UserError(f"build: {dict(self.build)} has no effect beside a network; give either")
        return build_tables(
            parts, self.net, options, self.seed, self.images, self.labels, self.batch_size, self.init, self.device
        )

    def facts(self, mode: str, parts: Sequence[Proxy], options: Options) -> dict[str, Any]:
        """All that scores depend on besides the architectures."""
        return {
            "mode": mode,
            "proxies": [part.name for part in parts],
            "options": {name: dict(given) for name, given in sorted(options.items())},
            "seed": self.seed,
            "images": self.batch_size if self.images is None else fingerprint({"images": self.images}),
            "labels": None if self.labels is None else fingerprint({"labels": self.labels}),
            "init": self.init or (DEFAULT if self.net is None else INHERITED),
            "build": dict(self.build or {}),
            "weights": None if self.net is None else fingerprint(self.net.state_dict()),
        }


def prepare(
    names: str | Sequence[str],
    net: nn.Module | None,
    mode: str,
    seed: int,
    images: Tensor | None,
    labels: Tensor | None,
    batch_size: int,
    init: str | None,
    options: Options | None,
    build: Mapping[str, Any] | None,
    device: torch.device | str | None,
) -> tuple[list[Proxy], list[Proxy], dict[str, dict[str, Any]], Setting]:
    """Read and check the arguments of `score_many`: the proxies wanted, those to run, their options, and the rest.

    `UserError` as there.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    wanted = chosen(names)
    parts, given = components(wanted, {} if options is None else options)
    if init is not None:
        check_method(init, inherited=net is not None)
    check_arguments(parts, given, seed, images, labels, batch_size, device)
    matter = labelled(parts, given)
    return wanted, parts, given, Setting(bare(net), seed, images, labels, batch_size, init, device, build, matter)


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Ten hex characters of the names and bytes of tensors."""
    digest = hashlib.blake2b(digest_size=5)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
