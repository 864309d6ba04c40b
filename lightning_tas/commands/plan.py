"""`plan=true`: what a run would do, without training: sizes, preferred architectures, epochs, steps, MACs, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_tas.analysis.memory import StepMemory, step_memory
from lightning_tas.analysis.tables import text_table
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks.latency_limit import foresee
from lightning_tas.callbacks.preferred_selection import make_selection
from lightning_tas.callbacks.search_build import build_region, latency_settings
from lightning_tas.callbacks.search_check import EXACT
from lightning_tas.commands import build, per_phase, searching
from lightning_tas.commands.checks import check_phases, check_weights
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.commands.facts import Facts, facts
from lightning_tas.commands.phases import selection_table
from lightning_tas.costs import cost
from lightning_tas.data import TASDataModule
from lightning_tas.errors import typed
from lightning_tas.families import widths
from lightning_tas.launch.trainer import world_size
from lightning_tas.limits import span
from lightning_tas.samplers import build_sampler
from lightning_tas.search import Selection
from lightning_tas.search.objective import Objective
from lightning_tas.search.strategy import build_strategy
from lightning_tas.supernets import supernet as make_supernet
from lightning_tas.training.schedule import warmup_epochs
from lightning_tas.training.trained import Trained

# Forward counts once, backward twice: gradients of activations and of weights.
TRAINING_OVER_FORWARD = 3
SAMPLED = 200  # steps drawn to estimate the mean cost of one


@dataclass(frozen=True)
class Budget:
    """Length and cost of a training phase."""

    facts: Facts
    epochs: float
    warmup: float
    macs: float
    memory: StepMemory
    trained: str | None = None  # of a supernet: what its steps train


def show(config: Config) -> None:
    """Print the plan, phase by phase. Selection runs for real where the recipe selects: it trains nothing."""
    check_phases(config)
    data = build.data(config)
    check_weights(config)
    say(f"recipe {config.recipe}: {config.data.name}, {data.num_train:,} training images, {data.num_classes} classes")
    if config.space is not None:
        say(space_table(_on_meta(config, data, None)))
    selection = None
    for number, (label, settings) in enumerate(per_phase.configs(config).items(), 1):
        data, kind = build.data(settings, data), per_phase.kind(label)
        data.check_batches(world_size(settings.trainer), settings.trainer.limit_train_batches)
        say(f"\nphase {number}/{len(config.phases)}: {label}{_own(config, label)}")
        if kind == "select":
            selection = _show_selection(settings, data)
        elif kind in ("supernet", "search"):
            net = _on_meta(settings, data, selection)
            if kind == "search" or searching.inside_fit(settings):
                say(search_table(settings, net))
            if kind == "supernet":
                say(budget_table(budget(settings, data, net, selection.archs if selection is not None else [])))
        elif kind == "measure":
            say(f"accuracies with inherited weights on the test set of {settings.data.name}")
        else:
            _show_retrain(settings, data)


def _own(config: Config, label: str) -> str:
    """What a phase has of its own, behind its name."""
    own = per_phase.dotted({label: (config.per_phase or {}).get(label)})
    return "; its own: " + " ".join(f"{key.partition('.')[2]}={typed(own[key])}" for key in own) if own else ""


def _on_meta(config: Config, data: TASDataModule, selection: Selection | None) -> Any:
    """The supernet without memory for its weights."""
    with torch.device("meta"):
        return make_supernet(build.training_space(config, selection), **build.network_options(config, data))


def _show_selection(config: Config, data: TASDataModule) -> Selection:
    real = build.supernet(config, data).to(build.device(config, planning=True))
    selection = make_selection(real, config.select, config.seed, data.selection_batch)
    say("preferred architectures\n" + selection_table(selection))
    return selection


def search_table(config: Config, net: Any) -> str:
    """What a search would do: its strategy and budget, and how much of the space is within the limits."""
    region = build_region(net, config.limits, measure=False)
    region.check()
    within = region.size()
    other = "" if config.limits.latency is None else "other "
    rows = [
        ["strategy", str(config.search.strategy)],
        ["maximised", config.search.score],
        *([["when", config.search.when]] if searching.inside_fit(config) else []),
        [f"networks within the {other}limits", "not counted" if within is None else f"{within:,}"],
    ]
    for name, reached in region.ranges().items():
        bounds = region.limits.bounds.get(name)
        said = "" if bounds is None else f"; limits: {span(bounds)}"
        rows.append([name, f"{span(reached)} in the space{said}"])
    if config.limits.latency is not None:
        device, amp = searching.place(config, planning=True)
        rows += map(list, foresee(net, config.limits, latency_settings(config.limits, device, amp)))
    if config.search.strategy != EXACT:
        objective = Objective.of(config.search.score)
        options = dict(config.search.options or {})
        strategy = build_strategy(str(config.search.strategy), region, objective, config.seed, **options)
        # No network is evaluated twice, so the search ends when it has seen all.
        most = strategy.budget if within is None else min(strategy.budget, within)
        rows.append(["evaluations", f"{most:,} at most"])
    return text_table(["quantity", "value"], rows)


def _show_retrain(config: Config, data: TASDataModule) -> None:
    """The training of a network alone: the one that is named, else one from within the limits, which stands for it."""
    if config.arch is not None:
        label, arch = build.architecture(config.arch)
    else:
        region = build_region(_on_meta(config, data, None), config.limits, measure=False)
        label, arch = (
            "a random network in place of the one found",
            region.space.decode(region.sample(config.seed, 1))[0],
        )
    with torch.device("meta"):
        alone = build.make_network(arch, **build.network_options(config, data))
    price = cost(arch, alone)
    say(f"{label}, {price.params / 1e6:.3f} M params, {price.macs / 1e9:.4f} GMACs")
    say(budget_table(_budget(config, data, alone, float(price.macs), None)))


def space_table(net: Any) -> str:
    """Size of the space and the range of costs between its smallest and largest architecture."""
    rows = []
    for name, arch in (("smallest", net.space.smallest()), ("largest", net.space.largest())):
        price = cost(arch, net)
        width = " ".join(str(width) for width in widths(arch))  # of every stage
        rows.append([name, arch.depth, width, f"{price.params / 1e6:.3f}", f"{price.macs / 1e9:.4f}"])
    table = text_table(["network", "depth", "embed_dim", "params [M]", "MACs [G]"], rows)
    held = sum(p.numel() for p in net.parameters())
    return f"space {net.space.name}: {net.space.size():,} architectures; supernet {held / 1e6:.3f} M params\n{table}"


def budget(config: Config, data: TASDataModule, net: Any, candidates: Sequence[Architecture]) -> Budget:
    """Length, multiply-accumulates and memory of supernet training, by what the sampler draws in its first steps.

    Args:
        net: the supernet on the meta device.
        candidates: of the selection; empty where none ran.
    """
    sampler = build_sampler(config.sampler, net.space, list(candidates) or None, config.seed)
    drawn = [sampler(step) for step in range(SAMPLED)]
    known = {arch: cost(arch, net) for arch in dict.fromkeys(arch for step in drawn for arch in step)}
    macs = sum(float(known[arch].macs) for step in drawn for arch in step) / len(drawn)
    largest = max(sampler.archs, key=lambda arch: int(cost(arch, net).params)) if sampler.archs else net.space.largest()
    found = _budget(config, data, net, macs, largest)
    return replace(found, trained=str(Trained.of(config.sampler, sampler, net.space, candidates)))


def _budget(config: Config, data: TASDataModule, net: Any, macs: float, largest: Architecture | None) -> Budget:
    """`macs`: forward, of all networks of a step, for one image."""
    found = facts(config, data)
    narrow = 2 if found.precision.startswith(("16", "bf16")) else 4
    memory = step_memory(net, largest, config.data.batch_size, narrow)
    total = TRAINING_OVER_FORWARD * macs * found.global_batch * found.steps
    warmup = warmup_epochs(config.train, found.steps, found.steps_per_epoch)
    return Budget(found, found.steps / found.steps_per_epoch, warmup, total, memory)


def budget_table(found: Budget) -> str:
    """The budget as text, a quantity a line."""
    rows = [
        *([["trained", found.trained]] if found.trained is not None else []),
        ["processes", f"{found.facts.processes:,}"],
        ["global batch [images]", f"{found.facts.global_batch:,}"],
        ["peak learning rate", f"{found.facts.peak_lr:g}"],
        ["epochs", f"{found.epochs:g}"],
        ["warm-up [epochs]", f"{found.warmup:g}"],
        ["steps per epoch", f"{found.facts.steps_per_epoch:,}"],
        ["steps", f"{found.facts.steps:,}"],
        ["strategy", found.facts.strategy],
        ["unused parameters", found.facts.unused],
        ["training MACs [P]", f"{found.macs / 1e15:.4g}"],
        ["memory per process [GB]", f"{found.memory.total / 1e9:.3g}"],
        ["  of it activations [GB]", f"{found.memory.activations / 1e9:.3g}"],
    ]
    return text_table(["quantity", "value"], rows)
