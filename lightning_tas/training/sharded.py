"""DeepSpeed's checkpoint folders, read like a checkpoint file: whole float32 weights, on any machine.

Neither deepspeed nor the processes that wrote a folder are needed, and no code in it runs: besides tensors and plain
values it names a few classes of deepspeed, which are read as nothing. A folder holds ``latest`` (the name of a folder
inside), there one file of module states (ZeRO-3: one of each process) and one file of optimiser states of each process
with its share of the float32 weights.

ZeRO-1 and -2 lay the parameters of each optimiser group end to end, padded, and cut the whole into equal shares.
ZeRO-3 cuts every parameter, padded, into equal shares, which each process lays end to end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tas.errors import UserError
from lightning_tas.launch.files import damage, write_torch
from lightning_tas.supernets import load_checkpoint_file
from lightning_tas.training.entries import EMA, KEY

KEPT = ("epoch", "global_step", "pytorch-lightning_version", "loops", KEY, EMA)
"""What a checkpoint is without the states that only its own processes can go on from."""

_RANK = re.compile(r"zero_pp_rank_(\d+)_")


class _Nothing:
    """Stands for an object of deepspeed that we have no use for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever deepspeed's class takes."""


_UNUSED = [
    (_Nothing, f"deepspeed.{name}")
    for name in (
        "runtime.zero.config.ZeroStageEnum",
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "utils.tensor_fragment.fragment_address",
    )
]


@dataclass(frozen=True)
class Shards:
    """The files of a folder, by process; ZeRO-1 and -2 have one file of module states in all."""

    module: list[Path]
    optimiser: list[Path]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a training checkpoint: a file as it is, a DeepSpeed folder as `content` gives it.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    return content(path) if Path(path).is_dir() else load_checkpoint_file(path)


def is_sharded(path: Path) -> bool:
    """Whether `path` is a finished checkpoint folder of DeepSpeed."""
    return (path / "latest").is_file()


def content(folder: str | Path) -> dict[str, Any]:
    """`KEPT` entries of a checkpoint folder, and ``state_dict``: the live weights, whole, float32, on the CPU.

    Raises:
        UserError: not such a folder, a file of it is missing or broken, or it is of a kind we do not write.
    """
    folder = Path(folder)
    files = shards(folder)
    for path in (*files.module, *files.optimiser):
        if (reason := damage(path)) is not None:
            raise UserError(f"checkpoint: {str(path)!r} is damaged: {reason}")
    modules = [_load(path) for path in files.module]
    optimisers = [_load(path)["optimizer_state_dict"] for path in files.optimiser]
    first = modules[0]
    if first.get("frozen_param_shapes"):
        raise UserError(f"checkpoint: {str(folder)!r} holds frozen parameters, which cannot be read from a folder")
    try:
        if stage(first) == 3:
            weights = _join_parameters(first["param_shapes"], [state["fp32_flat_groups"] for state in optimisers])
        else:
            weights = _cut_groups(
                first["param_shapes"],
                [state["single_partition_of_fp32_groups"] for state in optimisers],
                optimisers[0].get("param_alignment_paddings"),
            )
    except (KeyError, RuntimeError, ValueError) as error:
        raise UserError(f"checkpoint: {str(folder)!r} is laid out in a way that is not known ({error})") from error
    weights |= {name: first["module"][name] for name in first.get("buffer_names") or ()}
    weights |= {name: weights[twin] for name, twin in dict(first.get("shared_params") or {}).items()}
    names = [name for name in first["module"] if name in weights]  # in the module's own order
    return {**{key: first[key] for key in KEPT if key in first}, "state_dict": {name: weights[name] for name in names}}


def consolidate(folder: str | Path, file: str | Path) -> Path:
    """Write the content of a checkpoint folder as one ordinary checkpoint file, which ``weights_only=True`` reads.

    Call it on one process. Training cannot go on from that file, everything else takes it.

    Raises:
        UserError: as `content`, or the file cannot be written.
    """
    # Copies: a tensor that is a part of another would be saved with all of it.
    return write_torch(file, _owned(content(folder)), key="checkpoint")


def shards(folder: Path) -> Shards:
    """The files of a checkpoint folder.

    Raises:
        UserError: not a checkpoint folder, or not all files are there.
    """
    if not is_sharded(folder):
        raise UserError(f"checkpoint: {str(folder)!r} is not a checkpoint folder of DeepSpeed")
    inside = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    found = Shards(_by_rank(inside.glob("*_model_states.pt")), _by_rank(inside.glob("*_optim_states.pt")))
    if not found.module:
        raise UserError(f"checkpoint: {str(folder)!r} lacks its module states")
    first = _load(found.module[0])
    expected = int(first.get("dp_world_size", 0))
    counts = {"module": (len(found.module), expected if stage(first) == 3 else 1)}
    counts["optimiser"] = (len(found.optimiser), expected)
    for what, (there, needed) in counts.items():
        if there != needed:
            raise UserError(f"checkpoint: {str(folder)!r} has {there} files of {what} states, {needed} were written")
    return found


def entries(folder: Path) -> dict[str, Any]:
    """What the first process has written about the module and the run, unchecked."""
    return _load(shards(folder).module[0])


def stage(module_state: Mapping[str, Any]) -> int:
    """The ZeRO stage that wrote a file of module states."""
    return int(module_state.get("ds_config", {}).get("zero_optimization", {}).get("stage", 0))


def _by_rank(paths: Any) -> list[Path]:
    def rank(path: Path) -> int:
        match = _RANK.search(path.name)
        return int(match[1]) if match else 0

    return sorted(paths, key=rank)


def _load(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(list(_UNUSED)):
            # Mapped: most of a file are moments, which nobody reads here. `content` and `flaw` have checked it.
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises many kinds for a broken file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"checkpoint: {str(path)!r} cannot be read ({reason})") from error
    return loaded


def _cut_groups(shapes: Any, parts: list[list[Tensor]], paddings: Any) -> dict[str, Tensor]:
    """ZeRO-1, -2: `shapes` by group and name, `parts` by process and group, `paddings` behind each parameter."""
    weights: dict[str, Tensor] = {}
    for index, group in enumerate(shapes):
        flat = torch.cat([part[index].float() for part in parts])
        behind = paddings[index] if paddings is not None else [0] * len(group)
        start = 0
        for (name, shape), gap in zip(group.items(), behind, strict=True):
            size = prod(shape)
            weights[name] = flat[start : start + size].view(shape)
            start += size + gap
        # What is left is the padding that makes the shares equal: less than a few elements of each.
        if not start <= len(flat) < start + 2 * len(parts) + 1:
            raise ValueError(f"group {index} has {len(flat)} elements, its parameters {start}")
    return weights


def _join_parameters(shapes: Any, parts: list[list[Tensor]]) -> dict[str, Tensor]:
    """ZeRO-3: `shapes` by group and name, `parts` by process, each a list of flat pieces to be read as one."""
    flat = [torch.cat([piece.float() for piece in part]) for part in parts]
    named = [(name, shape) for group in shapes for name, shape in group.items()]
    ends = [0]
    for _, shape in named:
        ends.append(ends[-1] + -(-prod(shape) // len(parts)))
    if any(len(part) != ends[-1] for part in flat):
        raise ValueError(f"shares of {[len(part) for part in flat]} elements, parameters of {ends[-1]}")
    return {
        name: torch.cat([part[start:end] for part in flat])[: prod(shape)].view(shape)
        for (name, shape), (start, end) in zip(named, pairwise(ends), strict=True)
    }


def _owned(value: Any) -> Any:
    """`value` with every tensor a copy of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    return value
