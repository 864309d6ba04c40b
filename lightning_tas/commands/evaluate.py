"""`python -m lightning_tas.evaluate`: networks of a run or of a released checkpoint on the test set.

Prints a table and writes `evaluation.json` into the run (or into `output_dir`, where that is given or there is no run).
Under torchrun or srun the processes share the images.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_tas.commands import build, trained
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.commands.phases import result_table, tell_trained
from lightning_tas.costs import cost
from lightning_tas.evaluator import evaluate
from lightning_tas.launch import group, provenance
from lightning_tas.launch.files import make_folder
from lightning_tas.launch.results import Specialised, write_result

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
    path = where(config, source) / "evaluation.json"
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
