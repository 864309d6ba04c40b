"""The processes of `train_step.py`: train a supernet by its recipe, and in between time what it is compared with."""

from __future__ import annotations

import json
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lightning_tas.architecture import Architecture
    from lightning_tas.commands.config import Config

CLASSES = 1000
IMAGES = 100_000  # so many that no epoch ends


@dataclass(frozen=True)
class Case:
    """One thing to measure; the sampler "largest" trains all that the supernet allocates, "uniform" is the recipe's."""

    title: str
    size: str
    processes: int = 1
    strategy: str = "auto"
    sampler: str = "largest"
    batch: int = 8
    device: str = "cpu"
    precision: str = "32-true"
    rounds: int = 5
    block: int = 2
    workers: int = 0
    side: int = 224
    rivals: bool = True
    extra: tuple[str, ...] = ()

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Case:
        """The inverse of `dataclasses.asdict`, from JSON."""
        return cls(**{**record, "extra": tuple(record["extra"])})

    def arguments(self) -> list[str]:
        """The arguments of `fit` that train this case."""
        given = {
            "recipe": f"autoformer_{self.size}",
            "data.name": "benchmark_images",
            "data.img_size": self.side,
            "data.batch_size": self.batch,
            "data.num_workers": self.workers,
            "data.search_val": CLASSES,
            "sampler.name": self.sampler,
            "trainer.accelerator": self.device,
            "trainer.devices": self.processes,
            "trainer.strategy": self.strategy,
            "trainer.precision": self.precision,
            "trainer.limit_val_batches": 0,
            "checkpoint.every_n_epochs": 1000,
        }
        return [*(f"{key}={value}" for key, value in given.items()), *self.extra]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def work(case: Case, output: Path) -> None:
    """Measure `case` in this process, one of `case.processes`; rank 0 writes the figures to `output`."""
    import torch

    from lightning_tas.commands import build
    from lightning_tas.commands.compose import config_from
    from lightning_tas.launch.run_folder import RunFolder
    from lightning_tas.launch.trainer import build_trainer

    register_all()
    config = config_from("fit", case.arguments())
    torch.set_float32_matmul_precision(config.trainer.float32_matmul_precision)
    data = build.data(config)
    data.load()
    module = build.supernet_module(config, data)
    with tempfile.TemporaryDirectory() as folder:
        rounds, clock = make_rounds(case, config), make_clock()
        trainer = build_trainer(
            config, RunFolder(Path(folder)), 0, "supernet", [rounds], find_unused=case.sampler == "uniform"
        )
        trainer.profiler = clock  # type: ignore[attr-defined]
        rounds.clock = clock
        before = resident()
        trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        peak = peak_memory(case.device) - (before if case.device == "cpu" else 0)
        steps = sum(rounds.seconds["step"]) * case.block
        shares = {name: clock.seconds[name] / steps for name in ("loader", "optimiser")}
        found = {"seconds": rounds.seconds, "shares": shares, "memory": peak / 2**30}
        output.write_text(json.dumps(found))


def register_all() -> None:
    """Make the sampler "largest" and the data set "benchmark_images" known."""
    from lightning_tas.data.arrays import SyntheticImages
    from lightning_tas.data.config import DataConfig, size_pair
    from lightning_tas.data.registry import ImageData
    from lightning_tas.data.registry import register as register_data
    from lightning_tas.samplers import Sampler, Source, preferred
    from lightning_tas.samplers import register as register_sampler

    @register_data("benchmark_images")
    def images(config: DataConfig) -> ImageData:
        size = size_pair(config.img_size)
        parts = [SyntheticImages(size, 3, CLASSES, count, "benchmark") for count in (IMAGES, CLASSES)]
        return ImageData(parts[0], parts[1], [str(index) for index in range(CLASSES)], size)

    @register_sampler("largest")
    def largest(config: Any, source: Source, seed: int) -> Sampler:
        assert source.space is not None
        return preferred([allocated(source.space.allocated)], seed)


def allocated(sizes: Mapping[str, Any]) -> Architecture:
    """The network of everything that a supernet allocates: wider than any of its space, but with an exact timm twin."""
    from lightning_tas.architecture import Architecture

    block = {"num_heads": sizes["num_heads"], "mlp_ratio": sizes["mlp_ratio"]}
    stage = {"embed_dim": sizes["embed_dim"], "blocks": [block] * sizes["depth"]}
    return Architecture.from_dict({"family": "autoformer", "stages": [stage]})


