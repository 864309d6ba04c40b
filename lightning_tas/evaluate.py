"""`python -m lightning_tas.evaluate recipe=NAME key=value ...`: see `lightning_tas.commands.evaluate`."""

from lightning_tas.commands.entry import main

if __name__ == "__main__":
    raise SystemExit(main("evaluate"))
