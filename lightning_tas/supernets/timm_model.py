"""The stand-alone network in timm's model registry, as `tas_vit`, and the folder layout that timm loads it from.

After importing this package, ``timm.create_model("tas_vit", arch=...)`` builds one; a folder holding
``model.safetensors`` and ``config.json`` with the content of `model_config` loads in a clean process by
``timm.create_model("local-dir:FOLDER", pretrained=True)``, fine-tuning arguments (num_classes, img_size) included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.families import RULES
from lightning_tas.reading import parse_json, read_json, read_yaml
from lightning_tas.supernets.checkpoints import STATE_HASH, adapt_weights, state_hash
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.image_network import describe
from lightning_tas.supernets.registry import family

__all__ = ["default_cfgs", "model_config", "read_arch"]

# What timm assumes without a config file; the build options overrule input size and classes.
default_cfgs = generate_default_cfgs({"tas_vit": describe(NetOptions.read({}))})


def read_arch(arch: Architecture | Mapping[str, Any] | str | Path) -> Architecture:
    """An architecture from itself, a mapping in any known layout, JSON text, or the path of a JSON or YAML file.

    A file may also hold the architecture under the key ``arch``. `UserError` when it is none of these.
    """
    if isinstance(arch, Architecture):
        return arch
    if isinstance(arch, str | Path):
        text = str(arch)
        if not text.lstrip().startswith("{"):
            if not Path(text).is_file():
                raise UserError(f"arch: {text!r} is neither JSON text nor a file")
            arch = (read_yaml if text.endswith((".yaml", ".yml")) else read_json)(text, "arch")
        else:
            arch = parse_json(text, "arch: the text")
    if not isinstance(arch, Mapping):
        raise UserError(f"arch: expected a mapping, got {type(arch).__name__}")
    return Architecture.from_dict(arch["arch"] if isinstance(arch.get("arch"), Mapping) else arch)


@register_model
def tas_vit(pretrained: bool = False, arch: Any = None, **kwargs: Any) -> Any:
    """timm entry point: the stand-alone network of `arch` (see `read_arch`), with the options of `NetOptions`.

    Its class is that of the architecture's family (a plain ViT, PiT, or one that a user registered).
    """
    if arch is None:
        raise UserError("arch: tas_vit needs an architecture: a mapping, JSON text or a file")
    if "global_pool" in kwargs:
        kwargs["pool"] = kwargs.pop("global_pool")
    known = read_arch(arch)
    return build_model_with_cfg(
        family(known.family).network, "tas_vit", pretrained, arch=known, pretrained_filter_fn=_filter, **kwargs
    )


def model_config(net: Any, **pretrained_cfg: Any) -> dict[str, Any]:
    """Content of the ``config.json`` beside ``model.safetensors``: how to rebuild `net`, and timm's description.

    `pretrained_cfg` adds to the description: ``mean``, ``std``, ``interpolation``, ``crop_pct``, ``label_names``.
    """
    options = net.options
    described = {**describe(NetOptions.read(options, RULES[net.arch.family])), **pretrained_cfg}
    return {
        "architecture": described.pop("architecture"),
        "num_classes": described.pop("num_classes"),
        "num_features": net.num_features,
        "model_args": {"arch": net.arch.to_dict(), **{k: v for k, v in options.items() if k != "num_classes"}},
        "pretrained_cfg": described,
    }


def _filter(state: dict[str, Tensor], net: Any) -> dict[str, Tensor]:
    config = Path(net.pretrained_cfg.get("file") or "") / "config.json"
    if net.pretrained_cfg.get("source") == "local-dir" and config.is_file():
        expected = read_json(config, key="weights").get(STATE_HASH)
        if expected not in (None, state_hash(state)):
            raise UserError(
                f"weights: those beside {str(config)!r} are damaged, or were changed: they are not what its "
                f"{STATE_HASH} says"
            )
    return adapt_weights(state, net)
