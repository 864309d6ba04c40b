"""What started this process: torchrun, Slurm's srun, Lightning itself, or a person. Read from variables alone.

Nothing here imports torch before it has to, so that a mistake on the command line is answered at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_tas.errors import UserError

if TYPE_CHECKING:
    from pytorch_lightning.plugins.environments import ClusterEnvironment

    from lightning_tas.commands.config import TrainerConfig


def by_torchrun() -> bool:
    """Whether torchrun started this process; perhaps srun had started torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def by_slurm() -> bool:
    """Whether srun did, as Lightning decides it: in an interactive allocation the user's own command is alone."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return not by_torchrun() and "SLURM_NTASKS" in os.environ and not interactive


def launched() -> bool:
    """Whether torchrun or srun started this process, perhaps beside others."""
    return by_torchrun() or by_slurm()


def rank() -> int:
    """This process among all of the run, before any group exists."""
    names = ["RANK", "SLURM_PROCID", "LOCAL_RANK"] if by_slurm() else ["RANK", "LOCAL_RANK"]
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def local_rank() -> int:
    """This process among those of its node, as the launcher numbers them."""
    return int(os.environ["LOCAL_RANK" if by_torchrun() else "SLURM_LOCALID"])


def world_size() -> int:
    """Processes that the launcher started; 1 without one."""
    if by_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ["SLURM_NTASKS"]) if by_slurm() else 1


def address() -> tuple[str, int]:
    """Host and port where the processes of a launcher meet; Lightning derives them from Slurm's node list and job."""
    if by_slurm():
        place = cluster()
        assert place is not None
        return place.main_address, place.main_port
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def cluster() -> ClusterEnvironment | None:
    """Lightning's view of torchrun or Slurm, a plugin for its Trainer; None where neither started this process.

    Raises:
        UserError: Slurm was asked for processes in a way that cannot be placed on nodes.
    """
    if not launched():
        return None
    from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if by_torchrun():
        return TorchElasticEnvironment()
    try:
        # Lightning's own requeueing writes a checkpoint inside the signal handler, in the middle of a step.
        return SLURMEnvironment(auto_requeue=False)
    except RuntimeError as error:
        raise UserError(f"launch: {' '.join(str(error).split())}") from None


def layout() -> tuple[int, int] | None:
    """(processes per node, nodes) that a launcher started; None without one."""
    if by_torchrun():
        per_node, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return per_node, world // per_node
    if by_slurm():
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        given = os.environ.get("SLURM_NTASKS_PER_NODE")
        return int(given) if given else int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None


def fill_in(trainer: TrainerConfig) -> tuple[object, int]:
    """`trainer.devices` and `trainer.num_nodes`, from the launcher where there is one: the user need not repeat it.

    Raises:
        UserError: they are given and are not what the launcher started.
    """
    found = layout()
    if found is None:
        return trainer.devices, trainer.num_nodes
    launcher = "torchrun" if by_torchrun() else "srun"
    per_node, nodes = found
    if trainer.devices not in ("auto", -1, "-1"):
        given = len(trainer.devices) if isinstance(trainer.devices, list) else int(trainer.devices)
        if given != per_node:
            option = "--nproc-per-node" if by_torchrun() else "--ntasks-per-node"
            raise UserError(
                f"trainer.devices: {trainer.devices!r} is not valid; {launcher} started {per_node} processes on each "
                f"node; leave it at auto, or start with {option}={given}"
            )
    if trainer.num_nodes not in (1, nodes):
        option = "--nnodes" if by_torchrun() else "--nodes"
        raise UserError(
            f"trainer.num_nodes: {trainer.num_nodes} is not valid; {launcher} started processes on {nodes} nodes; "
            f"leave it out, or start with {option}={trainer.num_nodes}"
        )
    # A list of devices stays: it says which ones.
    return (trainer.devices if isinstance(trainer.devices, list) else per_node), nodes


def slurm_run_name() -> str | None:
    """A name for the run that a requeued job has again: the job's number, of an array also the task's."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"slurm-{array}_{task}"
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm-{job}" if job else None
