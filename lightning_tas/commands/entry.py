"""What every command shares: arguments in, exit status out. A user's mistake is one message and status 2."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_tas import plugins
from lightning_tas.errors import Stopped, UserError, unknown
from lightning_tas.launch import group, log
from lightning_tas.launch.early import drop_save_signal, hold_save_signal
from lightning_tas.launch.follow import follow_sweep
from lightning_tas.progress import beside_bars, end_bars
from lightning_tas.version import __version__

HELP = ("-h", "--help", "help")
VERSION = "--version"
SWEEP = ("-m", "--multirun")
LONGEST_MESSAGE = 4000


def main(command: str, argv: Sequence[str] | None = None) -> int:
    """Run `command` (fit, evaluate, ...) with `argv` (default: the process's arguments); return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _wait_politely()
    if any(argument in HELP for argument in arguments):
        from lightning_tas.commands.help import text

        sys.stdout.write(text(command))
        return 0
    if VERSION in arguments:
        sys.stdout.write(f"lightning_tas {__version__}\n")
        return 0
    with log.kept():
        return _guarded(command, arguments)


def any_command(argv: Sequence[str] | None = None) -> int:
    """`lightning-tas COMMAND ...` and `python -m lightning_tas COMMAND ...`; alone it lists the commands."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: MODULE:NAME of the current folder
    from lightning_tas.commands.help import ABOUT, overview

    if arguments and arguments[0] in ABOUT:
        return main(arguments[0], arguments[1:])
    if arguments[:1] == [VERSION]:
        return main("fit", arguments)
    if not arguments or arguments[0] in HELP:
        sys.stdout.write(overview())
        return 0
    sys.stderr.write(f"lightning_tas: {unknown('command', arguments[0], ABOUT)}\n")
    return 2


def _guarded(command: str, arguments: Sequence[str]) -> int:
    plainly = warnings.showwarning
    try:
        warnings.showwarning = partial(_beside_bars, command, plainly)
        _one_voice()
        if command in ("fit", "search"):
            hold_save_signal()
            follow_sweep()
        group.meet()
        with plugins.command_line():
            group.together(lambda: _run(command, arguments))
        return 0
    except UserError as error:
        # One line, also where it quotes what a library wrote on several.
        return _end(command, error, " ".join(str(error).split()), 2)
    except Stopped as stopped:
        return _end(command, stopped, str(stopped), stopped.status)
    except KeyboardInterrupt as interrupt:
        return _end(command, interrupt, "interrupted", group.INTERRUPTED)
    finally:
        warnings.showwarning = plainly
        group.leave()
        drop_save_signal()


def _run(command: str, arguments: Sequence[str]) -> None:
    if any(argument in SWEEP for argument in arguments):
        if command != "fit":
            raise UserError(f"{command}: sweeps (-m) are for fit; run this command once for each value")
        from lightning_tas.commands import multirun

        multirun.run([argument for argument in arguments if argument not in SWEEP])
        return
    from lightning_tas.commands import names
    from lightning_tas.commands.compose import config_from

    config = config_from(command, arguments)
    names.check(command, config)
    run = importlib.import_module(f"lightning_tas.commands.{command}").run
    if not config.trainer.deterministic:
        run(config)
        return
    from lightning_tas.launch.trainer import deterministic

    with deterministic(config.trainer.deterministic):
        run(config)


def _one_voice() -> None:
    """Of several processes only the first one warns; an error that only another knows is printed there all the same."""
    # Heeded when torch is loaded. Its remark that a step left nothing unused is wrong for supernets: the next step may.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if group.rank() == 0:
        return
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _beside_bars(command: str, show: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """A warning as one line of the command's, not at the end of a progress bar, nor with a line of source."""
    log.note(f"{args[1].__name__}: {args[0]}")
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"lightning_tas.{command}: warning: {message}\n"
    try:
        with beside_bars():
            show(*args, **kwargs)
    finally:
        warnings.formatwarning = formatted


def _wait_politely() -> None:
    """Let OpenMP threads sleep while they wait, unless the user has said otherwise; heeded if torch is not loaded yet.

    They spin by default: on two cores that one other process uses too, a step of a small network takes 0.4 to 3 s
    instead of 0.12 s. On idle cores sleeping costs a small network up to a fifth, a large one nothing.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _end(command: str, error: BaseException, message: str, status: int) -> int:
    end_bars()
    sys.stdout.flush()
    if len(message) > LONGEST_MESSAGE:  # it quotes a value, and values may be as large as files
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
    log.note(message)
    if group.speaks(error):
        sys.stderr.write(f"lightning_tas.{command}: {message}\n")
        sys.stderr.flush()
    return status
