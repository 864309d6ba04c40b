"""`python -m lightning_tas COMMAND ...`, as `lightning-tas COMMAND ...`: see `lightning_tas.commands.entry`."""

from lightning_tas.commands.entry import any_command

if __name__ == "__main__":
    raise SystemExit(any_command())
