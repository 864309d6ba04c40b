"""`log.txt` of a run: what its first process says, with the time of day; warnings and errors too, bars not.

What is said before there is a run folder is kept until there is one. Nothing that goes wrong here stops a run.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lightning_tas.launch import group

NAME = "log.txt"
_LOGGERS = ("pytorch_lightning", "lightning_fabric")

_early: list[str] | None = None  # None: nobody keeps a log
_file: TextIO | None = None


def note(text: str) -> None:
    """Add lines to the log, if one is kept."""
    if _early is None:
        return
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = "".join(f"{stamp}  {line}\n" for line in text.splitlines() if line.strip())
    if _file is None:
        _early.append(lines)
        return
    with contextlib.suppress(OSError):
        _file.write(lines)
        _file.flush()


def write_into(folder: Path) -> None:
    """Keep the log in `folder` from here on, behind what is there of earlier attempts."""
    global _file
    if _early is None or _file is not None or group.rank() > 0:
        return
    with contextlib.suppress(OSError):
        _file = (folder / NAME).open("a", encoding="utf-8")
        _file.write("".join(_early))
        _file.flush()


class _Handler(logging.Handler):
    """What Lightning says through its loggers."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside, a log is kept; an error that is none of ours gets its traceback there."""
    global _early, _file
    if _early is not None:  # a command inside a command
        yield
        return
    _early, handler = [], _Handler()
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    except Exception:
        note(traceback.format_exc())
        raise
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        if _file is not None:
            with contextlib.suppress(OSError):
                _file.close()
        _early = _file = None
