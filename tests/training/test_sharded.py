"""DeepSpeed's checkpoint folders: whole weights, without deepspeed, without running what is in them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tas.commands.config import Config
from lightning_tas.commands.trained import load
from lightning_tas.errors import UserError
from lightning_tas.launch.checkpoints import newest_whole
from lightning_tas.launch.results import find_checkpoint
from lightning_tas.training.checkpoint import initialise, load_supernet
from lightning_tas.training.config import TrainConfig
from lightning_tas.training.sharded import consolidate, content, entries, read_checkpoint

Make = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
RANKS = 3


def write(folder: Path, state: dict[str, torch.Tensor], stage: int, client: dict[str, Any], gap: int = 0) -> Path:
    """A folder laid out as DeepSpeed does it, by another way than the reading: element by element, per process.

    Two optimiser groups; ZeRO-1, -2: `gap` elements of padding behind every parameter.
    """
    groups = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    flat: list[list[list[float]]] = [[] for _ in range(RANKS)]  # by rank and group
    paddings = [[gap] * len(group) for group in groups]
    for group in groups:
        pieces: list[list[float]] = [[] for _ in range(RANKS)]
        line: list[float] = []
        for value in group.values():
            numbers = value.flatten().tolist()
            line += numbers + [9.0] * gap
            share = -(-len(numbers) // RANKS)
            padded = numbers + [9.0] * (share * RANKS - len(numbers))
            for rank in range(RANKS):
                pieces[rank] += padded[rank * share : (rank + 1) * share]
        if stage < 3:
            line += [9.0] * (-len(line) % (2 * RANKS))
            share = len(line) // RANKS
            pieces = [line[rank * share : (rank + 1) * share] for rank in range(RANKS)]
        for rank in range(RANKS):
            flat[rank].append(pieces[rank])
    inside = folder / "checkpoint"
    inside.mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    module = {
        "module": {name: value if stage < 3 else torch.empty(0) for name, value in state.items()},
        "param_shapes": [{name: value.shape for name, value in group.items()} for group in groups],
        "buffer_names": [], "shared_params": {}, "frozen_param_shapes": None, "dp_world_size": RANKS,
        "ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0", **client,
    }  # fmt: skip
    for rank in range(RANKS if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(module, inside / f"{name}_model_states.pt")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(RANKS):
        own: dict[str, Any] = {key: [torch.tensor(piece) for piece in flat[rank]]}
        if stage < 3:
            own["param_alignment_paddings"] = paddings
        torch.save({"optimizer_state_dict": own}, inside / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@pytest.fixture
def file(tmp_path: Path, make_module: Make, make_trainer: Make, make_loader: Make) -> Path:
    """An ordinary checkpoint of a supernet with an average."""
    module = make_module(TrainConfig(lr=1e-2, lr_batch=None, warmup_epochs=0, ema=True, ema_decay=0.5))
    trainer = make_trainer(max_epochs=1, callbacks=module.callbacks())
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"


def same(a: Any, b: Any) -> None:
    """Equal state dicts, names in the same order."""
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(("stage", "gap"), [(1, 0), (2, 3), (3, 0)])
def test_a_folder_reads_like_the_file(file: Path, tmp_path: Path, make_net: Make, stage: int, gap: int) -> None:
    want = torch.load(file, weights_only=True)
    client = {key: want[key] for key in ("epoch", "global_step", "lightning_tas", "ema_state")}
    name = "epoch=0000-step=0000004.ckpt"
    folder = write(tmp_path / "phases/00-supernet/checkpoints" / name, want["state_dict"], stage, client, gap)
    got = read_checkpoint(folder)
    same(got["state_dict"], want["state_dict"])
    same(got["ema_state"]["average"], want["ema_state"]["average"])
    assert (got["global_step"], got["epoch"], entries(folder)["global_step"]) == (4, 1, 4)
    for weights in ("live", "ema"):
        one, two = load_supernet(folder, weights), load_supernet(file, weights)  # type: ignore[arg-type]
        same(one.net.state_dict(), two.net.state_dict())
    # What a user gives: the folder of the checkpoint, or of its run.
    for given in (folder, tmp_path):
        assert find_checkpoint(given) == folder
        trained = load(Config(ckpt=str(given)))
        same(trained.net.state_dict(), load_supernet(file).net.state_dict())
        assert trained.weights == "ema" and trained.checkpoint == folder
    net = make_net(seed=5)
    initialise(net, folder)
    same(net.state_dict(), load_supernet(file).net.state_dict())


def test_one_file_is_made_of_it_that_holds_no_more_than_it_must(file: Path, tmp_path: Path) -> None:
    want = torch.load(file, weights_only=True)
    client = {key: want[key] for key in ("epoch", "global_step", "lightning_tas", "ema_state")}
    folder = write(tmp_path / "folder.ckpt", want["state_dict"], 2, client)
    made = consolidate(folder, tmp_path / "final.ckpt")
    same(torch.load(made, weights_only=True)["state_dict"], want["state_dict"])
    assert load_supernet(made).ema and made.stat().st_size < file.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.ckpt", "final.ckpt", "folder.ckpt"]
    with pytest.raises(UserError, match="cannot be written"):
        consolidate(folder, tmp_path / "missing" / "final.ckpt")


def test_folders_that_are_not_whole(file: Path, tmp_path: Path) -> None:
    want = torch.load(file, weights_only=True)
    client = {key: want[key] for key in ("epoch", "global_step", "lightning_tas")}
    older, newer = "epoch=0000-step=0000002.ckpt", "epoch=0000-step=0000004.ckpt"
    for stage in (2, 3):
        place = tmp_path / f"stage{stage}"
        write(place / older, want["state_dict"], stage, {**client, "global_step": 2})
        folder = write(place / newer, want["state_dict"], stage, client)
        assert newest_whole(place) == (folder, 4)
        shard = folder / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        whole = shard.read_bytes()
        middle = len(whole) // 2
        for broken in (None, b"", whole[:middle], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
            shard.unlink() if broken is None else shard.write_bytes(broken)
            with pytest.warns(UserWarning, match="step=0000004.ckpt is broken and left out"):
                assert newest_whole(place) == (place / older, 2)
        shard.unlink()
        with pytest.raises(UserError, match="2 files of optimiser states, 3 were written"):
            content(folder)
        (folder / "latest").unlink()
        with pytest.warns(UserWarning, match="broken"):
            assert newest_whole(place) == (place / older, 2)
        with pytest.raises(UserError, match="is not a checkpoint folder of DeepSpeed"):
            content(folder)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_code_in_a_folder_is_not_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    want = torch.load(file, weights_only=True)
    client = {key: want[key] for key in ("epoch", "global_step", "lightning_tas")}
    folder = write(tmp_path / "folder.ckpt", want["state_dict"], 2, {**client, "extra": Evil()})
    pickle.loads(pickle.dumps(Evil()))
    Path("evil").unlink()  # it works where pickle may do what it likes
    with pytest.raises(UserError, match="cannot be read"):
        content(folder)
    assert not Path("evil").exists()


# --- real folders -----------------------------------------------------------------------------------------------------


def shard(folder: str, stages: list[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Train with real DeepSpeed on two processes; the live weights at the end by stage, gathered by it."""
    import pytorch_lightning as pl

    from lightning_tas import spaces
    from lightning_tas.commands.config import CheckpointConfig
    from lightning_tas.data import TASDataModule
    from lightning_tas.data.config import DataConfig
    from lightning_tas.launch.checkpoints import RunCheckpoints
    from lightning_tas.launch.strategies import build_strategy, gathered
    from lightning_tas.samplers import SamplerConfig
    from lightning_tas.supernets import supernet
    from lightning_tas.training.supernet_module import SupernetModule

    class Keep(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
            with gathered(module):
                kept[stage] = {name: value.detach().clone() for name, value in module.state_dict().items()}

    space = spaces.isotropic("mini", embed_dim=[16], depth=[1, 2], num_heads=[2], mlp_ratio=[1, 2])
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for stage in stages:
        torch.manual_seed(0)
        net = supernet(space, num_classes=10, img_size=8, in_chans=1, patch_size=4)
        train = TrainConfig(lr=1e-2, lr_batch=None, warmup_epochs=0, ema=stage < 3)
        module = SupernetModule(net, None, train, 16, seed=3, sampler_config=SamplerConfig("sandwich"))
        module.unused = "zero"
        saver = RunCheckpoints(Path(folder) / str(stage), CheckpointConfig())
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=build_strategy(f"deepspeed_stage_{stage}", 2, "cpu", True),
            max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[*module.callbacks(), Keep(), saver],
        )  # fmt: skip
        trainer.fit(module, datamodule=TASDataModule(DataConfig(batch_size=8, train_subset=48, search_val=16), seed=1))
    return kept


@pytest.mark.slow
def test_what_deepspeed_writes_is_read_without_it(processes: Any, tmp_path: Path) -> None:
    want = processes.run(shard, 2, str(tmp_path), [1, 2, 3], timeout=240)[0]
    code = (
        "import sys, torch; sys.modules['deepspeed'] = None\n"
        "from lightning_tas.launch.checkpoints import newest_whole\n"
        "from lightning_tas.training.sharded import consolidate\n"
        "from lightning_tas.training.checkpoint import load_supernet\n"
        "from pathlib import Path\n"
        "for stage in '123':\n"
        "    newest, step = newest_whole(Path(stage))\n"
        "    consolidate(newest, f'{stage}.ckpt')\n"
        "    print(step, load_supernet(newest).weights)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["3 ema", "3 ema", "3 live"], done.stderr
    for stage, live in want.items():
        same(torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)["state_dict"], live)
