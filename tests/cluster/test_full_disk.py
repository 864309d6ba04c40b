"""A process that cannot write its share of a checkpoint ends all, with one message, and the one before stays whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_tas.launch.checkpoints import newest_whole

from .launched import fit, start

FULL = """
import os, sys, torch
write = torch.save
def full(content, target, *rest, **options):
    if os.environ["RANK"] == "1" and "step=0000004" in str(target):
        raise OSError(28, "No space left on device")
    return write(content, target, *rest, **options)
torch.save = full
from lightning_tas.commands.entry import main
sys.exit(main("fit"))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_zero(processes: Any, tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    study = fit(
        f"output_dir={tmp_path / 'runs'}", "run=full", "phases=[supernet]", "sampler.name=uniform",
        "trainer.strategy=deepspeed_stage_2", "checkpoint.every_n_steps=2", "data.batch_size=16",
    )  # fmt: skip
    job = start(processes, [["python", script, *study[3:]]] * 2)
    assert processes.wait(job, timeout=200, check=False) == [2, 2]
    said = [process.stderr.count("cannot be written (No space left on device)") for process in job]
    assert sum(said) == 1 and not any("Traceback" in process.stderr for process in job)
    folder = tmp_path / "runs" / "quickstart" / "full" / "phases" / "00-supernet" / "checkpoints"
    assert [path.name for path in folder.glob("epoch=*")] == ["epoch=0000-step=0000002.ckpt"]
    assert newest_whole(folder)[1] == 2
