"""How the processes of a run work together: DDP, or DeepSpeed's ZeRO stages 1, 2, 3, with one stated meaning of
unused parameters.

A supernet step leaves blocks out. `skip` (the references' meaning; one process and DDP): AdamW does not see them.
`zero` (the only one that ZeRO offers): they have a gradient of zero, so moments and weight decay move them.

DeepSpeed works as under Lightning's stock strategy, with these differences:

* Gradient accumulation is Lightning's, so that a step is what it is under DDP: the last batches of an epoch make one
  although they are fewer, and gradients are averaged over the batches once (stock divides twice).
* A checkpoint folder appears whole or not at all.
* On CPU, which the stock strategy refuses, gloo carries it and nothing is compiled: for tests and for trying things.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.accelerators.cuda import CUDAAccelerator
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from lightning_tas.errors import UserError, unknown
from lightning_tas.launch import group
from lightning_tas.launch.files import refusal
from lightning_tas.training.config import TrainConfig

STRATEGIES = ("auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
ZERO_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
_PREFIX = "deepspeed_stage_"
_CPU_BUCKET = 4_000_000
"""Elements of a communication buffer on CPU; DeepSpeed allocates whole buffers, whatever the size of the network."""


def zero_stage(name: str) -> int:
    """The ZeRO stage of a strategy name, 0 for those without DeepSpeed."""
    return int(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else 0


def unused_semantics(train: TrainConfig, strategy: str) -> str:
    """What happens to parameters that a step leaves out: "skip" or "zero".

    Raises:
        UserError: `train.unused` asks for "skip", which ZeRO does not offer.
    """
    if zero_stage(strategy) and train.unused == "skip":
        raise UserError(
            f"train.unused: 'skip' is not possible with trainer.strategy={strategy}: ZeRO gives parameters that a step "
            "leaves out a gradient of zero; valid: zero, null"
        )
    return train.unused or ("zero" if zero_stage(strategy) else "skip")


def check_strategy(
    name: str, train: TrainConfig, accelerator: str, precision: str | int, clip_algorithm: str | None = None
) -> None:
    """Refuse what would fail or train wrongly, with the reason; imports nothing heavy.

    Args:
        name: `trainer.strategy`.
        train: the recipe.
        accelerator: "cpu", "cuda" or "gpu": what "auto" means on this machine.
        precision: `trainer.precision`.
        clip_algorithm: Lightning's `gradient_clip_algorithm`, None for its default.

    Raises:
        UserError: names the key, its value, the reason and what is valid.
    """
    if name not in STRATEGIES:
        raise unknown("trainer.strategy", name, STRATEGIES)
    unused_semantics(train, name)
    stage, precision = zero_stage(name), str(precision)
    if train.memory_lean and precision.startswith("16"):
        raise UserError(
            f"train.memory_lean: not with trainer.precision={precision}: gradients inside a step would not be scaled "
            "and would vanish in float16; valid: bf16-mixed, 32-true"
        )
    if accelerator == "cpu" and precision.startswith("16"):
        raise UserError(f"trainer.precision: {precision} needs a GPU; valid on CPU: 32-true, bf16-mixed")
    if not stage:
        if precision == "16-true":
            raise UserError(
                f"trainer.precision: {precision} with trainer.strategy={name}: without float32 copies of the weights, "
                "which only DeepSpeed keeps, AdamW's second moments vanish in float16 and weights become NaN; valid: "
                "16-mixed, bf16-mixed"
            )
        return
    if precision not in ZERO_PRECISIONS:
        raise unknown("trainer.precision", precision, ZERO_PRECISIONS)
    if clip_algorithm == "value":
        raise UserError("trainer.gradient_clip_algorithm: 'value' is not possible under DeepSpeed; valid: norm")
    if stage == 3:
        _check_stage_3(name, train)


def _check_stage_3(name: str, train: TrainConfig) -> None:
    reasons = {
        "ema": "an average of the weights would see empty shards, not the weights",
        "memory_lean": "its gradients pass by the hooks that reduce and free sharded gradients",
        "compile": "compiled code would bypass the hooks that gather sharded weights",
    }
    for key, reason in reasons.items():
        if getattr(train, key):
            raise UserError(
                f"train.{key}: not possible with trainer.strategy={name}: {reason}; use train.{key}=false or "
                "trainer.strategy=deepspeed_stage_2"
            )


def build_strategy(name: str, processes: int, accelerator: str, find_unused: bool) -> str | Strategy:
    """What `Trainer(strategy=...)` takes for `trainer.strategy`; a DeepSpeed strategy is for one Trainer only.

    Args:
        name: one of `STRATEGIES`.
        processes: number of processes of the run, over all nodes.
        accelerator: "cpu", "cuda" or "gpu": what "auto" means on this machine.
        find_unused: whether a step may leave parameters without a gradient.

    Raises:
        UserError: an unknown name, or DeepSpeed is not installed.
    """
    if name not in STRATEGIES:
        raise unknown("trainer.strategy", name, STRATEGIES)
    stage = zero_stage(name)
    if stage:
        return _deepspeed(stage, accelerator)
    if name == "auto" and processes == 1:
        return "auto"
    return "ddp_find_unused_parameters_true" if find_unused else "ddp"


def _deepspeed(stage: int, accelerator: str) -> Strategy:
    on_cpu = accelerator == "cpu"
    prepare_deepspeed(on_cpu)
    if on_cpu:
        return CPUZeroStrategy(
            stage=stage, reduce_bucket_size=_CPU_BUCKET, allgather_bucket_size=_CPU_BUCKET, logging_level=logging.ERROR
        )
    return ZeroStrategy(stage=stage, logging_level=logging.ERROR)


def prepare_deepspeed(on_cpu: bool) -> None:
    """Import deepspeed, quietly, and bind it to the CPU where that is asked for.

    Raises:
        UserError: it is not installed.
    """
    if on_cpu and "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, at import; found by itself it would be a GPU
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
            from deepspeed.accelerator import get_accelerator, set_accelerator
    except ImportError:
        raise UserError(
            "trainer.strategy: DeepSpeed is not installed (pip install deepspeed); valid without it: auto, ddp"
        ) from None
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning.strategies.deepspeed").setLevel(logging.WARNING)  # each rank says hello
    # DeepSpeed 0.19 on torch 2.14: not ours to change.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated")
    if on_cpu:
        if get_accelerator().device_name() != "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        # Otherwise it would be compiled when the process group starts; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy with DDP's accumulation and with checkpoints that are whole or absent."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: DeepSpeed is told of each batch whether it ends a step, see `training_step`."""
        return False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch; beforehand the engine learns whether Lightning takes a step after it."""
        assert self.lightning_module is not None
        accumulating = self.lightning_module.trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(not accumulating)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning has divided the loss by the number of accumulated batches; the engine must not do it again."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Nothing to block: away from the end of a step, the engine reduces what its stage has to."""
        yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Every rank writes its shards into a hidden neighbour; once all have, rank 0 renames it. Collective.

        Raises:
            UserError: this rank cannot write its shards. The others have been told: they may wait for this one inside
                of DeepSpeed, where nothing can be agreed on.
        """
        target = Path(self.broadcast(filepath))
        try:
            self._write(checkpoint, target, storage_options)
        except (OSError, RuntimeError) as error:  # torch's writer turns what the system said into a RuntimeError
            if group.is_lost(error):
                raise
            said = refusal(error) or next(iter(str(error).splitlines()), type(error).__name__)
            refused = UserError(f"checkpoint: {str(target)!r} cannot be written ({said})")
            raise group.settle(refused) from error

    def _write(self, checkpoint: dict[str, Any], target: Path, storage_options: Any) -> None:
        hidden = target.with_name(f".{target.name}.partial")
        if not target.parent.is_dir():  # which DeepSpeed would make again
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
        if self.is_global_zero:
            shutil.rmtree(hidden, ignore_errors=True)  # of a run that was killed
        self.barrier()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="When saving the DeepSpeed Stage 3 checkpoint")
            super().save_checkpoint(checkpoint, hidden, storage_options)
        self.barrier()
        if self.is_global_zero:
            replace_folder(hidden, target)
        self.barrier()


class CPUZeroStrategy(ZeroStrategy):
    """The same on CPU, by gloo; on CUDA it is `ZeroStrategy`."""

    @property
    def root_device(self) -> torch.device:
        """The CPU with an index, because the engine asks for one; tensors put there lie on "cpu"."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """As DDP sets its environment up."""
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_environment()
        else:
            DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Join, or take over, a process group."""
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
            return
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def replace_folder(source: Path, target: Path) -> None:
    """Move a finished folder to `target`, durably; an older one there goes only after the new one is in its place."""
    for path in [*source.rglob("*"), source]:
        _sync(path)
    older = target.with_name(f".{target.name}.older")
    if target.is_dir():
        shutil.rmtree(older, ignore_errors=True)
        os.rename(target, older)
    elif target.exists():
        target.unlink()
    os.rename(source, target)
    _sync(target.parent)
    shutil.rmtree(older, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def gathered(net: nn.Module) -> Iterator[None]:
    """Inside, the parameters of `net` are whole on every rank, also under ZeRO-3. Collective."""
    sharded = [parameter for parameter in net.parameters() if hasattr(parameter, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with torch.no_grad(), deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
        yield
