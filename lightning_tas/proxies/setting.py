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
from lightning_tas.proxies.inherited import InheritedTables, build_tables
from lightning_tas.proxies.initialise import DEFAULT, INHERITED, check_method
from lightning_tas.proxies.probe import Probe, bare
from lightning_tas.proxies.registry import Proxy, chosen
from lightning_tas.proxies.scorer import Options, check_arguments, labelled, make_probe

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


def components(wanted: Sequence[Proxy], options: Options) -> tuple[list[Proxy], dict[str, dict[str, Any]]]:
    """The proxies to run, each once, with their options, checked: those of a rank-combined one go to its components.

    A component is scored once for all who want it, so `UserError` where they want it with different options.
    """
    _check_mapping(options)
    known = {one.name: one for wish in wanted for one in (wish, *wish.parts)}
    for name in options:
        if name not in known:
            raise unknown("options", name, known)
    parts: dict[str, Proxy] = {}
    given: dict[str, tuple[str, dict[str, Any]]] = {}  # by part: who wants it first, and how
    for wish in wanted:
        shared = wish.shared(options.get(wish.name, {}))
        for part in wish.parts:
            own, more = part.shared(options.get(part.name, {}))[part.name], shared[part.name]
            now = wish.name, {**own, **more}
            _agree(part, (part.name, {**more, **own}), now)
            _agree(part, given.setdefault(part.name, now), now)
            parts[part.name] = part
    return list(parts.values()), {name: own for name, (_, own) in given.items() if own}


def _check_mapping(options: Any) -> None:
    if not isinstance(options, Mapping) or not all(isinstance(given, Mapping) for given in options.values()):
        raise UserError(
            f"options: {options!r} is not valid; valid: a mapping of mappings, as {{'dss': {{'mode': 'released'}}}}"
        )


def _agree(part: Proxy, one: tuple[str, dict[str, Any]], two: tuple[str, dict[str, Any]]) -> None:
    """Refuse two wishes (whose, options) for other options of `part`."""
    for key, default in part.options.items():
        left, right = one[1].get(key, default), two[1].get(key, default)
        if left != right:
            raise UserError(
                f"options: {one[0]} and {two[0]} want other options of {part.name}: {key}={left!r} "
                f"and {key}={right!r}; give both the same, or score them apart"
            )


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Ten hex characters of the names and bytes of tensors."""
    digest = hashlib.blake2b(digest_size=5)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
