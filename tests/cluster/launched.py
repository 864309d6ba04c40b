"""Start processes as torchrun or srun starts its workers, without them: each exit status can be seen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

TINY = (
    "recipe=quickstart",
    "space={name: tiny, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}",
    "select.margin=0.02",
    "select.batch_size=4",
    "data.train_subset=256",
    "data.eval_batch_size=49",
    "train.warmup_epochs=1",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
)


def torchrun_variables(rank: int, world: int, port: int, per_node: int = 1) -> dict[str, str]:
    """What torchrun gives worker `rank`; rank 0 holds the store instead of an agent."""
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "GROUP_RANK": str(rank // per_node),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def slurm_variables(rank: int, world: int, port: int, per_node: int = 1) -> dict[str, str]:
    """What srun gives task `rank` of a batch job that asked for `per_node` tasks on each node."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "supernet",
        "SLURM_NTASKS": str(world),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_NNODES": str(world // per_node),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(
    processes: Any, argvs: Sequence[Sequence[Any]], variables: Any = torchrun_variables, world: int | None = None,
    per_node: int = 1, env: Mapping[str, str] | None = None,
) -> list[Any]:  # fmt: skip
    """One process for each command line, rank 0 first; `world` where more are to be expected."""
    port = sys.modules["processes"].free_port()
    return [
        processes.command(*argv, env={**variables(rank, world or len(argvs), port, per_node), **(env or {})}, fork=True)
        for rank, argv in enumerate(argvs)
    ]


def fit(*arguments: object) -> list[str]:
    """The command line of a tiny study; later arguments replace earlier ones."""
    given = dict(str(item).split("=", 1) for item in (*TINY, *arguments))
    return ["python", "-m", "lightning_tas.fit", *(f"{key}={value}" for key, value in given.items())]
