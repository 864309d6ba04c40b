"""`python -m lightning_tas.export recipe=NAME key=value ...`: see `lightning_tas.commands.export`."""

from lightning_tas.commands.entry import main

if __name__ == "__main__":
    raise SystemExit(main("export"))
