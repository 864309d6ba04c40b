"""One decision per optimiser step, the same on every process: is the step sound, does anybody want a save or a stop?

Everything that ranks have to agree on at a step travels in one small tensor: one all-reduce, and one read by the host,
which is the only time in a step that the host waits for the device (but for DDP, where a step leaves out parameters). A
loss or gradient that is not finite on any rank
makes the step bad on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAN = float("nan")


@dataclass
class Requests:
    """What signal handlers of this process ask for; they only set these."""

    save: bool = False
    stop: bool = False


@dataclass(frozen=True)
class Decision:
    """What all ranks do about the optimiser step that was just decided on."""

    bad: bool = False  # leave weights and moments alone
    save: bool = False
    stop: bool = False
    bad_loss: int | None = None  # a rank whose loss is why; None: it is the gradient, which all ranks share
    grad_norm: float = NAN  # before clipping; NaN where it is not finite, or was not given


class StepGuard:
    """Counts bad steps and holds the newest decision.

    `last` is the decision on the optimiser step that the current batch completed, and says nothing (all false) while
    a batch only accumulates gradients. `requests` is this process's own; `state_dict` holds plain numbers.
    """

    def __init__(self) -> None:
        self.requests = Requests()
        self.last = Decision()
        self.total = 0
        self.in_a_row = 0
        self._bad_loss: Tensor | None = None  # of the batches since the last decision, on the device: 0. or 1.

    def note_loss(self, loss: Tensor) -> None:
        """Remember whether the scalar `loss` of a batch is finite; nothing waits for it."""
        bad = torch.isfinite(loss.detach()).logical_not().float()
        self._bad_loss = bad if self._bad_loss is None else torch.maximum(self._bad_loss, bad)
        self.last = Decision()

    def decide(self, grad_norm: Tensor | None = None) -> Decision:
        """Agree on the step whose losses were noted and whose gradient has `grad_norm` (scalar; None: not looked at).

        Collective: every rank calls it once per optimiser step.
        """
        assert self._bad_loss is not None, "no loss was noted for this step"
        device = self._bad_loss.device
        norm = torch.zeros((), device=device) if grad_norm is None else grad_norm.detach().to(device, torch.float32)
        finite = torch.isfinite(norm)
        save, stop = self.requests.save, self.requests.stop
        # Filled by a kernel: copying host numbers to the device would make the host wait.
        asked = [torch.full((), float(flag), device=device) for flag in (save, stop)]
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        blame = self._bad_loss * (1 + dist.get_rank() if together else 1)
        flags = torch.stack([blame, (~finite).float(), *asked, torch.where(finite, norm, 0.0)])
        if together:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        blamed, bad_norm, save_any, stop_any, value = flags.tolist()
        self._bad_loss = None
        bad = bool(blamed or bad_norm)
        self.total += bad
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if save:
            self.requests.save = False  # granted; a request to stop holds until it is obeyed
        known = grad_norm is not None and not bad_norm
        rank = int(blamed) - 1 if blamed else None
        self.last = Decision(bad, bool(save_any), bool(stop_any), rank, value if known else NAN)
        return self.last

    def forget(self) -> None:
        """Drop what was noted for a step that never came: training begins, or begins again."""
        self._bad_loss = None
        self.last = Decision()

    def state_dict(self) -> dict[str, int]:
        """The counters, as plain numbers."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from `state`; a checkpoint without one starts at 0."""
        self.total = int(state.get("total", 0))
        self.in_a_row = int(state.get("in_a_row", 0))
