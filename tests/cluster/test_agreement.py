"""What is compared before a fit tells apart whatever must be equal (that a difference ends all: see test_group.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_tas.launch import agreement


class Module(torch.nn.Module):
    """The parts of a LightningModule that are looked at; sub-networks of the steps before `first` are equal."""

    def __init__(self, width: int = 4, first: int = 0, score: float | None = 1.0) -> None:
        super().__init__()
        self.layer, self.first = torch.nn.Linear(width, 2), first
        self.candidates = [] if score is None else [SimpleNamespace(to_dict=lambda: {"score": score})]

    def architectures(self, step: int) -> list[Any]:
        """What a step trains."""
        return [SimpleNamespace(id=f"arch-{max(step, self.first)}"), None]


def facts(
    monkeypatch: pytest.MonkeyPatch, module: Module, step: int = 7, checkpoint: str = "a", world: int = 2
) -> dict[str, str]:
    """Everything that a process compares at the start of a fit."""
    found: dict[str, str] = {}
    monkeypatch.setattr(agreement, "compare", lambda what, facts: found.update(facts))
    trainer: Any = SimpleNamespace(world_size=world, global_step=step, current_epoch=1)
    callback = agreement.Agreement({"checkpoint": checkpoint})
    callback.setup(trainer, module, "fit")  # type: ignore[arg-type]
    callback.on_train_start(trainer, module)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"checkpoint": "b"}, {"checkpoint"}),
        ({"step": 8}, {"step", "sampler"}),
        ({"module": Module(width=5)}, {"network"}),
        ({"module": Module(score=2.0)}, {"selection"}),
        ({"module": Module(first=70)}, {"sampler"}),  # differs at step 7 and after
        ({"module": Module(first=7)}, set()),  # differs before step 7 only, which nobody trains any more
    ],
)
def test_what_differs_is_named(other: dict[str, Any], named: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = facts(monkeypatch, Module())
    theirs = facts(monkeypatch, **{"module": Module(), **other})
    assert {name for name in mine if mine[name] != theirs[name]} == named
    assert mine.keys() == theirs.keys() == {"checkpoint", "network", "selection", "step", "epoch", "sampler"}


def test_one_process_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch, Module(), world=1) == {}
