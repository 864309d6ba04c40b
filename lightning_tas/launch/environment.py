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


READ_BY_LIGHTNING = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""The first of these that is set is the rank to Lightning from its import on, whether or not a launcher is there."""


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


def check() -> None:
    """Refuse variables that make no sense, before anybody waits for other processes or imports Lightning.

    Raises:
        UserError: names the variable, its value and what is valid.
    """
    for name in READ_BY_LIGHTNING:
        if name in os.environ:
            _whole(name)
    rank()
    if launched():
        local_rank()


def rank() -> int:
    """This process among all of the run, before any group exists. Without a launcher only Lightning numbers any."""
    if launched():
        return _whole("RANK" if by_torchrun() else "SLURM_PROCID", below=world_size())
    return _whole("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0


def local_rank() -> int:
    """This process among those of its node, as the launcher numbers them."""
    return _whole("LOCAL_RANK" if by_torchrun() else "SLURM_LOCALID", below=world_size())


def world_size() -> int:
    """Processes that the launcher started; 1 without one."""
    return _whole("WORLD_SIZE" if by_torchrun() else "SLURM_NTASKS", least=1) if launched() else 1


def _whole(name: str, least: int = 0, below: int | None = None) -> int:
    """The whole number in a variable that a launcher sets."""
    value = os.environ.get(name)
    number = int(value) if value is not None and value.strip().isdecimal() else -1
    if number >= least and (below is None or number < below):
        return number
    found = "missing in the environment" if value is None else f"{value!r} in the environment is not valid"
    limit = f" of at least {least}" if below is None else f" from {least} to {below - 1}"
    launcher = "torchrun sets it" if by_torchrun() else "srun sets it" if by_slurm() else "or unset it"
    raise UserError(f"{name}: {found}; valid: a whole number{limit}; {launcher}")


def address() -> tuple[str, int]:
    """Host and port where the processes of a launcher meet; Lightning derives them from Slurm's node list and job."""
    port = _whole("MASTER_PORT", least=1, below=1 << 16) if by_torchrun() or "MASTER_PORT" in os.environ else None
    if by_slurm():
        place = cluster()
        assert place is not None
        try:
            return place.main_address, port or place.main_port
        except ValueError:  # the port comes from the last digits of this
            number = os.environ.get("SLURM_JOB_ID")
            raise UserError(f"SLURM_JOB_ID: {number!r} in the environment is not valid; set MASTER_PORT") from None
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR: missing in the environment; valid: the host of the first process")
    assert port is not None
    return os.environ["MASTER_ADDR"], port


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
        world = world_size()
        per_node = _whole("LOCAL_WORLD_SIZE", least=1, below=world + 1)
        return per_node, world // per_node
    if by_slurm():
        nodes = _whole("SLURM_NNODES", least=1, below=world_size() + 1) if "SLURM_NNODES" in os.environ else 1
        given = os.environ.get("SLURM_NTASKS_PER_NODE")
        return _whole("SLURM_NTASKS_PER_NODE", least=1) if given else world_size() // nodes, nodes
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
