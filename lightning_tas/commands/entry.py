"""What every command shares: arguments in, exit status out. A user's mistake is one message and status 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from lightning_tas.errors import UserError

HELP = ("-h", "--help", "help")


def main(command: str, argv: Sequence[str] | None = None) -> int:
    """Run `command` (fit, evaluate, export) with `argv` (default: the process's arguments); return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if any(argument in HELP for argument in arguments):
            from lightning_tas.commands.help import text

            sys.stdout.write(text(command))
            return 0
        from lightning_tas.commands.compose import config_from

        config = config_from(command, arguments)
        importlib.import_module(f"lightning_tas.commands.{command}").run(config)
    except UserError as error:
        sys.stdout.flush()
        sys.stderr.write(f"lightning_tas.{command}: {error}\n")
        return 2
    return 0
