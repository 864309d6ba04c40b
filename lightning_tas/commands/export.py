"""`python -m lightning_tas.export`: one network as `model.safetensors` and `config.json`, for timm.

    import timm, lightning_tas.supernets
    net = timm.create_model("local-dir:FOLDER", pretrained=True)

The command does exactly that in a fresh process and compares the logits before the folder appears.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

import lightning_tas
from lightning_tas.architecture import Architecture
from lightning_tas.commands import build, trained
from lightning_tas.commands.config import Config
from lightning_tas.commands.console import say
from lightning_tas.commands.evaluate import WEIGHTS, where
from lightning_tas.errors import UserError
from lightning_tas.launch import group
from lightning_tas.launch.files import make_folder, write_json, writing
from lightning_tas.randomness import torch_generator
from lightning_tas.supernets import model_config
from lightning_tas.supernets.checkpoints import STATE_HASH, state_hash

BATCH = 4
TOLERANCE = 1e-5  # of the largest logit; the same operations in the same order are expected to agree to the bit

# What a user does, in a process that knows nothing of this one.
CHILD = """
import sys
import timm, torch
from safetensors.torch import load_file, save_file
import lightning_tas.supernets
folder, inputs, outputs, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
net = timm.create_model("local-dir:" + folder, pretrained=True).eval()
with torch.no_grad():
    save_file({"logits": net(load_file(inputs)["images"]).contiguous()}, outputs)
"""


def run(config: Config) -> None:
    """Export the network that `ckpt` and `arch` name. Raises UserError; the folder exists only if all went well."""
    if group.size() > 1:
        raise UserError("export: this is work for one process; start it without torchrun or srun")
    source = trained.load(config)
    label, arch = _one(source, config.arch)
    target = _target(config, source, label)
    data = build.data(config)
    net = trained.fit_to_data(source, data, compare_names=False)  # it takes the names of its classes along
    alone = net if source.alone else net.subnet(arch)
    make_folder(target.parent)
    # A neighbour of the target, so that moving it there is one step.
    with writing(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch).resolve() / "export"  # absolute: the clean process runs elsewhere
        folder.mkdir()
        _write(folder, alone, source, data)
        difference = _difference(folder, net, source.logits_of(arch), folder.parent)
        folder.rename(target)
    params = sum(p.numel() for p in alone.parameters())
    say(f"{label}: {arch.id}, {params / 1e6:.3f} M params, weights {WEIGHTS[source.weights]}")
    say(f"parity with {source.checkpoint}: largest difference of a logit {difference:.3g}, through timm, clean process")
    say(f'written to {target}; load it with timm.create_model("local-dir:{target}", pretrained=True)')


def _one(source: trained.Trained, given: Any) -> tuple[str, Architecture]:
    """The one network to export: `arch`, the only one there is, or the most accurate that the run measured."""
    archs = trained.chosen(source, given)
    if len(archs) == 1:
        return next(iter(archs.items()))
    top1 = build.measured_top1(source.run) if source.run is not None else {}
    best = max((label for label in archs if label in top1), key=lambda label: top1[label], default=None)
    if best is None:
        raise UserError(f"arch: give the network to export; valid: {', '.join(archs)}")
    say(f"arch: not given; {best} is the most accurate network of the run ({top1[best]:.2f} % top-1)")
    return best, archs[best]


def _target(config: Config, source: trained.Trained, label: str) -> Path:
    target = where(config, source)
    if target == source.run:
        target = target / "exported" / label
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"output_dir: {str(target)!r} exists and is not empty; choose another folder")
    return target


def _write(folder: Path, net: Any, source: trained.Trained, data: Any) -> None:
    # As the test images are prepared here.
    config = data.config
    squashed = config.crop != "rrc" and config.resize == "squash"
    described: dict[str, Any] = {
        "mean": list(data.mean),
        "std": list(data.std),
        "interpolation": "bicubic" if config.interpolation == "random" else config.interpolation,
        "crop_pct": config.crop_pct if config.crop == "rrc" else 1.0,
        "crop_mode": "squash" if squashed else "center",
    }
    if source.class_names is not None:
        described["label_names"] = list(source.class_names)
    state = {name: value.contiguous() for name, value in net.state_dict().items()}
    hashed = state_hash(state)
    content = {**model_config(net, **described), "weights": source.weights, STATE_HASH: hashed}
    # By Python's own file: of what the system says, on a full disk for example, the writer of safetensors says less.
    (folder / "model.safetensors").write_bytes(save(state, {"format": "pt", STATE_HASH: hashed}))
    write_json(folder / "config.json", content)


def _difference(folder: Path, net: Any, arch: Architecture | None, scratch: Path) -> float:
    """Largest difference between the logits of `net` here and of the exported folder in a clean process."""
    images = torch.randn(BATCH, net.options["in_chans"], *net.img_size, generator=torch_generator(0, "export"))
    inputs, outputs = scratch / "images.safetensors", scratch / "logits.safetensors"
    save_file({"images": images}, inputs)
    with torch.no_grad():
        ours = net(images) if arch is None else net(images, arch)
    package = str(Path(lightning_tas.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    call = [sys.executable, "-c", CHILD, str(folder), str(inputs), str(outputs), str(torch.get_num_threads())]
    done = subprocess.run(
        call, cwd=scratch, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the exported folder does not load in a clean process:\n{done.stderr}")
    theirs = load_file(outputs)["logits"]
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(ours.abs().max())):
        raise RuntimeError(f"the exported network's logits differ by {difference:.3g} from the trained one's")
    return difference
