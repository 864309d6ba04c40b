"""`python -m lightning_tas.score recipe=NAME key=value ...`: see `lightning_tas.commands.score`."""

from lightning_tas.commands.entry import main

if __name__ == "__main__":
    raise SystemExit(main("score"))
