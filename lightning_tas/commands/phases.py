"""The phases of a study: select, supernet, search, measure, retrain. Each is one `Trainer.fit` or a plain function.

A phase takes the `Context` of the run and returns its outputs: JSON values that `study.json` keeps for later phases,
paths relative to the run folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_tas.analysis.plots import accuracy_over_params, allocation_per_layer, save_figure
from lightning_tas.analysis.tables import text_table
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks.preferred_selection import PreferredSelection, make_selection
from lightning_tas.callbacks.proxy_scoring import ProxyScoring
from lightning_tas.commands import build, per_phase, searching, trained
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.commands.facts import facts
from lightning_tas.costs import cost
from lightning_tas.data import TASDataModule
from lightning_tas.errors import Stopped, UserError
from lightning_tas.evaluator import Accuracy, evaluate
from lightning_tas.launch import group, provenance
from lightning_tas.launch.agreement import Agreement
from lightning_tas.launch.checkpoints import clean, hand_on, handed_on, newest_whole, of_step
from lightning_tas.launch.files import write_json
from lightning_tas.launch.loggers import RunLoggers
from lightning_tas.launch.results import Specialised, find_checkpoint, read_selection, write_result
from lightning_tas.launch.run_folder import RunFolder, global_rank
from lightning_tas.launch.study import Study, phase_labels
from lightning_tas.launch.trainer import FINAL, build_trainer, start_processes
from lightning_tas.search import Selection
from lightning_tas.training.checkpoint import LoadedSupernet, load_network, load_supernet
from lightning_tas.training.module import DIVERGED, ClassifierModule
from lightning_tas.training.supernet_module import SupernetModule

Outputs = dict[str, Any]
# Whose accuracies the picture of a phase shows.
WEIGHTS = {"measure": "inherited weights", "retrain": "trained alone"}


@dataclass
class Context:
    """What every phase of a run sees; `config`, `label` and `data` are those of phase `index`."""

    recipe: Config
    folder: RunFolder
    study: Study
    index: int = 0
    started: float = field(default_factory=time.monotonic)
    data_module: TASDataModule | None = None
    loggers: RunLoggers = field(init=False)

    def __post_init__(self) -> None:
        self.loggers = RunLoggers(self.recipe, self.folder)

    @property
    def label(self) -> str:
        """What the phase is called in this run: `supernet`, `supernet-2`."""
        return phase_labels(self.recipe.phases)[self.index]

    @property
    def config(self) -> Config:
        """The settings of the phase, starting from the checkpoint of an earlier one where they name that."""
        config = per_phase.configs(self.recipe)[self.label]
        outputs = self.study.outputs_of(config.train.from_checkpoint)
        if "checkpoint" not in outputs:
            return config
        start = str(self.folder.path / outputs["checkpoint"])
        # `source` and `weights` are of files that the user names.
        return replace(config, source=None, weights="auto", train=replace(config.train, from_checkpoint=start))

    @property
    def data(self) -> TASDataModule:
        """The data module, made once for all phases in a row that have the same data."""
        self.data_module = build.data(self.config, self.data_module)
        return self.data_module

    @property
    def main(self) -> bool:
        """True in the process that writes and prints."""
        return global_rank() == 0


def select(context: Context) -> Outputs:
    """PreNAS selection on the freshly initialised supernet: `selection.json` and the allocation picture."""
    path = context.folder.selection
    if context.main:
        config = context.config
        net = build.supernet(config, context.data).to(build.device(config))
        selection = make_selection(net, config.select, config.seed, context.data.selection_batch)
        record = selection.to_dict()
        write_json(path, record)
        picture = context.folder.path / "allocation.png"
        save_figure(allocation_per_layer(selection.labels, selection.archs), picture)
        context.loggers.log_selection(record, picture)
        say(selection_table(selection))
    return {"selection": path.name}


def selection_table(selection: Selection) -> str:
    """The preferred architectures as text, with the bins that stayed empty."""
    rows = [
        [label, c.arch.depth, c.arch.embed_dim, f"{c.params / 1e6:.3f}", f"{c.macs / 1e9:.4f}", f"{c.score:.6g}"]
        for label, c in zip(selection.labels, selection.candidates, strict=True)
    ]
    table = text_table(["network", "depth", "embed_dim", "params [M]", "MACs [G]", "score"], rows)
    empty = ", ".join(f"{edge:g}" for edge in selection.empty_bins)
    return table + (f"\nempty bins (upper edge, {selection.unit}): {empty}" if empty else "")


def supernet(context: Context) -> Outputs:
    """Train the supernet on the sub-networks that the sampler gives, validating them on the held-out split."""
    config = context.config
    callbacks: list[Callback] = []
    selection = None
    if "select" in config.phases:
        callbacks.append(
            PreferredSelection(config.select, config.seed, context.folder.selection, context.data.selection_batch)
        )
        selection = read_selection(context.folder.selection)
    if config.scoring.proxies:
        callbacks.append(ProxyScoring(**asdict(config.scoring), seed=config.seed, folder=context.folder.path))
    if searching.inside_fit(config):
        callbacks.append(searching.callback(context))
    module = build.supernet_module(config, context.data, selection)
    searching.check_images(config, context.data, module.trained_on)
    say(f"{context.label}: training {module.trained}")
    trainer = _fit(context, module, callbacks)
    return _checkpoint_outputs(context, trainer)


def retrain(context: Context) -> Outputs:
    """Train one architecture on its own, from scratch or from inherited weights, and measure it on the test set."""
    config = context.config
    label, arch = build.one_architecture(config, context.study, context.folder)
    module = build.retrain_module(config, context.data, arch)
    trainer = _fit(context, module)
    outputs = _checkpoint_outputs(context, trainer)
    loaded, began = load_network(context.folder.path / outputs["checkpoint"]), time.monotonic()
    accuracies = _measure(context, loaded.net, {label: None})
    networks = _specialised(context, loaded.net, {label: arch}, accuracies, {})
    seconds = time.monotonic() - began
    _report(context, networks, {**outputs, "ema": loaded.ema}, loaded.net.state_dict(), seconds)
    return outputs


def measure(context: Context) -> Outputs:
    """Accuracy of the specialised networks with inherited weights on the test set: `result.json` and its picture."""
    outputs = context.study.outputs("supernet")
    path = _supernet_checkpoint(context, outputs)
    start_processes(context.config.trainer)
    loaded = load_supernet(path) if "checkpoint" in outputs else trained.supernet(context.config)
    net, began = trained.fitted(loaded.net, context.data, path, loaded.class_names), time.monotonic()
    archs, scores = _measured_architectures(context, loaded)
    accuracies = _measure(context, net, dict(archs))
    networks = _specialised(context, net, archs, accuracies, scores)
    said = {"ema": loaded.ema, "trained": loaded.trained.to_dict() if loaded.trained is not None else None}
    _report(context, networks, {**outputs, **said}, net.state_dict(), time.monotonic() - began)
    tell_trained(loaded, archs)
    return {"result": context.folder.result.name}


PHASES: dict[str, Callable[[Context], Outputs]] = {
    "select": select,
    "supernet": supernet,
    "search": searching.search,
    "measure": measure,
    "retrain": retrain,
}


def _fit(context: Context, module: ClassifierModule, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Run `Trainer.fit` for this phase, continuing its last checkpoint if there is one."""
    config, phase = context.config, context.label
    # Without a checkpoint the phase starts again at step 0, whatever it had logged.
    resumed, step = group.first(lambda: newest_whole(context.folder.checkpoints(context.index, phase)))
    say(f"{phase}: {facts(config, context.data)}")
    if resumed is not None:
        say(f"{phase}: continuing {resumed} (step {step})")
    averaging = module.callbacks()
    trainer = build_trainer(
        config,
        context.folder,
        context.index,
        phase,
        [
            *callbacks,
            Agreement({"configuration": str(context.study.record["config_hash"]), "checkpoint": str(resumed)}),
            *averaging,
        ],
        step,
        context.loggers,
        find_unused=_may_leave_unused(module),
    )
    with _matmul_precision(config.trainer.float32_matmul_precision):
        try:
            trainer.fit(module, datamodule=context.data, ckpt_path=str(resumed) if resumed else None, weights_only=True)
        except SIGTERMException:
            raise  # saved and stopped by `RunCheckpoints`; to Lightning every exception is an interruption
        except SystemExit:
            _if_stopped(trainer)
            raise
    _if_stopped(trainer)
    if module.untrained is not None:
        raise Stopped(f"{phase}: {module.untrained}", DIVERGED)
    return trainer


