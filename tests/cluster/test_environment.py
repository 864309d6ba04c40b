"""What torchrun and Slurm say about a run, and how contradictions are named."""

from __future__ import annotations

import pytest

from lightning_tas.commands.config import TrainerConfig
from lightning_tas.errors import UserError
from lightning_tas.launch import environment

from .launched import slurm_variables, torchrun_variables

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", *slurm_variables(0, 1, 1))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, unless a test says so."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def _be(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_the_settings_stand() -> None:
    assert not environment.launched() and environment.cluster() is None and environment.rank() == 0
    assert environment.fill_in(TrainerConfig(devices=[1, 3], num_nodes=2)) == ([1, 3], 2)


@pytest.mark.parametrize("variables", [torchrun_variables, slurm_variables])
def test_devices_and_nodes_follow_the_launcher(variables, monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, variables(5, 8, 29500, 4))
    assert environment.rank() == 5 and environment.local_rank() == 1 and environment.world_size() == 8
    assert environment.fill_in(TrainerConfig()) == (4, 2)
    assert environment.fill_in(TrainerConfig(devices=-1)) == (4, 2)
    assert environment.fill_in(TrainerConfig(devices=4, num_nodes=2)) == (4, 2)
    assert environment.fill_in(TrainerConfig(devices=[4, 5, 6, 7])) == ([4, 5, 6, 7], 2)
    launcher = "torchrun" if variables is torchrun_variables else "srun"
    with pytest.raises(UserError, match=rf"trainer\.devices: 8 .*{launcher} started 4 processes on each node"):
        environment.fill_in(TrainerConfig(devices=8))
    with pytest.raises(UserError, match=rf"trainer\.num_nodes: 3 .*{launcher} started processes on 2 nodes"):
        environment.fill_in(TrainerConfig(num_nodes=3))


def test_torchrun_inside_a_slurm_job_is_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, slurm_variables(1, 2, 29500))
    _be(monkeypatch, torchrun_variables(6, 8, 29500, 4))
    assert environment.rank() == 6 and environment.layout() == (4, 2)
    assert type(environment.cluster()).__name__ == "TorchElasticEnvironment"


def test_lightning_does_not_requeue_slurm_jobs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, slurm_variables(1, 2, 29500))
    plugin = environment.cluster()
    assert type(plugin).__name__ == "SLURMEnvironment" and plugin.auto_requeue is False  # type: ignore[union-attr]
    assert environment.address() == ("127.0.0.1", 29500)


def test_in_an_interactive_allocation_lightning_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, {**slurm_variables(0, 4, 29500, 4), "SLURM_JOB_NAME": "interactive", "LOCAL_RANK": "2"})
    assert not environment.launched() and environment.rank() == 2
    assert environment.fill_in(TrainerConfig(devices=4)) == (4, 1)


def test_tasks_that_are_not_placed_on_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, slurm_variables(0, 2, 29500))
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(UserError, match="--ntasks-per-node"):
        environment.cluster()
