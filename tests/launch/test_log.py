"""`log.txt`: what is said, also before there is a folder, warnings and errors too; never a reason to fail."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tas.commands import entry
from lightning_tas.commands.console import say
from lightning_tas.errors import UserError
from lightning_tas.launch import log
from lightning_tas.launch.trainer import ProgressBar


def lines(folder: Path) -> list[str]:
    return [line.partition("  ")[2] for line in (folder / log.NAME).read_text().splitlines()]


def test_what_a_command_says_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(command: str, arguments: Any) -> None:
        warnings.simplefilter("always")
        warnings.warn("early", stacklevel=1)
        log.write_into(tmp_path)
        say("two\nlines")
        logging.getLogger("pytorch_lightning.utilities.rank_zero").warning("of Lightning")
        raise UserError("seed: -1 is not valid")

    monkeypatch.setattr(entry, "_run", work)
    said = ["UserWarning: early", "two", "lines", "of Lightning", "seed: -1 is not valid"]
    for attempt in (1, 2):
        assert entry.main("fit", []) == 2
        assert lines(tmp_path) == said * attempt


def test_a_bug_leaves_its_traceback_and_a_missing_folder_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), log.kept():
        log.write_into(tmp_path)
        print(1 / 0)
    assert lines(tmp_path)[-1] == "ZeroDivisionError: division by zero"
    with log.kept():
        log.write_into(tmp_path / "gone")
        say("still runs")
    log.note("nobody keeps it")
    assert len(list(tmp_path.iterdir())) == 1


def test_the_bar_shows_the_time_left_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 of 500 steps took 60 s, after a resumption at step 50."""
    bar = ProgressBar()
    bar._began, bar._from, bar._steps = time.monotonic(), 50, 500.0
    monkeypatch.setattr("lightning_tas.launch.trainer.time.monotonic", lambda: bar._began + 60)
    trainer: Any = SimpleNamespace(global_step=150, callback_metrics={}, progress_bar_metrics={}, loggers=[])
    assert bar.get_metrics(trainer, None)["phase left"] == "03:30"  # type: ignore[arg-type]
    for step, steps in ((50, 500.0), (150, float("inf"))):
        trainer.global_step, bar._steps = step, steps
        assert "phase left" not in bar.get_metrics(trainer, None)  # type: ignore[arg-type]
