"""Latency: what one forward pass of a stand-alone network takes on the device at hand, measured or added up.

`measure` times whole networks. `LatencyTable` times the pieces of a few networks that together show every piece of a
space, where they are, between their neighbours, and adds up the rest: an estimate for any of the space's networks that
costs nothing, is a sum over codes (so limits on it have exact ranges, counts and optima), and states its error against
direct measurements of other networks.

Everything runs in eval mode without gradients, after unmeasured passes; medians are taken, and what is compared is
measured in turns, so that a busy machine is as busy for all. Whatever was set (threads, random state) is as before.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lightning_tas.activations import build_options
from lightning_tas.additive import Total
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.pieces import Codes, Key, Pieces, watched
from lightning_tas.spaces import SearchSpace
from lightning_tas.stopwatch import NS_PER_MS, stopwatch
from lightning_tas.supernets import ElasticNetwork, network

_VISIT = 2  # timed passes of a network at each of its turns, after an unmeasured one


CALIBRATE, CHECK = 8, 8
"""Random networks measured whole, to scale a table and to state its error."""


def rounds(repeats: int) -> int:
    """How many turns every network of a table has, for so many timed passes."""
    return math.ceil(repeats / _VISIT)


def networks_measured(space: SearchSpace) -> int:
    """How many networks a table of `space` is measured with."""
    return len(Pieces(space).examples(deep=True)) + CALIBRATE + CHECK


@dataclass(frozen=True)
class Conditions:
    """Under which latency is measured. threads: of the processor; amp_dtype: of autocast, "" for none."""

    batch_size: int
    threads: int
    device: str
    amp_dtype: str


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a forward pass over `repeats` of them: median, quartiles (`low_ms`, `high_ms`) and extremes.

    The rest is as of `Conditions`.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    min_ms: float
    max_ms: float
    repeats: int
    batch_size: int
    threads: int
    device: str
    amp_dtype: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


class _Bench:
    """A device under fixed conditions, with a batch of images to run networks on."""

    def __init__(
        self,
        net: Any,
        batch_size: int,
        device: torch.device | str | None,
        threads: int | None,
        amp_dtype: torch.dtype | None,
    ) -> None:
        self.net = net
        self.device = _device(net, device)
        self.amp_dtype = amp_dtype
        self.clock = stopwatch(self.device)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        kind = "" if amp_dtype is None else str(amp_dtype).removeprefix("torch.")
        self.conditions = Conditions(batch_size, threads or torch.get_num_threads(), name, kind)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Without gradients, with autocast and the wanted number of threads, which is put back afterwards."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.conditions.threads)
        cast = nullcontext() if self.amp_dtype is None else torch.autocast(self.device.type, dtype=self.amp_dtype)
        try:
            with torch.no_grad(), cast:
                yield
        finally:
            torch.set_num_threads(before)

    def network(self, arch: Architecture | None) -> nn.Module:
        """The stand-alone network of `arch`, or a copy of the given one, in eval mode on the device."""
        weights = next(self.net.parameters(), None) if isinstance(self.net, nn.Module) else None
        if arch is None:
            made = copy.deepcopy(self.net)
        elif isinstance(self.net, ElasticNetwork) and weights is not None and weights.device.type != "meta":
            made = self.net.subnet(arch)
        else:
            with torch.device("meta"):
                made = network(arch, **build_options(self.net))
            made.to_empty(device=self.device)
            for tensor in (*made.parameters(), *made.buffers()):
                # Any ordinary number will do; what lies in fresh memory might be slow ones (denormal).
                tensor.data.fill_(0.01)
        return made.to(self.device).eval()

    def images(self, made: nn.Module) -> Tensor:
        """A batch for a network."""
        size = (self.conditions.batch_size, made.options["in_chans"], *made.img_size)  # type: ignore[index, misc]
        return torch.full(size, 0.5, device=self.device)

    def time(self, made: nn.Module, images: Tensor) -> int:
        """Nanoseconds of one pass."""
        begin = self.clock.stamp()
        made(images)
        end = self.clock.stamp()
        self.clock.wait()
        return self.clock.between(begin, end)

    def time_pieces(self, made: nn.Module, images: Tensor, depths: Sequence[int]) -> list[int]:
        """Nanoseconds of each piece in one pass."""
        stamps: list[Any] = [None] * (1 + sum(depths) + len(depths))

        def begin(piece: int) -> None:
            stamps[piece] = self.clock.stamp()

        with watched(made, depths, begin):
            stamps[0] = self.clock.stamp()
            made(images)
            stamps.append(self.clock.stamp())
        self.clock.wait()
        return [self.clock.between(a, b) for a, b in pairwise(stamps)]


def measure(
    net: Any,
    arch: Architecture | None = None,
    batch_size: int = 1,
    device: torch.device | str | None = None,
    warmup: int = 5,
    repeats: int = 30,
    threads: int | None = None,
    amp_dtype: torch.dtype | None = None,
) -> Latency:
    """Time forward passes of the stand-alone network of `arch`.

    Args:
        net: the supernet that `arch` is cut from, or the build options of a fresh network (a mapping; on the meta
            device the same). With ``arch=None``, a stand-alone network itself; it is copied.
        arch: the architecture.
        batch_size: images of a pass.
        device: "cpu" or a CUDA device; by default where the network lies, else the processor.
        warmup: unmeasured passes before.
        repeats: measured passes.
        threads: of the processor; by default as many as torch is set to.
        amp_dtype: autocast to this type.

    Raises:
        UserError: a count that is not positive; another kind of device; an architecture that does not fit.
    """
    _check_counts(batch_size=batch_size, repeats=repeats, threads=1 if threads is None else threads, warmup=warmup + 1)
    bench = _Bench(net, batch_size, device, threads, amp_dtype)
    with bench.ready():
        made = bench.network(arch)
        images = bench.images(made)
        for _ in range(warmup):
            bench.time(made, images)
        found = np.array([bench.time(made, images) for _ in range(repeats)]) / NS_PER_MS
    low, median, high = np.percentile(found, [25, 50, 75]).tolist()
    extremes = float(found.min()), float(found.max())
    return Latency(median, low, high, *extremes, repeats, **asdict(bench.conditions))


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """What every piece of a space's networks takes, and the estimate for a whole network: the sum of its pieces.

    pieces: nanoseconds by key of `pieces.Pieces`, after multiplication by `scale`, the median over `calibrated` random
    networks of the ratio of direct measurement to sum. errors: relative errors of the estimate for other random
    networks, (estimate - direct) / direct. samples: timed passes of every network. options: how the networks are built.
    Calling it with codes (N, columns) gives milliseconds (N,); it may limit a `Region` as it is.
    """

    space: SearchSpace
    pieces: Mapping[Key, int]
    scale: float
    calibrated: int
    errors: tuple[float, ...]
    samples: int
    conditions: Conditions
    options: Mapping[str, Any]
    per: int = NS_PER_MS

    @classmethod
    def build(
        cls,
        net: Any,
        space: SearchSpace | None = None,
        batch_size: int = 1,
        device: torch.device | str | None = None,
        threads: int | None = None,
        amp_dtype: torch.dtype | None = None,
        repeats: int = 20,
        calibrate: int = CALIBRATE,
        check: int = CHECK,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> LatencyTable:
        """Measure a table for the networks of `space` (default: the supernet's own).

        Every example, and each of `calibrate` + `check` random networks (of `seed`), is timed in `repeats` passes: in
        turns of two of them after an unmeasured one. `progress` is called with (turns done, turns), before the first
        and after each. The rest is as for `measure`, whose errors it raises.
        """
        counts = {"batch_size": batch_size, "repeats": repeats, "calibrate": calibrate, "check": check}
        _check_counts(**counts, threads=1 if threads is None else threads)
        space = net.space if space is None else space
        bench = _Bench(net, batch_size, device, threads, amp_dtype)
        parts = Pieces(space)
        examples = parts.examples(deep=True)
        others = space.sample_codes(seed, calibrate + check)
        archs = space.decode(np.stack([*examples, *others]))
        found: dict[Key, list[int]] = {}
        direct: list[list[int]] = [[] for _ in others]
        turns = rounds(repeats) * len(archs)
        told = progress or (lambda done, turns: None)
        told(0, turns)
        with bench.ready():
            for turn in range(turns):
                i = turn % len(archs)
                made = bench.network(archs[i])
                images = bench.images(made)
                bench.time(made, images)
                for _ in range(min(_VISIT, repeats - _VISIT * (turn // len(archs)))):
                    if i >= len(examples):
                        direct[i - len(examples)].append(bench.time(made, images))
                        continue
                    times = bench.time_pieces(made, images, archs[i].depths)
                    for key, nanoseconds in zip(parts.keys(examples[i]), times, strict=True):
                        found.setdefault(key, []).append(nanoseconds)
                told(turn + 1, turns)
        whole = np.array([np.median(times) for times in direct])
        return cls._fit(
            parts,
            {key: float(np.median(times)) for key, times in found.items()},
            others,
            whole,
            calibrate,
            repeats,
            bench.conditions,
            _plain(build_options(net)),
        )

    @classmethod
    def _fit(
        cls,
        parts: Pieces,
        medians: Mapping[Key, float],
        others: Codes,
        whole: npt.NDArray[np.float64],
        calibrate: int,
        samples: int,
        conditions: Conditions,
        options: Mapping[str, Any],
    ) -> LatencyTable:
        """Scale the pieces to the first `calibrate` networks measured whole (ns), and compare with the rest."""
        sums = parts.total(medians)(others)
        scale = float(np.median(whole[:calibrate] / sums[:calibrate]))
        pieces = {key: max(1, round(value * scale)) for key, value in medians.items()}
        estimates = parts.total(pieces)(others)
        errors = (estimates / whole - 1)[calibrate:]
        return cls(parts.space, pieces, scale, calibrate, tuple(errors.tolist()), samples, conditions, options)

    def fits(self, net: Any, repeats: int, conditions: Conditions) -> bool:
        """Whether it is a table of this supernet's networks, timed in so many passes under these conditions."""
        asked = (net.space, repeats, conditions, _plain(build_options(net)))
        return asked == (self.space, self.samples, self.conditions, self.options)

    def facts(self) -> dict[str, Any]:
        """What an estimate is worth, as JSON: conditions, timed passes, relative errors on other networks."""
        errors = {"median_error": self.median_error, "max_error": self.max_error}
        return {**asdict(self.conditions), "repeats": self.samples, **errors}

    @cached_property
    def total(self) -> Total:
        """The estimate of codes in whole nanoseconds."""
        return Pieces(self.space).total(self.pieces)

    def __call__(self, codes: Codes) -> npt.NDArray[np.float64]:
        """The estimate of codes (N, columns), in milliseconds (N,)."""
        return self.total(codes) / self.per

    estimate = __call__

    @property
    def median_error(self) -> float:
        """The median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def max_error(self) -> float:
        """The greatest of the absolute relative errors."""
        return float(np.abs(self.errors).max())

    def __str__(self) -> str:
        c = self.conditions
        return (
            f"latency table of {self.space.name} on {c.device}, batch size {c.batch_size}, {c.threads} threads"
            f"{f', {c.amp_dtype}' if c.amp_dtype else ''}: {len(self.pieces)} pieces, scaled by {self.scale:.3f} to "
            f"{self.calibrated} networks; error on {len(self.errors)} others: median {self.median_error:.1%}, "
            f"at most {self.max_error:.1%} (medians of {self.samples} passes)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by `from_dict`: the numbers that every rank and a resumed run must share."""
        return {
            "space": self.space.to_dict(),
            "pieces": [[list(key), nanoseconds] for key, nanoseconds in self.pieces.items()],
            "scale": self.scale,
            "calibrated": self.calibrated,
            "errors": list(self.errors),
            "samples": self.samples,
            "conditions": asdict(self.conditions),
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyTable:
        """Read `to_dict`'s form."""
        return cls(
            SearchSpace.from_dict(data["space"]),
            {_key(key): int(nanoseconds) for key, nanoseconds in data["pieces"]},
            float(data["scale"]),
            int(data["calibrated"]),
            tuple(float(error) for error in data["errors"]),
            int(data["samples"]),
            Conditions(**data["conditions"]),
            dict(data["options"]),
        )


def conditions(
    net: Any,
    batch_size: int = 1,
    device: torch.device | str | None = None,
    threads: int | None = None,
    amp_dtype: torch.dtype | None = None,
) -> Conditions:
    """The conditions under which `measure` and `LatencyTable.build` would measure with these arguments."""
    return _Bench(net, batch_size, device, threads, amp_dtype).conditions


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from JSON."""
    return dict(json.loads(json.dumps(options, default=str)))


def _key(value: Any) -> Any:
    return tuple(_key(v) for v in value) if isinstance(value, (list, tuple)) else value


def _device(net: Any, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    weights = next(net.parameters(), None) if isinstance(net, nn.Module) else None
    return torch.device("cpu") if weights is None or weights.device.type == "meta" else weights.device


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"latency.{name}: {value!r} is not valid; it must be a whole number of at least 1")
