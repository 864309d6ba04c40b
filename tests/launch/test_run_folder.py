"""Names and places of runs, and the study record."""

import json

import pytest

from lightning_tas.errors import UserError
from lightning_tas.launch.run_folder import RUN_VARIABLE, RunFolder, default_run_name
from lightning_tas.launch.settings import Settings
from lightning_tas.launch.study import FINISHED, RUNNING, Study


def test_a_user_recipe_is_named_after_its_file(tmp_path):
    folder = RunFolder.locate(tmp_path, "./some/mine.yaml", "first", seed=0)
    assert folder.path == tmp_path / "mine" / "first"
    assert not folder.path.exists()
    assert folder.create().path.is_dir()


@pytest.mark.parametrize("name", ["a/b", "..", "a b", ""])
def test_a_run_name_must_be_one_folder(tmp_path, name):
    if name:
        with pytest.raises(UserError, match="run:"):
            RunFolder.locate(tmp_path, "quickstart", name, seed=0)
    else:
        assert RunFolder.locate(tmp_path, "quickstart", name, seed=3).path.name.endswith("seed3")


def test_a_file_in_the_way_is_a_user_error(tmp_path):
    (tmp_path / "quickstart").write_text("")
    with pytest.raises(UserError, match="output_dir"):
        RunFolder.locate(tmp_path, "quickstart", "a", seed=0).create()


LAUNCHERS = ("RANK", "SLURM_PROCID", "SLURM_NTASKS", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", RUN_VARIABLE)


def test_default_names_follow_slurm_also_for_requeued_and_array_jobs(monkeypatch):
    for variable in (*LAUNCHERS, "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert default_run_name(7).endswith("-seed7")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert default_run_name(0) == "slurm-123"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "120")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert default_run_name(0) == "slurm-120_3"


def test_processes_that_lightning_starts_find_the_folder_of_rank_0(monkeypatch, tmp_path):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(RUN_VARIABLE, "left by somebody")
    assert RunFolder.begun() is None  # rank 0 chooses
    folder = RunFolder(tmp_path / "run").create()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert RunFolder.begun() == folder


ABC = Settings({"seed": 0, "train.lr": 1e-3, "space": "a"}, {})


def test_a_study_remembers_and_refuses_another_plan(tmp_path):
    path = tmp_path / "study.json"
    study = Study(path, ["select", "supernet"], ABC)
    study.start(0)
    study.finish(0, {"selection": "selection.json"})
    study.start(1)
    again = Study(path, ["select", "supernet"], ABC)
    assert (again.status(0), again.status(1), again.finished) == (FINISHED, RUNNING, False)
    assert again.outputs("select") == {"selection": "selection.json"}
    assert again.outputs("supernet") == {}
    with pytest.raises(UserError, match="phases"):
        Study(path, ["select"], ABC)
    other = Settings({"seed": 0, "train.lr": 0.5, "train.new": 2, "space": "b"}, {"train.new": 1})
    with pytest.raises(UserError) as refused:
        Study(path, ["select", "supernet"], other)
    said = "train.lr is 0.5, in the run 0.001; space is b, in the run a; train.new is 2, in the run 1; give the same"
    assert f"{path} was begun with other settings: {said}" in str(refused.value)
    # A key that did not exist when the run was begun changes nothing by its default.
    Study(path, ["select", "supernet"], Settings({**ABC.values, "train.new": 1}, {"train.new": 1}))


def test_only_the_writer_touches_the_disk(tmp_path):
    Study(tmp_path / "study.json", ["select"], ABC, write=False).start(0)
    assert list(tmp_path.iterdir()) == []
    Study(tmp_path / "study.json", ["select"], ABC)
    assert json.loads((tmp_path / "study.json").read_text())["phases"][0]["status"] == "pending"
