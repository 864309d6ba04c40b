"""`python -m lightning_tas.evaluate`: networks of a run or of a released checkpoint on the test set.

Prints a table and writes `evaluation.json` into the run (or into `output_dir`, where that is given or there is no run).
There another checkpoint than the run's last one, a single network, or other data have a record of their own, named
after them: `evaluation-00-supernet-epoch=0001-step=0000004.json`.
Under torchrun or srun the processes share the images.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_tas.commands import build, trained
from lightning_tas.commands.compose import settings_of_run
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.commands.phases import result_table, tell_trained
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.evaluator import evaluate
from lightning_tas.launch import group, provenance
from lightning_tas.launch.files import make_folder
from lightning_tas.launch.results import Specialised, find_checkpoint, write_result
from lightning_tas.launch.settings import FREE_DATA, dotted

WEIGHTS = {"live": "as trained", "ema": "averaged during training (EMA)", "official": "released"}


def run(config: Config) -> None:
    """Measure what `ckpt` and `arch` name. Raises UserError before anything is measured or written."""
    group.join(config.trainer.accelerator)
    device = build.device(config)
    source = trained.load(config)
    archs = trained.chosen(source, config.arch)
    data = build.data(config)
    net = trained.fit_to_data(source, data)
    loader = data.test_dataloader()
    path = where(config, source) / record_name(config, source, archs)
    main = group.rank() == 0
    if main:
        make_folder(path.parent)
    say(f"{source.checkpoint}: weights {WEIGHTS[source.weights]}; test set of {config.data.name}")
    began = time.monotonic()
    asked = [source.logits_of(arch) for arch in archs.values()]
    found = evaluate(net, asked, loader, device=device, progress=main)
    seconds = time.monotonic() - began
    networks = []
    for (label, arch), accuracy in zip(archs.items(), found, strict=True):
        price = cost(arch, net)
        networks.append(Specialised(label, arch, int(price.params), int(price.macs), asdict(accuracy)))
    if main:
        write_result(path, networks, **_facts(config, source, net, data), timing={"evaluate_seconds": seconds})
    say(result_table(networks))
    if source.supernet is not None:
        tell_trained(source.supernet, archs)
    say(f"samples: {found[0].samples:,}; written to {path}")


def where(config: Config, source: trained.Trained) -> Path:
    """The folder that a command writes to."""
    given = config.output_dir != Config().output_dir
    return Path(config.output_dir) if given or source.run is None else source.run


def record_name(config: Config, source: trained.Trained, archs: Iterable[str]) -> str:
    """`evaluation.json`, or, in the folder of a run, a name that says what is not the run's own. archs: labels."""
    parts: list[str] = []
    if source.run is not None and where(config, source) == source.run:
        if not _is_last(source.checkpoint, source.run):
            parts.append(f"{source.checkpoint.parents[1].name}-{source.checkpoint.stem}")
        if config.weights != "auto":
            parts.append(f"weights={config.weights}")
        if config.arch is not None:
            parts += archs
        usual, given = dotted(settings_of_run(source.run).get("data") or {}), dotted(asdict(config.data))
        free = (*FREE_DATA, "batch_size", "eval_batch_size")
        other = {k: v for k, v in given.items() if k.partition(".")[0] not in free and usual.get(k, v) != v}
        parts += [f"{key}={'x'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in other.items()]
    name = re.sub(r"[^\w.=+-]+", "-", "-".join(["evaluation", *parts]))
    if len(name) > 200:
        name = f"{name[:190]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{name}.json"


def _is_last(checkpoint: Path, run: Path) -> bool:
    """Whether a checkpoint is the one that the folder of its run means."""
    try:
        return find_checkpoint(run).resolve() == checkpoint.resolve()
    except UserError:  # the last one is damaged
        return False


def _facts(config: Config, source: trained.Trained, net: Any, data: Any) -> dict[str, Any]:
    return {
        "data": {
            "name": config.data.name,
            "split": "test",
            "num_classes": data.num_classes,
            "class_names": data.known_names,
            "img_size": list(data.img_size),
        },
        "checkpoint": str(source.checkpoint),
        "checkpoint_sha256": provenance.state_hash(source.net.state_dict()),
        "weights": source.weights,
        "source": config.source,
        "versions": provenance.versions(),
        "git": provenance.git_revision(),
        "command": provenance.command(),
        "host": provenance.host(),
    }
