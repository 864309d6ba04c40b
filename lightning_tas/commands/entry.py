"""What every command shares: arguments in, exit status out. A user's mistake is one message and status 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from lightning_tas.errors import Stopped, UserError

HELP = ("-h", "--help", "help")
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(command: str, argv: Sequence[str] | None = None) -> int:
    """Run `command` (fit, evaluate, export) with `argv` (default: the process's arguments); return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _wait_politely()
    try:
        if any(argument in HELP for argument in arguments):
            from lightning_tas.commands.help import text

            sys.stdout.write(text(command))
            return 0
        from lightning_tas.commands.compose import config_from

        config = config_from(command, arguments)
        importlib.import_module(f"lightning_tas.commands.{command}").run(config)
    except UserError as error:
        # One line, also where it quotes what a library wrote on several.
        return _end(command, " ".join(str(error).split()), 2)
    except Stopped as stopped:
        return _end(command, str(stopped), stopped.status)
    except KeyboardInterrupt:
        return _end(command, "interrupted", INTERRUPTED)
    return 0


def _wait_politely() -> None:
    """Let OpenMP threads sleep while they wait, unless the user has said otherwise; heeded if torch is not loaded yet.

    They spin by default: on two cores that one other process uses too, a step of a small network takes 0.4 to 3 s
    instead of 0.12 s. On idle cores sleeping costs a small network up to a fifth, a large one nothing.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _end(command: str, message: str, status: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"lightning_tas.{command}: {message}\n")
    return status
