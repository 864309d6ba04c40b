"""`python -m lightning_tas.search`: the search of a recipe alone, training-free or on a trained supernet.

    recipe=t_razor_tiny                       proxies on a fresh supernet, no data needed
    recipe=autoformer_tiny ckpt=RUN           any search on the supernet of a run
    ckpt=RUN search.strategy=evolution        the same with the recipe of that run

It is `fit` with the one phase `search`: the same run folder, resuming, processes and loggers.
"""

from __future__ import annotations

from lightning_tas.commands import fit
from lightning_tas.commands.config import Config


def run(config: Config) -> None:
    """Run the phase `search`, or print its plan."""
    config.phases = ["search"]
    fit.run(config, "search")
