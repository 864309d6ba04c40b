"""Mistakes that only data, space or machine can tell, and broken files: status 2, one line, nothing written."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lightning_tas.commands import build, entry
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError
from lightning_tas.launch.results import read_selection
from lightning_tas.launch.run_folder import RunFolder
from lightning_tas.launch.study import read_study

from ..end_to_end.conftest import arguments, command

WHOLE = "embed_dim: [16], depth: [1], num_heads: [1], mlp_ratio: [1]"
MISTAKES: list[tuple[list[str], list[str]]] = [
    (["output_dir=/dev/null"], ["output_dir: cannot create"]),
    (["checkpoint.keep_last=0"], ["checkpoint.keep_last: 0 is not valid", "-1 (keep all)"]),
    (["space={}"], ["space: embed_dim is missing"]),
    (["space={embed_dim: [16], depth: [1], num_heads: [1]}"], ["space: mlp_ratio is missing"]),
    ([f"space={{{WHOLE}, colour: [2]}}"], ["space: 'colour' is not valid", "num_heads"]),
    (["space={extends: nothing}"], ["space: 'nothing' is not valid", "autoformer_tiny"]),
    (["space={extends: autoformer_tiny, depths: [99]}"], ["space:", "99"]),
    (["space.dpth=[1]"], ["space: 'dpth'", "Did you mean 'depth'"]),
    (["space=autoformer_tiny", "space.depth=[12]"], ["space.depth: space is 'autoformer_tiny'"]),
    (["train.lr=inf"], ["train.lr: inf", "finite"]),
    (["train.betas=[nan,0.9]"], ["train.betas: [nan, 0.9]", "finite"]),
    (["select.high=inf"], ["select.high: inf", "finite"]),
    (["select.norm=papr"], ["select.norm: 'papr'", "Did you mean 'paper'"]),
    (["select.classes=sum"], ["select.classes: 'sum'", "Did you mean 'sums'"]),
    (["select.low=0.010", "select.high=0.0101"], ["select:", "the space reaches"]),
    (["trainer.max_steps=0"], ["trainer.max_steps: 0", "1 or above"]),
    (["trainer.max_epochs=0"], ["trainer.max_epochs: 0", "1 or above", "phases=[measure] ckpt=RUN"]),
    (["trainer.limit_train_batches=0.0"], ["trainer.limit_train_batches: 0.0", "1 batch"]),
    (["trainer.limit_train_batches=0"], ["trainer.limit_train_batches: 0", "1 batch"]),
    (["trainer.limit_train_batches=0.001"], ["trainer.limit_train_batches: 0.001", "of 4 batches", "0.25 or above"]),
    (["trainer.limit_val_batches=0.5"], ["trainer.limit_val_batches: 0.5", "of 1 batches"]),
    (["trainer.num_nodes=2"], ["trainer.num_nodes: 2", "torchrun"]),
    (["data.batch_size=200", "trainer.devices=2", "trainer.accelerator=cpu"], ["data.batch_size: 200", "2 processes"]),
    (["data.in_chans=2"], ["data.in_chans: 2", "digits has 1"]),
    (["data.search_val=2000"], ["data.search_val: 2000", "no image"]),
    (["data.auto_augment=rand-m9-x7"], ["data.auto_augment: 'rand-m9-x7'", "rand-m9-mstd0.5-inc1"]),
    (["data.mean=abc"], ["data.mean: 'abc'", "one number"]),
    (["data.mean=[nan]"], ["data.mean: [nan]"]),
    (["data.std=0"], ["data.std: 0", "above 0"]),
    (["phases=[supernet,select,measure]"], ["run in the order select", "give phases=[select,supernet,measure]"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(given)[:60] for given, _ in MISTAKES])
def test_mistake(overrides: list[str], words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("MASTER_ADDR", "RANK", "SLURM_NTASKS"):
        pytest.MonkeyPatch().delenv(name, raising=False)
    assert main("fit", arguments(tmp_path, "bad", *overrides)) == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning_tas.fit: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_process_of_its_own_says_one_line_too(tmp_path: Path) -> None:
    """Lightning announces devices and products on standard error whenever a Trainer is made."""
    process = command("lightning_tas.fit", *arguments(tmp_path, "bad", "data.name=digit"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("lightning_tas.fit: data.name: 'digit'") and err.count("\n") == 1, err


@pytest.mark.parametrize("text", ["3", "null", "[1]", "{{", "\udcff"])
def test_a_broken_config_file(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    status = main("fit", [f"config={tmp_path / 'config.yaml'}", "data.batch_size=x"])
    assert status == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", "3", "null", '{"phases": [1], "config_hash": ""}'])
def test_broken_records_are_mistakes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"resume: .*record\.json"):
        read_study(path)
    with pytest.raises(UserError, match=r"selection: .*record\.json"):
        read_selection(path)


def test_one_process_in_a_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_tas.launch.run_folder.LOCK_SECONDS", 1)
    folder = RunFolder(tmp_path / "a").create()
    with folder.locked(), pytest.raises(UserError, match="run: another process"), folder.locked():
        pass
    with folder.locked():
        assert list(folder.path.iterdir()) == []


def test_a_run_has_its_configuration_before_its_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed in between, it must not be a study that nobody can repeat."""
    monkeypatch.setattr("lightning_tas.commands.fit.Study", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main("fit", arguments(tmp_path, "a")) == 130
    folder = tmp_path / "runs" / "quickstart" / "a"
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "log.txt"}


@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there(
    accelerator: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the CPU without a word; a plan for another machine is fine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = f"trainer.accelerator={accelerator}"
    with pytest.raises(UserError, match=f"trainer.accelerator: '{accelerator}' is not valid here"):
        build.device(config_from("fit", arguments(tmp_path, "there", wanted)))
    assert main("fit", arguments(tmp_path, "there", wanted, "plan=true")) == 0
    assert "preferred architectures" in capsys.readouterr().out


def test_messages_start_on_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Below a bar that is under way: a warning, after which the bar goes on, and the error that ends all."""
    from tqdm import tqdm

    def work(*_: object) -> None:
        bar = tqdm(total=4, file=sys.stderr, desc="work")
        bar.update(2)
        warnings.warn("take heed", stacklevel=1)
        raise UserError("the end").with_traceback(None)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(entry, "_run", work)
        # Pytest gathers warnings; here they are printed as elsewhere.
        shown = lambda *about: sys.stderr.write(warnings.formatwarning(*about[:4]))  # noqa: E731
        patch.setattr(warnings, "showwarning", shown)
        assert entry.main("fit", []) == 2
        assert warnings.showwarning is shown
    lines = re.split(r"[\r\n]", capsys.readouterr().err)
    assert "lightning_tas.fit: warning: take heed" in lines
    assert lines[-2:] == ["lightning_tas.fit: the end", ""]
    assert "work" in lines[-3], "the bar stands above the message"
