"""PreferredSelection in a plain Trainer: who selects, what is written, what is trained, and on several processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_tas import spaces
from lightning_tas.callbacks.preferred_selection import PreferredSelection, selection_hash
from lightning_tas.errors import UserError
from lightning_tas.launch.files import read_json
from lightning_tas.samplers import SamplerConfig
from lightning_tas.search import Selection
from lightning_tas.search.config import SelectConfig
from lightning_tas.supernets import supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.supernet_module import SupernetModule

SELECT = SelectConfig(margin=0.005, batch_size=4)


def make_module(seed: int = 0) -> SupernetModule:
    torch.manual_seed(seed)
    space = spaces.isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])
    net = supernet(space, num_classes=4, img_size=8, in_chans=1, patch_size=4)
    train = TrainConfig(lr=1e-3, lr_batch=None, warmup_epochs=0)
    return SupernetModule(net, None, train, global_batch=8, seed=0, sampler_config=SamplerConfig("balanced"))


def make_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 1, 8, 8), torch.arange(16) % 4), batch_size=8)


def make_trainer(folder: Path, *callbacks: pl.Callback, **given: Any) -> pl.Trainer:
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
    return pl.Trainer(**{**options, **quiet, **given}, callbacks=list(callbacks), default_root_dir=folder)


@pytest.mark.slow
def test_training_uses_and_validation_reports_exactly_the_candidates(tmp_path):
    path = tmp_path / "selection.json"
    module, callback = make_module(), PreferredSelection(SELECT, seed=0, path=path)
    trained = []
    step = module.architectures
    module.architectures = lambda number: trained.extend(archs := step(number)) or archs
    trainer = make_trainer(tmp_path, callback, max_epochs=60)
    trainer.fit(module, make_loader(), make_loader())
    selection = Selection.from_dict(json.loads(path.read_text()))
    assert len(selection) >= 3
    assert set(trained) == set(selection.archs)
    reported = {key.split("/")[1] for key in trainer.callback_metrics if key.startswith("val/")}
    assert reported == set(selection.labels)


def test_selection_leaves_weights_modes_and_random_state_alone(tmp_path):
    module = make_module()
    before = {name: tensor.clone() for name, tensor in module.net.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    callback = PreferredSelection(SELECT, seed=0)
    callback.setup(make_trainer(tmp_path), module, "fit")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.net.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.net.parameters())
    assert module.net.training


def test_an_existing_selection_is_read_and_not_made_again(tmp_path):
    path = tmp_path / "selection.json"
    PreferredSelection(SELECT, 0, path).setup(make_trainer(tmp_path), make_module(), "fit")
    written = path.read_bytes()
    other = make_module(seed=1)
    callback = PreferredSelection(SELECT, 0, path)
    callback.setup(make_trainer(tmp_path), other, "fit")
    assert path.read_bytes() == written
    assert [c.arch for c in other.candidates] == list(callback.selection.archs)


def test_data_batches_reach_the_selector(tmp_path):
    asked = []

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(number)
        return torch.randn(number, 1, 8, 8), torch.arange(number) % 4

    select = SelectConfig(margin=0.005, batch_size=4, loss="ce", images="data")
    callback = PreferredSelection(select, 0, batch=batch)
    callback.setup(make_trainer(tmp_path), make_module(), "fit")
    assert asked == [4]
    assert callback.selection.settings["loss"] == "ce"


def test_a_checkpoint_of_another_selection_is_refused(tmp_path):
    first = PreferredSelection(SELECT, 0)
    first.setup(make_trainer(tmp_path), make_module(), "fit")
    state = first.state_dict()
    again = PreferredSelection(SELECT, 0)
    again.load_state_dict(state)
    again.setup(make_trainer(tmp_path), make_module(), "fit")  # the same one is welcome
    early, late = PreferredSelection(SELECT, 0), PreferredSelection(SELECT, 0)
    early.load_state_dict(state)
    with pytest.raises(UserError, match="resume"):
        early.setup(make_trainer(tmp_path), make_module(seed=5), "fit")
    late.setup(make_trainer(tmp_path), make_module(seed=5), "fit")
    with pytest.raises(UserError, match="resume"):
        late.load_state_dict(state)


def test_only_fit_selects(tmp_path):
    callback = PreferredSelection(SELECT, 0)
    callback.setup(make_trainer(tmp_path), make_module(), "validate")
    assert callback.selection is None


def test_the_hash_ignores_timing_only():
    record = {"candidates": [1], "timing": {"gradient": 1.0}}
    assert selection_hash(record) == selection_hash({**record, "timing": {}})
    assert selection_hash(record) != selection_hash({**record, "candidates": [2]})


def main(folder: Path) -> None:
    """What each of two processes runs: rank 1 starts from other weights, so its own selection would differ."""
    import os

    module = make_module(seed=int(os.environ.get("LOCAL_RANK", 0)))
    callback = PreferredSelection(SELECT, 0, folder / "selection.json")
    trainer = make_trainer(folder, callback, devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=1)
    trainer.fit(module, make_loader(), make_loader())
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(callback.selection.to_dict()))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_rank_gets_the_selection_of_rank_0(tmp_path):
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second == read_json(tmp_path / "selection.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
