"""What torchrun and Slurm say about a run, and how contradictions are named."""

from __future__ import annotations

from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_tas.commands.config import TrainerConfig
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError
from lightning_tas.launch import environment, group

from .launched import slurm_variables, torchrun_variables

NAMES = (*torchrun_variables(0, 1, 1), *slurm_variables(0, 1, 1))


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


@pytest.mark.parametrize("value", ["abc", "", "1.5", "-1", None])
@pytest.mark.parametrize(
    "name",
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"),
    ],
)
def test_variables_that_are_no_numbers_are_named(name: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("SLURM") and not value and (value is None or name == "SLURM_NTASKS_PER_NODE"):
        return  # without SLURM_NTASKS there is no srun, and the last two may be missing
    _be(monkeypatch, (slurm_variables if name.startswith("SLURM") else torchrun_variables)(0, 2, 29500))
    monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    found = "missing" if value is None else repr(value)
    with pytest.raises(UserError, match=rf"^{name}: {found} .*valid: a whole number (of at least|from) [01]") as caught:
        environment.check()
        environment.layout()
        environment.address()
    assert str(caught.value).endswith("srun sets it" if name.startswith("SLURM") else "torchrun sets it")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"])
def test_a_process_beyond_the_last_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, {**(slurm_variables if name.startswith("SLURM") else torchrun_variables)(0, 2, 1), name: "2"})
    with pytest.raises(UserError, match=rf"^{name}: '2' .*valid: a whole number from 0 to 1;"):
        environment.check()


@pytest.mark.parametrize("name", environment.READ_BY_LIGHTNING)
def test_variables_of_no_launcher_that_lightning_cannot_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match=f"^{name}: 'x' in the environment is not valid; .*unset it$"):
        environment.check()


def test_a_number_without_a_launcher_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, {"RANK": "5", "WORLD_SIZE": "2", "SLURM_PROCID": "3"})
    monkeypatch.setattr(rank_zero_only, "rank", 5)
    group.meet()
    assert (group.rank(), group.size(), rank_zero_only.rank) == (0, 1, 0)
    assert environment.layout() is None


COMMANDS = ("fit", "evaluate", "search", "score", "export")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _be(monkeypatch, {**torchrun_variables(0, 2, 29999), "WORLD_SIZE": "abc"})
    assert main(command, ["recipe=quickstart"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"lightning_tas.{command}: WORLD_SIZE: 'abc' in") and err.count("\n") == 1


def test_lightning_is_not_asked_first(processes: Any) -> None:
    """It reads RANK when it is imported, and ends with a traceback."""
    process = processes.command("python", "-m", "lightning_tas.search", "recipe=t_razor_tiny", env={"RANK": "x"})
    assert processes.wait([process], timeout=60, check=False) == [2]
    assert process.stderr.startswith("lightning_tas.search: RANK: 'x' in") and process.stderr.count("\n") == 1
