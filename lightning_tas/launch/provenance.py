"""Where a result comes from: library versions, git revision, command, host, checkpoint hash."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lightning_tas
from lightning_tas.supernets.checkpoints import state_hash

__all__ = ["LIBRARIES", "command", "git_revision", "host", "state_hash", "versions"]

LIBRARIES = ("lightning_tas", "torch", "torchvision", "pytorch-lightning", "timm", "torchmetrics", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "checkout" if name == "lightning_tas" else "missing"
    return found


def git_revision() -> str | None:
    """Commit of the checkout that the package runs from (with `-dirty`), None outside a checkout."""
    package = Path(next(iter(lightning_tas.__path__))).resolve()
    try:
        described = subprocess.run(
            ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def command() -> str:
    """The command line of this process, as one would type it again."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def host() -> dict[str, Any]:
    """The machine: it does not decide a result, but explains its timings."""
    return {
        "name": platform.node(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
