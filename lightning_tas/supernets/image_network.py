"""What supernets and stand-alone networks of every family share: the geometry of their images, first weights, head.

Shapes: B batch, C channels, N tokens (class token first), d width of the last stage.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.families import Rules
from lightning_tas.supernets.checkpoints import load_reference
from lightning_tas.supernets.config import NetOptions
from lightning_tas.supernets.initialisation import init_module
from lightning_tas.supernets.relative_position import RelativePosition


def check_family(arch: object, family: str) -> Architecture:
    """`arch` if it is an architecture of `family`, else `UserError`."""
    if not isinstance(arch, Architecture):
        raise UserError(f"arch: expected an Architecture, got {type(arch).__name__}")
    if arch.family != family:
        raise UserError(f"arch: family {arch.family!r} does not fit a network of family {family!r}")
    return arch


def check_sizes(sizes: Iterable[tuple[str, Any, float]]) -> None:
    """`UserError` for a size (name in words, anything, value) that is not a whole number of at least 1."""
    for name, _, value in sizes:
        if value < 1 or not float(value).is_integer():
            raise UserError(f"{name}: {value} is not valid; it must be a whole number of at least 1")


def describe(options: NetOptions) -> dict[str, Any]:
    """timm's description of a network's input and head, as far as the build options decide it."""
    return {
        "architecture": "tas_vit",
        "num_classes": options.num_classes,
        "input_size": [options.in_chans, *options.img_size],
        "fixed_input_size": True,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


class ImageNetwork(nn.Module):
    """Patches with a class token in, logits out; what comes between is the subclasses'."""

    _linear: type[nn.Linear] = nn.Linear  # kind of the head
    _options: NetOptions
    rules: Rules
    num_classes: int
    embed_dim: int
    head: nn.Module
    cls_token: nn.Parameter
    pos_embed: nn.Parameter | None
    grad_checkpointing: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The JSON-able build options: a network built with them again is the same one, fresh."""
        return {**self._options.to_dict(), "num_classes": self.num_classes}

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self._options.img_size[0], self._options.img_size[1]

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches per column and per row."""
        return self._options.grid_size

    def check_images(self, x: Tensor) -> None:
        """`UserError` unless `x` is (B, in_chans, height, width) as the network was built for."""
        wanted = (self._options.in_chans, *self._options.img_size)
        if x.dim() != 4 or tuple(x.shape[1:]) != wanted:
            raise UserError(
                f"images: shape {tuple(x.shape)} does not fit; this network takes (batch, {wanted[0]}, {wanted[1]}, "
                f"{wanted[2]}), that is in_chans={wanted[0]}, img_size=({wanted[1]}, {wanted[2]})"
            )

    def init_weights(self) -> None:
        """Fresh weights by the option `init`; also fills a network that was built on the meta device."""
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            self.init_module(module)
            if isinstance(module, RelativePosition):
                module.reset_parameters()

    def init_module(self, module: nn.Module) -> None:
        """Fresh weights of one layer, by the option `init`."""
        assert self._options.init is not None
        init_module(module, self._options.init)

    def _run(self, block: nn.Module, *args: Any) -> Tensor:
        """A block's output; its activations are computed again in the backward pass where that is asked for."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)  # type: ignore[no-any-return]
        return block(*args)  # type: ignore[no-any-return]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, d) to pooled features (B, d) or to logits (B, num_classes)."""
        x = x[:, 1:].mean(dim=1) if self._options.pool == "avg" else x[:, 0]
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        """The head (of the widest network)."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head (none for 0 classes); `global_pool` "avg" or "token" also changes the pooling."""
        changed = {"num_classes": num_classes, "pool": global_pool or self._options.pool}
        self._options = NetOptions.read({**self._options.to_dict(), **changed}, self.rules)
        self.num_classes = num_classes
        fresh = self._linear(self.embed_dim, num_classes) if num_classes else nn.Identity()
        self.init_module(fresh)
        self.head = fresh.to(self.cls_token.device, self.cls_token.dtype)

    def load_reference(self, state_dict: Mapping[str, Any], source: str) -> None:
        """Load a released network's weights under its own names, see `checkpoints.SOURCES`.

        `source`: "autoformer" or "prenas" into a supernet of family "autoformer" (it also selects the bias rule);
        "autoprox" into stand-alone networks of families "autoprox_vit" and "pit". Tables and positions are resampled
        when sizes differ, the head starts afresh when classes differ (one warning). `UserError` lists keys that are
        missing or unexpected.
        """
        load_reference(self, state_dict, source)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters to spare from weight decay besides vectors; relative tables are decayed, as in the references."""
        return {"cls_token", "pos_embed"} if self.pos_embed is not None else {"cls_token"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable


class StandaloneNetwork(ImageNetwork, ABC):
    """The network of one architecture, `arch`: no elastic code, layers of exactly its sizes, timm's model contract."""

    arch: Architecture
    default_cfg: dict[str, Any]  # timm's metadata, set by `tas_vit`; plain description otherwise
    pretrained_cfg: dict[str, Any]

    def _read(self, options: Mapping[str, Any]) -> NetOptions:
        """Read the build options; what only supernets have is ignored with a warning."""
        self._options = o = NetOptions.read(options, self.rules)
        if o.bias_rule != "regroup":
            warnings.warn(f"bias_rule={o.bias_rule!r} has no effect on a stand-alone network", stacklevel=3)
        self.num_classes = o.num_classes
        self.default_cfg = self.pretrained_cfg = describe(o)
        return o

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the tokens after the final norm, (B, N, d)."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W)."""
        return self.forward_head(self.forward_features(x))
