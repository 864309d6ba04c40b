"""What the score command scores: networks with accuracies, in passes over all of them, each a file that resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_tas.analysis.bench import KEY, Bench, read_bench
from lightning_tas.architecture import Architecture
from lightning_tas.commands import build, trained
from lightning_tas.commands.config import Config
from lightning_tas.commands.score_sizes import Group, check, groups
from lightning_tas.costs import FORMULAS, CostOptions, cost
from lightning_tas.data import TASDataModule
from lightning_tas.errors import UserError, unknown
from lightning_tas.evaluator import evaluate
from lightning_tas.families import RULES
from lightning_tas.launch import group, provenance
from lightning_tas.launch.compare import digest
from lightning_tas.launch.files import read_json, write_json
from lightning_tas.proxies.config import INHERITED, check_method
from lightning_tas.proxies.many import score_many
from lightning_tas.proxies.registry import chosen
from lightning_tas.proxies.table import Scores
from lightning_tas.randomness import derive
from lightning_tas.supernets.config import ModelConfig, NetOptions

Floats = NDArray[np.float64]
BASELINES = ("params", "macs")
"""On top of every table: a proxy that does not beat them is worth nothing."""
INITIAL, TRAINED = "initial", "trained"
SAMPLED = 100
"""Sub-networks drawn of a supernet where `bench.networks` does not say how many."""
INHERITED_COLUMN = "inherited_top1"


@dataclass(frozen=True)
class Pass:
    """One walk over all networks: some proxies, one draw of the weights, one batch."""

    weights: str
    init: int
    group: Group
    file: str


@dataclass(frozen=True)
class Job:
    """Networks, what is known of them, and how they are built; `net` is the supernet they are cut from, if any.

    `origin` says where the accuracies are from (a file and its hash, or a checkpoint and its hash).
    """

    bench: Bench
    params: Floats
    macs: Floats
    names: tuple[str, ...]
    data: TASDataModule
    origin: Mapping[str, Any]
    net: Any = None
    build: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Results:
    """Scores (initialisations, networks) by kind of weights and proxy, and median seconds a network by proxy."""

    scores: dict[str, dict[str, Floats]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def prepare(config: Config) -> Job:
    """Read what is to be scored, and check everything that can be checked before work begins. Writes nothing."""
    bench = config.bench
    names = tuple(dict.fromkeys([*BASELINES, *(proxy.name for proxy in chosen_proxies(bench.proxies))]))
    check(names, bench)
    check_init(bench.init)
    build.device(config)
    data = build.data(config)
    if (bench.path is None) == (config.ckpt is None):
        raise UserError(f"{KEY}: give bench=FILE, networks with known accuracies, or ckpt=RUN, a trained supernet")
    if bench.images == "data":
        data.load()
        for one in groups(names, bench):
            if one.batch_size > data.num_train:
                raise UserError(
                    f"bench.batch_size: {one.batch_size} is not valid; {config.data.name} has {data.num_train} "
                    "images to train on"
                )
    return _from_file(config, data, names) if bench.path is not None else _from_supernet(config, data, names)


def chosen_proxies(given: Any) -> list[Any]:
    """The registered proxies that `bench.proxies` names."""
    try:
        return chosen(given)
    except UserError as error:
        raise UserError(f"bench.proxies: {str(error).removeprefix('proxy: ').removeprefix('proxies: ')}") from None


def check_init(method: str) -> None:
    """Refuse an unknown way of drawing weights."""
    try:
        check_method(method)
    except UserError as error:
        raise UserError(f"bench.{error}") from None


def _from_file(config: Config, data: TASDataModule, names: tuple[str, ...]) -> Job:
    settings = config.bench
    path = Path(str(settings.path))
    columns = [settings.accuracies] if isinstance(settings.accuracies, str) else settings.accuracies
    if columns is not None and (not isinstance(columns, list) or not columns):
        raise UserError(f"bench.accuracies: {columns!r} is not valid; valid: a list of columns, or null for all")
    if settings.family is not None and settings.family not in FORMULAS:
        raise unknown("bench.family", settings.family, FORMULAS)
    bench = read_bench(path, columns, settings.family, settings.networks)
    # Families differ in what they can be built with: only what the recipe sets away from the defaults is passed on.
    usual = asdict(ModelConfig())
    options = {key: value for key, value in asdict(config.model).items() if value != usual[key]}
    options |= {"num_classes": data.num_classes, "img_size": tuple(data.img_size), "in_chans": data.in_chans}
    _check_build(options, bench.family)
    priced = {option.name: options[option.name] for option in fields(CostOptions) if option.name in options}
    prices = []
    for place, arch in enumerate(bench.archs):
        try:
            prices.append(cost(arch, None, **priced))
        except (UserError, OverflowError) as error:
            raise UserError(f"{KEY}: {str(path)!r}: network {place}: {error}") from None
    params, macs = (np.array(column, dtype=float) for column in zip(*prices, strict=True))
    origin = {"bench": str(path), "bench_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return Job(bench, params, macs, names, data, origin, build=options)


def _check_build(options: Mapping[str, Any], family: str) -> None:
    """Refuse what networks of `family` cannot be built with, by the key that the user set."""
    try:
        if family in RULES:
            NetOptions.read(options, RULES[family])
    except UserError as error:
        section = "data" if str(error).partition(":")[0] in ("num_classes", "img_size", "in_chans") else "model"
        raise UserError(f"{section}.{error}") from None


def _from_supernet(config: Config, data: TASDataModule, names: tuple[str, ...]) -> Job:
    if config.bench.accuracies is not None:
        raise UserError("bench.accuracies: names columns of a bench file; with ckpt= there is one, " + INHERITED_COLUMN)
    source = trained.load(config, "supernet")
    if source.alone:
        raise UserError(f"ckpt: {str(source.checkpoint)!r} is one network alone; give a supernet")
    if data.load().val is None and config.data.search_val == 0:
        raise UserError("data.search_val: 0 holds no images out, and networks are never chosen by the test set")
    if source.supernet is not None:
        data.check_unseen(source.supernet.trained_on, str(source.checkpoint))
    net = trained.fit_to_data(source, data)
    archs = sample(net.space, config.bench.networks or SAMPLED, config.seed)
    if len(archs) < 2:
        raise UserError(f"space: {net.space.name!r} holds one network: nothing to correlate")
    prices = [cost(arch, net) for arch in archs]
    params, macs = (np.array(column, dtype=float) for column in zip(*prices, strict=True))
    hashed = provenance.state_hash(source.net.state_dict())
    origin = {"checkpoint": str(source.checkpoint), "checkpoint_sha256": hashed, "weights": source.weights}
    return Job(Bench(tuple(archs), {}), params, macs, names, data, origin, net=net)


def sample(space: Any, number: int, seed: int) -> list[Architecture]:
    """`number` distinct architectures, the same for the same seed; all of them where the space has no more."""
    if space.size() <= number:
        return list(space.enumerate())
    found: dict[Architecture, None] = {}
    round_ = 0
    while len(found) < number:
        drawn = space.sample(derive(seed, "bench", round_), n=number)
        found |= dict.fromkeys(drawn)
        round_ += 1
    return list(found)[:number]


def passes(config: Config, job: Job) -> list[Pass]:
    """Every pass, in the order of work: all of one initialisation, then the next; trained weights last."""
    divided = groups(job.names, config.bench)
    kinds = [(INITIAL, init) for init in range(config.bench.inits)]
    if job.net is not None:
        kinds.append((TRAINED, 0))
    found = []
    for weights, init in kinds:
        for one in divided:
            name = f"init{init}" if weights == INITIAL else TRAINED
            batch = f"-batch{one.batch_size}" if len(divided) > 1 else ""
            found.append(Pass(weights, init, one, f"scores-{name}{batch}.csv"))
    return found


def settings(config: Config, job: Job) -> dict[str, Any]:
    """Everything that scores depend on: a folder may only be continued under the same."""
    deciding = ("init", "images", "batch_size", "zen_repeat", "paper", "options")
    bench = {key: getattr(config.bench, key) for key in deciding}
    data = {key: getattr(config.data, key) for key in ("name", "img_size", "in_chans", "num_classes")}
    return {
        "seed": config.seed,
        "networks": digest([arch.to_dict() for arch in job.bench.archs]),
        "proxies": list(job.names),
        **{f"bench.{key}": value for key, value in bench.items()},
        **{f"data.{key}": value for key, value in data.items()},
        "eval_batches": config.bench.eval_batches if job.net is not None else None,
        "build": {key: list(v) if isinstance(v, tuple) else v for key, v in job.build.items()},
        "checkpoint": job.origin.get("checkpoint_sha256"),
    }


def score(config: Config, job: Job, folder: Path) -> Results:
    """Run every pass; what `folder` holds already is read, not computed again. Called on every process."""
    results, found = Results(), dict[tuple[str, str], dict[int, Floats]]()
    seconds: dict[str, list[float]] = {}
    for one in passes(config, job):
        scores = run_pass(config, job, one, folder)
        for name in one.group.names:
            found.setdefault((one.weights, name), {})[one.init] = np.asarray(scores.value(name), dtype=float)
            seconds.setdefault(name, []).extend(np.asarray(scores.seconds(name), dtype=float).tolist())
    for (weights, name), rows in found.items():
        results.scores.setdefault(weights, {})[name] = np.stack([rows[init] for init in sorted(rows)])
    # Not the mean: one network during which the machine slept or the process was stopped would rule it.
    results.seconds = {name: float(np.median(values)) for name, values in seconds.items()}
    return results


def run_pass(
    config: Config, job: Job, one: Pass, folder: Path | None, archs: Sequence[Architecture] | None = None
) -> Scores:
    """Score all networks (or `archs`) as `one` says; with a `folder` its file there is continued."""
    images, labels = _batch(config, job, one.group.batch_size)
    if folder is not None and not folder.is_dir():
        raise UserError(f"output_dir: {str(folder)!r} is there no more; what was written is gone with it")
    return score_many(
        list(one.group.names),
        job.net,
        list(job.bench.archs if archs is None else archs),
        seed=derive(config.seed, "bench", one.init),
        images=images,
        labels=labels,
        batch_size=one.group.batch_size,
        init=INHERITED if one.weights == TRAINED else config.bench.init,
        options={name: dict(options) for name, options in one.group.options.items()},
        device=build.device(config),
        build=dict(job.build) or None,
        path=None if folder is None else folder / one.file,
        resume=True,
        progress=folder is not None and group.rank() == 0,
    )


def _batch(config: Config, job: Job, size: int) -> tuple[Tensor | None, Tensor | None]:
    if config.bench.images == "gaussian":
        return None, None
    return job.data.selection_batch(size)


def inherited(config: Config, job: Job, folder: Path) -> Bench:
    """The bench with accuracies [%] in the supernet, on the validation split; measured once, kept in `folder`."""
    kept = folder / "accuracies.json"
    known = group.first(lambda: read_json(kept, key="resume") if kept.exists() else None)
    if known is None:
        device = build.device(config)
        main = group.rank() == 0
        measured = evaluate(
            job.net,
            job.bench.archs,
            job.data.val_dataloader(),
            device=device,
            progress=main,
            max_batches=config.bench.eval_batches,
        )
        known = {
            "split": "search-val",
            "samples": measured[0].samples,
            "top1": {arch.id: found.top1 for arch, found in zip(job.bench.archs, measured, strict=True)},
        }
        if main:
            write_json(kept, known)
    top1 = np.array([known["top1"][arch.id] for arch in job.bench.archs])
    note = f"{INHERITED_COLUMN}: on {known['samples']:,} images of the validation split, weights of the supernet"
    return Bench(job.bench.archs, {INHERITED_COLUMN: top1}, (INHERITED_COLUMN,), (*job.bench.notes, note))


def typical(job: Job) -> tuple[Architecture, Architecture]:
    """The networks of fewest and of median MACs: one to warm up with, one whose time stands for all."""
    order = np.argsort(job.macs)
    return job.bench.archs[int(order[0])], job.bench.archs[int(order[len(order) // 2])]


def lines(job: Job) -> Iterator[str]:
    """What is said of the networks before they are scored."""
    low, high = job.params.min() / 1e6, job.params.max() / 1e6
    yield f"{len(job.bench)} networks of family {job.bench.family}, {low:.2f} to {high:.2f} M params"
    yield from job.bench.notes
