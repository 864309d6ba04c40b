"""Scoring one network: `score_one` by one proxy, `score_network` by many that share their passes.

Nothing here touches what the caller owns: a sub-network is cut out as a copy, a stand-alone network is copied, every
draw comes from a generator of the seed, and modes, gradients, hooks and the global random state stay as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError, unknown
from lightning_tas.proxies.config import DEFAULT, INHERITED, check_method
from lightning_tas.proxies.initialise import fresh, redraw
from lightning_tas.proxies.options import Options
from lightning_tas.proxies.probe import Measured, Notes, Probe, bare, gaussian_batch, private_copy, quiet, settled
from lightning_tas.proxies.registry import Proxy, proxy
from lightning_tas.proxies.score import Score


def score_one(
    name: str,
    net: nn.Module | None,
    arch: Architecture | None = None,
    *,
    seed: int = 0,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    batch_size: int = 16,
    init: str | None = None,
    device: torch.device | str | None = None,
    build: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score:
    """Score one network by the proxy `name`.

    Args:
        net: a supernet, whose sub-network `arch` is scored; a stand-alone network; or None for a fresh one of `arch`.
        images, labels: (B, C, H, W) and (B,); default: `batch_size` Gaussian images and evenly spread labels.
        init: "inherited" (the weights of `net`, the default), "default" (drawn anew by the family's rule), or one of
            `initialise.METHODS`.
        build: options of a fresh network: num_classes, img_size, in_chans, ...
        options: of the proxy, e.g. ``mode="released"`` of dss.

    Raises:
        UserError: unknown proxy, option or method; images that the network cannot take; labels outside its classes.
    """
    chosen = proxy(name)
    given = chosen.shared(options)
    check_arguments(chosen.parts, given, seed, images, labels, batch_size, device)
    if arch is not None:
        check_arch("arch", arch)
    with quiet():
        probe = make_probe(
            bare(net), arch, seed, images, labels, batch_size, init, device, build, labelled(chosen.parts, given)
        )
        found = score_network(chosen.parts, probe, given)
    if chosen.combine is None:
        return found[name]
    return combined(chosen, [found])[0]


def check_arguments(
    parts: Sequence[Proxy],
    options: Options,
    seed: Any,
    images: Any,
    labels: Any,
    batch_size: Any,
    device: Any,
) -> None:
    """Refuse arguments of `score_one` that no network could be scored with; the network says more (`batch_for`)."""
    whole_number("seed", seed, -math.inf)
    whole_number("batch_size", batch_size, 1)
    if images is None and labels is not None:
        raise UserError("labels: given without images")
    for key, tensor, shape in (("images", images, "(B, C, H, W)"), ("labels", labels, "(B,)")):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise UserError(f"{key}: of type {type(tensor).__name__}, which is not valid; valid: a tensor {shape}")
        if tensor.is_complex():
            raise UserError(f"{key}: {str(tensor.dtype).removeprefix('torch.')} is not valid; valid: real numbers")
    if images is not None and (images.ndim != 4 or not len(images)):
        raise UserError(f"images: shape {tuple(images.shape)} is not (B, C, H, W)")
    if labels is not None and labels.is_floating_point():
        wrong = labels[~(labels.isfinite() & (labels == labels.round()))]
        if len(wrong):
            raise UserError(f"labels: {wrong[0].item()} is not valid; valid: whole numbers, the classes of the images")
    key, number = ("batch_size", batch_size) if images is None else ("images", len(images))
    for part in parts:
        part.check_images(number, options.get(part.name, {}), key)
    if device is not None:
        check_device(device)


def whole_number(key: str, value: Any, least: float) -> int:
    """`value`, refused where it is no whole number, or one below `least`."""
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not number or value < least:
        valid = "a whole number" if least == -math.inf else f"{least} or above"
        raise UserError(f"{key}: {value!r} is not valid; valid: {valid}")
    return int(value)


def check_arch(key: str, arch: Any) -> None:
    """Refuse what is no architecture."""
    if not isinstance(arch, Architecture):
        raise UserError(f"{key}: {arch!r} is not valid; valid: instances of lightning_tas.Architecture")


def check_device(device: Any) -> None:
    """Refuse a device that torch does not know, or cannot compute on here."""
    here, kind = ["cpu"], torch.accelerator.current_accelerator()
    if kind is not None:
        here += [kind.type, *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))]
    try:
        place = str(torch.device(device))
    except (RuntimeError, TypeError):  # how torch refuses a name, and what is none
        place = str(device)
    if place not in (*here, "cpu:0"):
        raise unknown("device", place, here)


def make_probe(
    net: nn.Module | None,
    arch: Architecture | None,
    seed: int,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    batch_size: int = 16,
    init: str | None = None,
    device: torch.device | str | None = None,
    build: Mapping[str, Any] | None = None,
    labels_matter: bool = True,
) -> Probe:
    """A private network with its batch; arguments as of `score_one`. To be used inside `probe.quiet`."""
    alone = private_network(net, arch, seed, init, build)
    place = torch.device(device) if device is not None else _place(net)
    alone = settled(alone, place).float()  # whatever the network is in, its batch is in float32
    images, labels = batch_for(alone, seed, images, labels, batch_size, labels_matter)
    probe = Probe(alone, images.to(place), labels.to(place), seed)
    probe.space = getattr(net, "space", None)
    if net is None or hasattr(net, "options"):
        probe.sibling = lambda other: settled(_sibling(net, other, seed, init, build), place).float()
    return probe


def _sibling(
    net: nn.Module | None, arch: Architecture, seed: int, init: str | None, build: Mapping[str, Any] | None
) -> nn.Module:
    """A private network of another architecture with weights from the same source; a lone network's are drawn."""
    if net is None or hasattr(net, "subnet"):
        return private_network(net, arch, seed, init, build)
    return fresh(arch, seed, DEFAULT if init in (None, INHERITED) else str(init), _build_options(net))


def private_network(
    net: nn.Module | None, arch: Architecture | None, seed: int, init: str | None, build: Mapping[str, Any] | None
) -> nn.Module:
    """The stand-alone network to score: cut out, copied or built."""
    method = init or (INHERITED if net is not None else DEFAULT)
    check_method(method, inherited=net is not None)
    if net is None:
        if arch is None:
            raise UserError("arch: give an architecture, a network, or a supernet and an architecture")
        return fresh(arch, seed, method, build or {})
    if build:
        raise UserError(f"build: {dict(build)} has no effect beside a network; give either")
    is_supernet = hasattr(net, "subnet")
    if is_supernet and arch is None:
        raise UserError("arch: a supernet is scored one sub-network at a time; name its architecture")
    if not is_supernet and arch is not None and getattr(net, "arch", arch) != arch:
        raise UserError(f"arch: {arch.id} is not the architecture of the network given, {net.arch.id}")  # type: ignore[union-attr, operator]
    if method == INHERITED:
        return net.subnet(arch) if is_supernet else private_copy(net)  # type: ignore[operator, no-any-return]
    own = arch or getattr(net, "arch", None)
    if own is not None and hasattr(net, "options"):
        # Built anew, so that nothing trained is left in what a method does not draw: class token, positions, tables.
        return fresh(own, seed, method, _build_options(net))
    if method == DEFAULT:
        raise UserError("init: 'default' needs a network of a registered family; valid here: inherited and methods")
    alone = private_copy(net)
    redraw(alone, method, seed)
    return alone


def _build_options(net: nn.Module) -> dict[str, Any]:
    """How to build stand-alone networks like those of `net`."""
    options: dict[str, Any] = dict(net.options)  # type: ignore[arg-type]
    if hasattr(net, "subnet"):
        options |= {"bias_rule": "regroup"} if "bias_rule" in options else {}
        options |= {"allocated": dict(net.allocated)} if "allocated" in options else {}  # type: ignore[arg-type]
    return options


def _place(net: nn.Module | None) -> torch.device:
    return next(net.parameters()).device if net is not None else torch.device("cpu")


def labelled(parts: Sequence[Proxy], options: Options) -> bool:
    """Whether any of these proxies, under its options, looks at labels."""
    return any(part.under(options.get(part.name, {})).needs.labels for part in parts)


def batch_for(
    net: nn.Module,
    seed: int,
    images: Tensor | None,
    labels: Tensor | None,
    batch_size: int,
    labels_matter: bool = True,
) -> tuple[Tensor, Tensor]:
    """The batch given, checked against the network, or one drawn from `seed`; detached, images in float32."""
    options = getattr(net, "options", {})
    classes = int(getattr(net, "num_classes", 0))
    if labels is None and labels_matter and classes < 1:
        raise UserError("labels: the network does not say how many classes it has (net.num_classes): give labels")
    if images is None:
        if not hasattr(net, "img_size"):
            raise UserError("images: the network does not say what images it takes (net.img_size): give a batch")
        size = net.img_size
        assert isinstance(size, Sequence)
        return gaussian_batch(seed, batch_size, int(options.get("in_chans", 3)), (int(size[0]), int(size[1])), classes)
    if labels is None:
        _, labels = gaussian_batch(seed, len(images), 1, (1, 1), classes)
    if tuple(labels.shape) != (len(images),):
        raise UserError(f"labels: shape {tuple(labels.shape)}, but there are {len(images)} images")
    if classes and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise UserError(f"labels: {int(labels.min())} to {int(labels.max())}; valid: 0 to {classes - 1}")
    return images.detach().clone().float(), labels.detach().clone().long()


def score_network(chosen: Sequence[Proxy], probe: Probe, options: Options | None = None) -> dict[str, Score]:
    """Scores of the probe's network by every proxy of `chosen` (none of them rank-combined), by name.

    All are announced before any pass runs, so each shared pass runs once. `seconds` of a score is what the proxy takes
    alone: the passes it uses, what it does while they run, and its formula.
    """
    options = options or {}
    family = str(getattr(getattr(probe.net, "arch", None), "family", None))
    scores: dict[str, Score] = {}
    made: list[tuple[Proxy, Callable[[], Measured], Notes, float]] = []
    for one in chosen:
        if family in one.unsupported:
            scores[one.name] = Score.invalid(one.unsupported[family])
            continue
        began = time.perf_counter()
        with probe.noting() as notes:
            measure = one.make(probe, **options.get(one.name, {}))
        made.append((one, measure, notes, time.perf_counter() - began))
    for one, measure, notes, constructed in made:
        for shared in notes.passes:
            shared.run()
        flaw = notes.flaw
        if flaw is not None:  # formulas need not bear what is not finite
            scores[one.name] = Score.invalid(flaw, constructed + notes.seconds)
            continue
        began = time.perf_counter()
        with probe.noting() as later:  # passes made and run by the formula itself: their time is in its own
            measured = measure()
        spent = constructed + notes.seconds + time.perf_counter() - began
        scores[one.name] = _score(one, measured, spent, measured.reason or later.flaw)
    return {one.name: scores[one.name] for one in chosen}


def _score(one: Proxy, measured: Measured, seconds: float, flaw: str | None) -> Score:
    """Read everything from the device at once; flip the sign where lower is better."""
    parts = measured.parts.unbind() if isinstance(measured.parts, Tensor) else measured.parts
    groups: list[tuple[Tensor | float, ...]] = [(measured.value,), tuple(parts), tuple(measured.extras.values())]
    groups += [tuple(block.unbind()) for block in measured.blocks.values()]
    numbers = [number for group in groups for number in group]
    tensors = [n for n in numbers if isinstance(n, Tensor)]
    if tensors:
        read = iter(torch.stack([t.detach().reshape(()).to(torch.float64) for t in tensors]).tolist())
        numbers = [next(read) if isinstance(n, Tensor) else n for n in numbers]
    known = iter(float(number) for number in numbers)
    (value,), own, extras, *blocks = [tuple(next(known) for _ in group) for group in groups]
    sign = 1.0 if one.higher_is_better else -1.0
    return Score.checked(
        sign * value,
        tuple(sign * part for part in own),
        seconds,
        dict(zip(measured.extras, extras, strict=True)),
        flaw,
        dict(zip(measured.blocks, blocks, strict=True)),
    )


def combined(one: Proxy, rows: Sequence[Mapping[str, Score]]) -> list[Score]:
    """Scores of a rank-combined proxy over the comparison set `rows`, each holding the scores of its components.

    A network with an invalid component is invalid and takes no part in the ranking.
    """
    assert one.combine is not None
    bad = [_first_flaw(one, row) for row in rows]
    seconds = [sum(row[part].seconds for part in one.combines) for row in rows]
    kept = [row for row, flaw in zip(rows, bad, strict=True) if flaw is None]
    raw = {
        f"{part}.{key}": np.asarray([row[part].extras.get(key, row[part].value) for row in kept], dtype=np.float64)
        for part in one.combines
        for key in ("value", *(kept[0][part].extras if kept else ()))
    }
    values = iter(one.combine(raw).tolist() if kept else [])
    out = []
    for flaw, spent in zip(bad, seconds, strict=True):
        out.append(Score(next(values), seconds=spent) if flaw is None else Score.invalid(flaw, spent))
    return out


def _first_flaw(one: Proxy, row: Mapping[str, Score]) -> str | None:
    return next((f"{part}: {row[part].reason}" for part in one.combines if not row[part].valid), None)
