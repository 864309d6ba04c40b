"""`python -m lightning_tas.search`: the search of a recipe alone, training-free or on a trained supernet.

    recipe=t_razor_tiny                       proxies on a fresh supernet, no data needed
    recipe=autoformer_tiny ckpt=RUN           any search on the supernet of a run
    ckpt=RUN search.strategy=evolution        the same with the recipe of that run

It is `fit` with the one phase `search`: the same run folder, resuming, processes and loggers.
"""

from __future__ import annotations

from lightning_tas.commands import fit
from lightning_tas.commands.config import Config
from lightning_tas.errors import UserError


def run(config: Config) -> None:
    """Run the phase `search`, or print its plan."""
    prepare(config)
    fit.run(config, "search")


def prepare(config: Config) -> None:
    """Make a recipe's configuration that of its search alone. `UserError` where it names no strategy."""
    if config.search.strategy is None:
        from lightning_tas.callbacks.search_check import strategy_names

        raise UserError(
            f"search.strategy: recipe {config.recipe!r} names none; give search.strategy=NAME; "
            f"valid: {', '.join(strategy_names())}"
        )
    own = (config.per_phase or {}).get("search")
    config.phases, config.per_phase = ["search"], {"search": own} if own else None