def timm_twin(sizes: Mapping[str, Any], config: Config) -> torch.nn.Module:
    """timm's plain ViT of the same sizes."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.data.img_size, patch_size=config.model.patch_size, embed_dim=sizes["embed_dim"],
        depth=sizes["depth"], num_heads=sizes["num_heads"], mlp_ratio=sizes["mlp_ratio"], num_classes=CLASSES,
        drop_path_rate=config.model.drop_path_rate, global_pool="avg", fc_norm=False,
    )  # fmt: skip


def peak_memory(device: str) -> int:
    """Most bytes held at once: by torch on a GPU, by this process elsewhere."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make_clock() -> Any:
    """A Lightning profiler that adds up what the Trainer spends on its loader and on the optimiser (host time)."""
    from pytorch_lightning.profilers import Profiler

    class Clock(Profiler):
        def __init__(self) -> None:
            super().__init__()
            self.running = False
            self.seconds = {"loader": 0.0, "optimiser": 0.0}
            self._began: dict[str, float] = {}

        def start(self, action_name: str) -> None:
            self._began[action_name] = time.perf_counter()

        def stop(self, action_name: str) -> None:
            taken = time.perf_counter() - self._began.pop(action_name, time.perf_counter())
            owner, _, action = action_name.rpartition(".")
            if not self.running:
                return
            if action == "train_dataloader_next":
                self.seconds["loader"] += taken
            elif action == "optimizer_step" and owner.startswith("[LightningModule]"):
                self.seconds["optimiser"] += taken  # with the closure inside:
            elif action in ("training_step", "backward") and owner.startswith("[Strategy]"):
                self.seconds["optimiser"] -= taken

    return Clock()


def make_rounds(case: Case, config: Config) -> Any:
    """The callback that times blocks of the Trainer's steps and, between them, the same number of the rivals'."""
    import torch
    from pytorch_lightning import Callback, LightningModule, Trainer

    def wait() -> None:
        if case.device == "cuda":
            torch.cuda.synchronize()

    class Rounds(Callback):
        """One round: a step that fills queues, `block` steps on the clock, then each rival `block` times."""

        clock: Any

        def __init__(self) -> None:
            self.seconds: dict[str, list[float]] = {"step": []}
            self.rivals: dict[str, Callable[[int], None]] = {}
            self._steps, self._round, self._began = 0, -1, 0.0

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if case.rivals:
                self.rivals = make_rivals(case, config, pl_module)

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            self._steps += 1
            if self._steps == 1:
                wait()
                self._began, self.clock.running = time.perf_counter(), self._round >= 0
            elif self._steps > case.block:
                wait()
                self._note("step", time.perf_counter() - self._began)
                self.clock.running = False
                self._race(trainer.global_step)
                self._steps, self._round = 0, self._round + 1
                if self._round == case.rounds:
                    trainer.should_stop = True

        def _race(self, step: int) -> None:
            for name, run in self.rivals.items():
                began = time.perf_counter()
                for index in range(case.block):
                    run(step - case.block + index)
                wait()
                self._note(name, time.perf_counter() - began)

        def _note(self, name: str, seconds: float) -> None:
            if self._round >= 0:  # the one before warms up
                self.seconds.setdefault(name, []).append(seconds / case.block)

    return Rounds()


def make_rivals(case: Case, config: Config, module: Any) -> dict[str, Callable[[int], None]]:
    """Forward, loss and backward of the same sub-networks and of timm's twin, and timm's with AdamW; by step."""
    import torch
    import torch.nn.functional as F

    from lightning_tas.supernets import supernet

    device = module.device
    images = torch.randn(case.batch, 3, case.side, case.side, device=device)
    targets = torch.randn(case.batch, CLASSES, device=device).softmax(-1)
    net = supernet(module.net.space, **module.net.options).to(device).train()
    twin = timm_twin(module.net.allocated, config).to(device).train()
    optimiser = torch.optim.AdamW(twin.parameters(), lr=1e-4, weight_decay=0.05, fused=True)

    def precision() -> AbstractContextManager[object]:
        mixed = case.precision == "bf16-mixed"
        return torch.autocast(case.device, torch.bfloat16) if mixed else nullcontext()

    def bare(model: torch.nn.Module, *arch: Any) -> None:
        model.zero_grad()
        with precision():
            logits = model(images, *arch)
        F.cross_entropy(logits.float(), targets).backward()

    def ours(step: int) -> None:
        for arch in module.architectures(step):
            bare(net, arch)

    def timm_loop(step: int) -> None:
        bare(twin)
        optimiser.step()

    return {"model": ours, "timm": lambda step: bare(twin), "timm loop": timm_loop}
