"""`python -m lightning_tas.search recipe=NAME key=value ...`: see `lightning_tas.commands.search`."""

from lightning_tas.commands.entry import main

if __name__ == "__main__":
    raise SystemExit(main("search"))
