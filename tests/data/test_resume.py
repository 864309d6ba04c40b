"""Stopping at any batch and resuming under a real Trainer repeats the uninterrupted run, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn

from lightning_tas.data import DataConfig, TASDataModule
from lightning_tas.randomness import derive

STEPS = 4  # per epoch, see `data_module`


def data_module(num_workers: int) -> TASDataModule:
    config = DataConfig(
        name="digits",
        batch_size=16,
        train_subset=4 * 16 + 5,
        num_workers=num_workers,
        crop="rrc",
        crop_scale=[0.5, 1.0],
    )
    return TASDataModule(config, seed=3)


class Tiny(pl.LightningModule):
    """A classifier whose dropout is seeded by counters, and that writes down the bytes of every batch."""

    def __init__(self, trace: dict[tuple[int, int], str], seed: int = 3) -> None:
        super().__init__()
        self.trace, self.seed = trace, seed
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(64, 10)
        for p in self.linear.parameters():
            p.data.normal_(generator=generator)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        digest = hashlib.sha256(images.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()
        self.trace[self.current_epoch, batch_idx] = digest
        torch.manual_seed(derive(self.seed, "step", self.current_epoch, batch_idx))
        logits = self.linear(nn.functional.dropout(images.flatten(1), 0.2))
        return nn.functional.cross_entropy(logits, targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.linear(images.flatten(1)), targets, ignore_index=-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    folder: Path,
    num_workers: int,
    ckpt: Path | None = None,
    callbacks: list[Callback] | None = None,
    limits: dict[str, Any] | None = None,
    devices: int = 1,
) -> tuple[dict[tuple[int, int], str], list[Tensor]]:
    trace: dict[tuple[int, int], str] = {}
    module = Tiny(trace)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        callbacks=callbacks,
        **(limits or {"max_epochs": 3}),
    )
    trainer.fit(module, datamodule=data_module(num_workers), ckpt_path=ckpt)
    return trace, [p.detach().clone() for p in module.parameters()]


class SaveEverywhere(Callback):
    """Saves where ModelCheckpoint can: after a batch, after validation, at the end of an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, trainer: pl.Trainer, where: str) -> None:
        trainer.save_checkpoint(self.folder / f"{where}-{trainer.global_step}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, "epoch")


def assert_continues(
    ckpt: Path,
    whole: tuple[dict[tuple[int, int], str], list[Tensor]],
    resumed: tuple[dict[tuple[int, int], str], list[Tensor]],
) -> None:
    step = int(ckpt.stem.split("-")[1])
    expected = {key: value for key, value in whole[0].items() if key[0] * STEPS + key[1] >= step}
    assert resumed[0] == expected, ckpt.name
    for mine, theirs in zip(resumed[1], whole[1], strict=True):
        assert torch.equal(mine, theirs), ckpt.name


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_steps": 11}], ids=["epochs", "steps"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_checkpoint_resumes_bit_for_bit(tmp_path: Path, num_workers: int, limits: dict[str, int]) -> None:
    whole = fit(tmp_path, num_workers=0, callbacks=[SaveEverywhere(tmp_path)], limits=limits)
    assert len(whole[0]) == limits.get("max_steps", 3 * STEPS)
    assert len(set(whole[0].values())) == len(whole[0])
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 15
    assert torch.load(checkpoints[0], weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    if num_workers or "max_steps" in limits:  # fewer, for time: middle, last batch, validation, end of an epoch
        checkpoints = [p for p in checkpoints if p.stem in ("batch-6", "batch-8", "validation-4", "epoch-8")]
        assert len(checkpoints) == 4
    for ckpt in checkpoints:
        assert_continues(ckpt, whole, fit(tmp_path, num_workers, ckpt, limits=limits))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_cut_short_start_afresh(tmp_path: Path, num_workers: int) -> None:
    """`limit_train_batches` leaves workers with prefetched batches behind; the next epoch must not see them."""
    whole, _ = fit(tmp_path, num_workers=0)
    cut, _ = fit(tmp_path, num_workers, limits={"max_epochs": 3, "limit_train_batches": 2})
    assert cut == {key: digest for key, digest in whole.items() if key[1] < 2}


class Borrow(Callback):
    """Uses training images for something else, in the middle and at the end of an epoch, and in validation."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def _borrow(self, trainer: pl.Trainer) -> None:
        loader = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]
        self.seen.add((loader.epoch, len(list(loader))))

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        self._borrow(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        self._borrow(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        self._borrow(trainer)


def test_borrowed_training_images_leave_the_run_alone(tmp_path: Path) -> None:
    borrow = Borrow()
    whole, borrowed = fit(tmp_path, num_workers=0), fit(tmp_path, num_workers=0, callbacks=[borrow])
    assert whole[0] == borrowed[0]
    assert all(torch.equal(a, b) for a, b in zip(whole[1], borrowed[1], strict=True))
    assert borrow.seen == {(0, STEPS)}


class StopDuring(Callback):
    """Raises after a batch was handed out and before it is trained on; saves as `save_on_exception` does."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")

    def on_exception(self, trainer: pl.Trainer, *unused: Any) -> None:
        trainer.save_checkpoint(self.folder / f"exception-{trainer.global_step}.ckpt")


@pytest.mark.parametrize("step", [5, 8])
def test_batch_interrupted_by_an_exception_is_repeated(tmp_path: Path, step: int) -> None:
    whole = fit(tmp_path, num_workers=0)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path, num_workers=0, callbacks=[StopDuring(tmp_path, step)])
    ckpt = tmp_path / f"exception-{step}.ckpt"
    assert_continues(ckpt, whole, fit(tmp_path, 0, ckpt))


