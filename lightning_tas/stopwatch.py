"""Taking the time on a device: the clock of the processor, or events in a CUDA device's queue."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from lightning_tas.errors import unknown

NS_PER_MS = 1_000_000


class Stopwatch(Protocol):
    """Takes the time on a device; stamps may be compared after `wait`."""

    def stamp(self) -> Any:
        """This moment in the work given to the device."""

    def wait(self) -> None:
        """Return when the device has done all its work."""

    def between(self, begin: Any, end: Any) -> int:
        """Nanoseconds."""


class HostStopwatch:
    """The clock of the processor, for work that it does itself."""

    stamp = staticmethod(time.perf_counter_ns)

    def wait(self) -> None:
        """See `Stopwatch`."""

    def between(self, begin: int, end: int) -> int:
        """See `Stopwatch`."""
        return end - begin


class CudaStopwatch:
    """Events in the queue of a CUDA device: nothing waits while the work is timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """See `Stopwatch`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """See `Stopwatch`."""
        torch.cuda.synchronize(self._device)

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """See `Stopwatch`."""
        return round(begin.elapsed_time(end) * NS_PER_MS)


def stopwatch(device: torch.device) -> Stopwatch:
    """How time is taken on a device; `UserError` for a kind of device that none is known for."""
    if device.type == "cuda":
        return CudaStopwatch(device)
    if device.type != "cpu":
        raise unknown("latency.device", device.type, ("cpu", "cuda"))
    return HostStopwatch()
