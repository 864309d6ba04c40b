"""Layers by role: what a proxy may look at is decided by what a layer does, never by its shape.

A class count of 10 or an MLP ratio of 1 makes shapes coincide that mean different things. Roles follow from the names
of modules, which timm's ViTs share with the networks here; a network with other names offers
``layer_roles() -> {module name: role}``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from lightning_tas.errors import UserError

NORM = "norm"
ROLES = ("patch_embed", "qkv", "proj", "fc1", "fc2", "pool_conv", "pool_fc", "head")
"""Roles of layers with weight matrices, in the order in which data meet them."""

_PATTERNS = {
    "patch_embed": r"patch_embed\.proj",
    "qkv": r"attn\.qkv",
    "proj": r"attn\.proj",
    "fc1": r"mlp\.fc1",
    "fc2": r"mlp\.fc2",
    "pool_conv": r"pools\.\d+\.conv",
    "pool_fc": r"pools\.\d+\.fc",
    "head": r"head",
}
_BLOCK = re.compile(r"^(.*\bblocks\.\d+)(\.|$)")


@dataclass(frozen=True, eq=False)
class Layer:
    """A module with weights: its name in the network, its role, and its block (-1 before and between, None after)."""

    name: str
    role: str
    block: int | None
    module: nn.Module

    @property
    def weight(self) -> str:
        """Name of the weight among the network's parameters."""
        return f"{self.name}.weight"


def block_names(net: nn.Module) -> list[str]:
    """Names of the blocks over all stages, in order of execution."""
    return [name for name, _ in net.named_modules() if (found := _BLOCK.match(name)) and found.end() == len(name)]


def find_layers(net: nn.Module) -> tuple[Layer, ...]:
    """Every layer with weights, in order of execution; `UserError` for one whose role cannot be told."""
    blocks = {name: i for i, name in enumerate(block_names(net))}
    given: dict[str, str] = net.layer_roles() if hasattr(net, "layer_roles") else {}  # type: ignore[operator]
    layers = []
    for name, module in net.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if "weight" not in own:
            continue
        role = given.get(name) or _role(name, module)
        if role is None:
            raise UserError(
                f"proxies: the role of layer {name!r} cannot be told from its name; the network can say it in "
                f"layer_roles(); valid roles: {', '.join((*ROLES, NORM))}"
            )
        found = _BLOCK.match(name)
        place = blocks[found.group(1)] if found else None if role in ("head", NORM) else -1
        layers.append(Layer(name, role, place, module))
    return tuple(layers)


def _role(name: str, module: nn.Module) -> str | None:
    if isinstance(module, nn.LayerNorm | nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
        return NORM
    return next((role for role, pattern in _PATTERNS.items() if re.search(rf"(^|\.){pattern}$", name)), None)
