"""`python -m lightning_tas.fit recipe=NAME key=value ...`: see `lightning_tas.commands.fit`."""

from lightning_tas.commands.entry import main

if __name__ == "__main__":
    raise SystemExit(main("fit"))