class KillAfter(Callback):
    """Saves after every batch; then the process kills itself, without a chance to clean up."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        trainer.save_checkpoint(self.folder / f"killed-{trainer.global_step}.ckpt")
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_script(processes: Any, body: str, folder: Path) -> Any:
    """Run `body` in a process of its own, with this file imported as `resume`."""
    here = Path(__file__)
    code = (
        "import importlib.util, json, pathlib\n"
        f"spec = importlib.util.spec_from_file_location('resume', {str(here)!r})\n"
        "resume = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(resume)\n" + body
    )
    # Lightning starts the other ranks by running the script again.
    script = folder / "script.py"
    script.write_text(code)
    process = processes.command("python", script, cwd=folder, fork=True)
    processes.wait([process], timeout=300, check=False)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_process_resumes_bit_for_bit(processes: Any, tmp_path: Path, num_workers: int) -> None:
    killed = run_script(
        processes,
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        f"resume.fit(folder, {num_workers}, callbacks=[resume.KillAfter(folder, 6)])\n",
        tmp_path,
    )
    assert killed.status == -signal.SIGKILL, killed.report()
    ckpt = tmp_path / "killed-6.ckpt"
    assert_continues(ckpt, fit(tmp_path, 0), fit(tmp_path, num_workers, ckpt))


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(processes: Any, tmp_path: Path) -> None:
    """Each rank repeats its own batches; together they see other images than one rank alone, and equal weights."""
    done = run_script(
        processes,
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "import os\n"
        "for name, workers, ckpt in (('whole', 0, None), ('resumed', 2, folder / 'batch-3.ckpt')):\n"
        "    saving = [resume.SaveEverywhere(folder)] if ckpt is None else []\n"
        "    trace, weights = resume.fit(folder, workers, ckpt, saving, {'max_epochs': 3}, devices=2)\n"
        "    trace = {f'{e}.{b}': v for (e, b), v in trace.items()}\n"
        "    content = {'trace': trace, 'weights': [w.tolist() for w in weights]}\n"
        "    rank = os.environ.get('LOCAL_RANK', '0')\n"
        "    (folder / f'{name}-{rank}.json').write_text(json.dumps(content))\n",
        tmp_path,
    )
    assert done.status == 0, done.report()
    runs = {
        f"{n}-{r}": json.loads((tmp_path / f"{n}-{r}.json").read_text()) for n in ("whole", "resumed") for r in "01"
    }
    assert len({str(run["weights"]) for run in runs.values()}) == 1
    digests: list[str] = []
    for rank in "01":
        whole, resumed = runs[f"whole-{rank}"]["trace"], runs[f"resumed-{rank}"]["trace"]
        assert len(whole) == 6 and resumed == {k: v for k, v in whole.items() if k in ("1.1", "2.0", "2.1")}
        digests += whole.values()
    assert len(set(digests)) == 12