def _may_leave_unused(module: ClassifierModule) -> bool:
    """Whether a step may leave parameters out: not a network alone, nor steps that all run every block there is.

    A space may allow no network that is deepest in every stage: then the largest leaves out some blocks, too.
    """
    if not isinstance(module, SupernetModule):
        return False
    sampler = module.sampler
    covers = getattr(sampler, "covers_all_parameters", False)
    return not (covers and max(arch.depths for arch in sampler(0)) == module.net.depths)


@contextlib.contextmanager
def _matmul_precision(asked: str) -> Iterator[None]:
    """Train with TF32 or without; selection and measuring compute in full float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _if_stopped(trainer: Trainer) -> None:
    """Raise what stopped `trainer`: Lightning turns Ctrl-C into an exit, and a late SIGTERM into nothing at all."""
    if trainer.received_sigterm:
        raise SIGTERMException
    if trainer.interrupted:
        raise KeyboardInterrupt


def _checkpoint_outputs(context: Context, trainer: Trainer) -> Outputs:
    """Write what the phase hands on, as one ordinary file also where DeepSpeed keeps shards."""
    folder = context.folder.checkpoints(context.index, context.label)
    path = folder / FINAL
    # The last epoch's, not a new one: Lightning's progress in that would tell whether the run was resumed there.
    last = trainer.strategy.broadcast(of_step(folder, trainer.global_step))
    assert last is not None, "the end of training is saved"
    if context.main:
        hand_on(last, path)
        clean(folder)
    trainer.strategy.barrier()
    return {
        "checkpoint": str(path.relative_to(context.folder.path)),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "training": facts(context.config, context.data).to_dict(),
    }


def _supernet_checkpoint(context: Context, outputs: Mapping[str, Any]) -> Path:
    if "checkpoint" in outputs:
        return handed_on(context.folder.path / outputs["checkpoint"])
    if context.config.ckpt is None:
        raise UserError("ckpt: the phase 'measure' needs a trained supernet; add the phase 'supernet' or give ckpt=")
    return find_checkpoint(context.config.ckpt, phase="supernet")


def _measured_architectures(
    context: Context, loaded: Any
) -> tuple[dict[str, Architecture], dict[str, tuple[float | None, float | None]]]:
    """Label to architecture, and label to (score, bin): what a search found, then every candidate, else smallest,
    middle, largest.
    """
    found = searching.winners(context)
    if context.folder.selection.exists():
        selection = read_selection(context.folder.selection)
        named = dict(zip(selection.labels, selection.candidates, strict=True))
        scores: dict[str, tuple[float | None, float | None]] = {k: (c.score, c.bin) for k, c in named.items()}
        return {**found, **{k: c.arch for k, c in named.items()}}, scores
    return {**found, **dict(loaded.report)}, {}


def _measure(context: Context, net: torch.nn.Module, archs: Mapping[str, Architecture | None]) -> dict[str, Accuracy]:
    device = build.device(context.config)
    loader = context.data.test_dataloader()
    found = evaluate(net, list(archs.values()), loader, device=device, progress=context.main)
    return dict(zip(archs, found, strict=True))


def _specialised(
    context: Context,
    net: torch.nn.Module,
    archs: Mapping[str, Architecture],
    accuracies: Mapping[str, Accuracy],
    scores: Mapping[str, tuple[float | None, float | None]],
) -> list[Specialised]:
    networks = []
    for label, arch in archs.items():
        price = cost(arch, net)
        score, edge = scores.get(label, (None, None))
        metrics = asdict(accuracies[label])
        networks.append(Specialised(label, arch, int(price.params), int(price.macs), metrics, score, edge))
    return networks


def _report(
    context: Context, networks: list[Specialised], outputs: Outputs, state: Mapping[str, torch.Tensor], seconds: float
) -> None:
    """Write `result.json` and the accuracy picture, print the table of specialised networks.

    The phase keeps a `result.json` of its own: that of the run is of the last phase that measures.
    """
    if not context.main:
        return
    config, folder = context.config, context.folder
    record = write_result(
        folder.result,
        networks,
        recipe=config.recipe,
        seed=config.seed,
        data={
            "name": config.data.name,
            "split": "test",
            "num_classes": context.data.num_classes,
            "class_names": context.data.known_names,
        },
        limits=_limits(config, context),
        steps=outputs.get("steps"),
        epochs=outputs.get("epochs"),
        checkpoint=outputs.get("checkpoint"),
        checkpoint_sha256=provenance.state_hash(state),
        ema=bool(outputs.get("ema", False)),
        versions=provenance.versions(),
        git=provenance.git_revision(),
        training=outputs.get("training"),
        trained=outputs.get("trained"),
        command=provenance.command(),
        run=folder.path.name,
        host=provenance.host(),
        timing={"measure_seconds": seconds, "run_seconds": time.monotonic() - context.started},
    )
    folder.make_phase(context.index, context.label)
    write_json(folder.phase(context.index, context.label) / folder.result.name, record)
    labels = [network.label for network in networks]
    top1 = [network.metrics["top1"] for network in networks]
    params, samples = [network.params for network in networks], int(networks[0].metrics["samples"])
    figure = accuracy_over_params(labels, params, {WEIGHTS[per_phase.kind(context.label)]: top1}, samples)
    picture = folder.path / "accuracy.png"
    save_figure(figure, picture)
    context.loggers.log_result(record, picture)
    say(result_table(networks))


def _limits(config: Config, context: Context) -> dict[str, Any]:
    """The limits of what chose the networks."""
    if config.search.strategy is not None:
        return searching.found_limits(context)
    return {"low": config.select.low, "high": config.select.high, "unit": config.select.unit}


def tell_trained(loaded: LoadedSupernet, archs: Mapping[str, Architecture]) -> None:
    """Say below a table of `archs` what the supernet was trained on, and warn where that is something else."""
    if loaded.trained is None:  # a checkpoint of an earlier version
        return
    say(f"trained: {loaded.trained}")
    warning = loaded.trained.warning(archs, [candidate.arch for candidate in loaded.candidates])
    if warning is not None:
        rank_zero_warn(warning)


def result_table(networks: list[Specialised]) -> str:
    """The specialised networks as text."""
    rows = [
        [
            network.label,
            f"{network.params / 1e6:.3f}",
            f"{network.macs / 1e9:.4f}",
            f"{network.metrics['top1']:.2f}",
            f"{network.metrics['top5']:.2f}",
            network.arch.id,
        ]
        for network in networks
    ]
    return text_table(["network", "params [M]", "MACs [G]", "top-1 [%]", "top-5 [%]", "id"], rows)
