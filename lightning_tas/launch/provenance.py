"""Where a result comes from: library versions, git revision, command, host, checkpoint hash."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lightning_tas

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


def state_hash(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes, types and bytes of the tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
