"""Weights from files and from other sizes: official checkpoints, resampled positions and tables, a new head.

Loading is strict: what cannot be placed or is missing is a `UserError` that lists the names. Only three differences
are bridged, because they have a meaning: another patch grid (positions and relative tables are resampled), another
number of classes (the head starts afresh, with one warning), and images that are not RGB under weights for RGB.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc
from timm.models import adapt_input_conv
from torch import Tensor

from lightning_tas.errors import UserError, typed, unknown
from lightning_tas.launch.files import Damaged, read_torch
from lightning_tas.supernets.other_files import identify
from lightning_tas.supernets.released import interleaved
from lightning_tas.supernets.weight_sets import AUTO, choose, sets_in, unwrapped

STATE_HASH = "state_sha256"
"""Entry of the metadata of our safetensors files: the `state_hash` of their tensors."""

# Names in the released AutoFormer and PreNAS networks, as regular expressions, and ours; then Auto-Prox's.
REFERENCE_NAMES = [
    (r"^patch_embed_super\.", "patch_embed."),
    (r"\.attn_layer_norm\.", ".norm1."),
    (r"\.ffn_layer_norm\.", ".norm2."),
    (r"\.(fc[12])\.", r".mlp.\1."),
    (r"\.rel_pos_embed_([kv])\.embeddings_table_v$", r".rel_pos_\1.vertical"),
    (r"\.rel_pos_embed_([kv])\.embeddings_table_h$", r".rel_pos_\1.horizontal"),
]
_AUTOPROX_NAMES = [
    (r"^patch_embed\.(projection|conv)\.", "patch_embed.proj."),
    (r"^transformers\.", "stages."),
    (r"\.attn\.qkv_transform\.", ".attn.qkv."),
    (r"\.attn\.projection\.", ".attn.proj."),
]


# timm's ViTs have our names; its PiTs say "transformers" and keep the pooling with the stage that follows it.
_TIMM_NAMES = [
    (r"^patch_embed\.conv\.", "patch_embed.proj."),
    (r"^transformers\.1\.pool\.", "pools.0."),
    (r"^transformers\.2\.pool\.", "pools.1."),
    (r"^transformers\.", "stages."),
]


class Source(NamedTuple):
    """Whose networks: of which families, supernets or stand-alone (None: into both), their names, the qkv bias rule of
    supernets, and what is classified ("token") where it is not what the families of ours do.
    """

    families: tuple[str, ...]
    supernets: bool | None
    names: list[tuple[str, str]]
    bias_rule: str | None = None
    pool: str | None = None


# AutoFormer cuts the qkv bias without regrouping it, PreNAS with: the weights were trained for their own rule.
SOURCES: dict[str, Source] = {
    "autoformer": Source(("autoformer",), True, REFERENCE_NAMES, "autoformer"),
    "prenas": Source(("autoformer",), True, REFERENCE_NAMES, "regroup"),
    "autoprox": Source(("autoprox_vit", "pit"), False, _AUTOPROX_NAMES),
    "timm": Source(("autoprox_vit", "autoformer", "pit"), None, _TIMM_NAMES, pool="token"),
}


def load_checkpoint_file(path: str | Path) -> dict[str, Any]:
    """The content of a ``.pth`` or ``.safetensors`` file, on the CPU, without running code from it.

    Official checkpoints hold their command line as an `argparse.Namespace`; exactly that class is allowed besides
    tensors and plain values. `UserError` when the file is missing or holds anything else.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"checkpoint: no file {str(path)!r}")
    others: list[str] = []
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        others = _other_classes(path)
        content = read_torch(path, [argparse.Namespace, *((_unread(), name) for name in others)])
    except Damaged as error:
        raise UserError(f"checkpoint: {str(path)!r} cannot be used: {error}") from error
    except Exception as error:
        # Both raise many kinds; to the user they are one: not a file of weights.
        what = identify(path)
        reason = f"it is {what}" if what is not None else _only_their_code(others) or _unpickling(error)
        raise UserError(f"checkpoint: {str(path)!r} is not a file of weights: {reason}") from error
    if others and not (isinstance(content, Mapping) and sets_in(content)):
        raise UserError(f"checkpoint: {str(path)!r} is not a file of weights: {_only_their_code(others)}")
    if not isinstance(content, Mapping):
        raise UserError(f"checkpoint: {str(path)!r} holds a {type(content).__name__}, not a mapping")
    return dict(content)


def _other_classes(path: Path) -> list[str]:
    """Names of the classes and functions in a checkpoint that torch would refuse to read it for."""
    return torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipfile.is_zipfile(path) else []


def _unread() -> type:
    """A class that stands for another one, which is neither imported nor run, while a file is read: an empty value."""

    class Unread:
        def __new__(cls, *args: Any) -> Any:
            # torch fills settings that are a kind of dict only where they are exactly one.
            return super().__new__(cls) if args else OrderedDict()

        def __init__(self, *args: Any) -> None:
            """Whatever the class takes."""

        def __setstate__(self, state: Any) -> None:
            """What it holds."""

    return Unread


def _only_their_code(names: Sequence[str]) -> str | None:
    if not names:
        return None
    more = " and others" if len(names) > 3 else ""
    return (
        f"it holds objects of {', '.join(sorted(names)[:3])}{more}, which only their own code can read; save the "
        "network's state_dict() instead"
    )


def _unpickling(error: Exception) -> str:
    """What is wrong with a pickle, without torch's advice to read it unsafely."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found is not None:
        return str(_only_their_code([found[1]]))
    known = type(error).__name__ not in ("UnpicklingError", "EOFError")
    return next(iter(str(error).splitlines()), type(error).__name__) if known else "it is of no format that is known"


def state_hash(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes, types and bytes of the tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a file; the format has no checksums, so they are compared with the `STATE_HASH` that ours say."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    state: dict[str, Any] = load_file(path)
    with safe_open(path, framework="pt") as file:
        expected = (file.metadata() or {}).get(STATE_HASH)
    if expected not in (None, state_hash(state)):
        raise Damaged(f"it is damaged: its tensors are not what {STATE_HASH} says")
    return state


def weights_of(
    content: Mapping[str, Any], weights: str = AUTO, own: Collection[str] = ()
) -> tuple[dict[str, Tensor], str]:
    """A state dict inside a checkpoint, and the entry that it was: "" for the checkpoint itself.

    `weights` chooses where there are several (`weight_sets.choose`); prefixes of wrappers are taken off the names,
    unless all of them are names of the network, `own`.
    """
    sets = sets_in(content)
    if not sets:
        odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
        raise UserError(f"checkpoint: not a state dict; these entries are no tensors: {odd[:5] or '(it is empty)'}")
    name = choose(list(sets), weights)
    return unwrapped(sets[name], own), name


def load_reference(net: Any, state_dict: Mapping[str, Any], source: str) -> None:
    """Load a released network's weights, under its own names, into `net`; a supernet adopts its bias rule.

    `UserError` for an unknown source, or one whose networks are of another family or kind than `net`.
    """
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    state = our_names(weights_of(state_dict)[0], source)
    check_source(net, source, state)
    if hasattr(net, "space") and not SOURCES[source].supernets:
        state = interleaved(state, net.bias_rule)
    load_weights(net, state)
    adopt_rule(net, source)


def check_source(net: Any, source: str, state: Mapping[str, Tensor]) -> None:
    """`UserError` where networks of `source`, one of which has the weights `state`, are of another kind than `net`."""
    found, elastic = SOURCES[source], hasattr(net, "space")
    if net.rules.family not in found.families or found.supernets not in (None, elastic):
        kinds = {True: "supernets", False: "stand-alone networks", None: "networks"}
        raise UserError(
            f"source: {source!r} has weights of {kinds[found.supernets]} of family {' or '.join(found.families)}; "
            f"this is one of the {kinds[elastic]} of family {net.rules.family}"
        )
    if found.pool not in (None, net.options["pool"]) and _classes(state) == _classes(net.state_dict()):
        raise UserError(
            f"model.pool: {net.options['pool']!r} is not what networks of source={source} have; "
            f"set model.pool={found.pool}"
        )


def adopt_rule(net: Any, source: str) -> None:
    """Make a supernet cut its qkv bias as the weights of `source` were trained."""
    rule = SOURCES[source].bias_rule
    if rule is not None:
        net.bias_rule = rule


def our_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The weights of networks of `source` under our names."""
    renamed = {}
    for name, value in state.items():
        for pattern, ours in SOURCES[source].names:
            name = re.sub(pattern, ours, name)
        renamed[name] = value
    return renamed


def load_weights(
    net: Any, state_dict: Mapping[str, Any], grid_size: tuple[int, int] | None = None, same_classes: bool = True
) -> None:
    """Load our own or renamed weights into a supernet or a stand-alone network, bridging grid, classes and channels.

    Without `same_classes` the head starts afresh, also where it is of the same size.

    `grid_size` is the checkpoint's (rows, columns) of patches, needed only where it cannot be read from the weights: a
    grid that is not square without relative position. `net` is unchanged when a `UserError` is raised.
    """
    own = net.state_dict()
    state, renew = fitted(net, weights_of(state_dict, own=own)[0], grid_size, same_classes)
    if renew:
        net.init_module(net.head)
    net.load_state_dict(state, strict=False)


def fitted(
    net: Any, given: Mapping[str, Tensor], grid_size: tuple[int, int] | None = None, same_classes: bool = True
) -> tuple[dict[str, Tensor], bool]:
    """The weights of `given` as `net` takes them, and whether its head starts afresh; nothing is loaded.

    `net` may be on the meta device. `UserError`, as for `load_weights`, that lists misfits and the options behind them.
    """
    own = net.state_dict()
    state = _adapt_channels(adapt_weights(given, net, grid_size), own)
    theirs, ours = _classes(state), _classes(own)
    fresh = theirs != ours or not same_classes
    if fresh:
        state = {k: v for k, v in state.items() if not k.startswith("head.")}
    missing = [k for k in own if k not in state and not (fresh and k.startswith("head."))]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k} {tuple(v.shape)} for {tuple(own[k].shape)}"
        for k, v in state.items()
        if k in own and v.shape != own[k].shape
    ]
    if missing or unexpected or shapes:
        parts = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        lines = [f"{what} ({len(names)}): {', '.join(names[:8])}" for what, names in parts.items() if names]
        options = _differences(given, own)
        raise UserError("checkpoint does not fit the network: " + "; ".join([*options, *lines]))
    if fresh:
        fate = "starts afresh" if ours else "is left out"
        why = f"{theirs} classes and the network {ours}" if theirs != ours else "other classes than the data"
        warnings.warn(f"the checkpoint has {why}: the head {fate}", stacklevel=4)
    return state, fresh


def _differences(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """The options and sizes in which the networks of two state dicts differ, as what to set."""
    theirs, ours = traits(state), traits(own)
    found = []
    for key, value in theirs.items():
        if key in ours and ours[key] != value:
            advice = f": set model.{key}={typed(value)}" if key in SETTABLE else ""
            found.append(f"{key} is {typed(value)} in the checkpoint and {typed(ours[key])} in the network{advice}")
    return found


# The options in `traits` that `model.*` sets; the rest are sizes of the space or of the architecture.
SETTABLE = ("patch_size", "relative_position", "abs_pos", "qkv_bias", "pre_norm")


def traits(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Options and sizes that names and shapes of a state dict tell: of a supernet those that it allocates."""
    found: dict[str, Any] = {
        "relative_position": any(name.endswith(".vertical") for name in state),
        "abs_pos": "pos_embed" in state,
        "qkv_bias": any(name.endswith("attn.qkv.bias") for name in state),
        "pre_norm": "norm.weight" in state,
    }
    patches = state.get("patch_embed.proj.weight")
    if patches is not None:
        found |= {"patch_size": patches.shape[-1], "embed_dim": len(patches)}
    numbers = [int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))]
    if numbers:
        found["depth"] = 1 + max(numbers)
    return found


def adapt_weights(state: Mapping[str, Tensor], net: Any, grid_size: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """`state` with positions and relative tables resampled to ``net.grid_size`` where they differ, else as given."""
    target = net.grid_size
    source = grid_size or _grid_of(state, target)
    adapted = dict(state)
    if source is None:
        return adapted
    for name, value in state.items():
        if name == "pos_embed" and source != target and value.dim() == 4:
            adapted[name] = _resample_map(value, target)
        elif name == "pos_embed" and source != target:
            adapted[name] = resample_abs_pos_embed(value, list(target), list(source), num_prefix_tokens=1)
        elif name.endswith((".vertical", ".horizontal")):
            axis = 0 if name.endswith(".vertical") else 1
            adapted[name] = resample_table(reach_table(value, source[axis]), source[axis], target[axis])
    return adapted


def _resample_map(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Positions as a map (1, C, gh, gw) on another grid, by timm's rule for those of plain ViTs."""
    return resample_abs_pos_embed_nhwc(positions.permute(0, 2, 3, 1), list(grid)).permute(0, 3, 1, 2)


def _adapt_channels(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the patch embedding of colour images turned into one of the network's channels, by timm's rule."""
    name = "patch_embed.proj.weight"
    if name not in state or name not in own or state[name].shape[1] != 3 or own[name].shape[1] == 3:
        return state
    return {**state, name: adapt_input_conv(own[name].shape[1], state[name])}


def reach_table(table: Tensor, side: int) -> Tensor:
    """A relative table (2 reach + 2, 64) that clips offsets at `reach`, as the equal one (2 side + 2, 64) of a grid.

    The released code clips at 14 patches whatever the image: fine-tuned at 384 px, a grid of 24, it has 30 rows still.
    """
    reach = (len(table) - 2) // 2
    if reach == side:
        return table
    offsets = torch.arange(-side, side + 1, device=table.device).clamp(-reach, reach)
    return torch.cat([table[:1], table[offsets + reach + 1]])


def resample_table(table: Tensor, old_side: int, new_side: int) -> Tensor:
    """A relative table (2 old + 2, 64) for a grid of another side, (2 new + 2, 64).

    An offset of o new patches spans o * old / new old ones (the image is the same), so rows are interpolated linearly
    there. Offsets of a whole side or more never occur, hence are never trained: sampling stops at the last trained row.
    Row 0 (class token) is kept.
    """
    if old_side == new_side:
        return table
    at = torch.arange(-new_side, new_side + 1, dtype=torch.float64, device="cpu") * old_side / new_side
    at = at.clamp(-(old_side - 1), old_side - 1).to(table.device) + old_side + 1
    low = at.floor().long()
    weight = (at - low).to(table.dtype)[:, None]
    rows = torch.lerp(table[low], table[(low + 1).clamp(max=len(table) - 1)], weight)
    return torch.cat([table[:1], rows])


def _classes(state: Mapping[str, Tensor]) -> int:
    return len(state["head.weight"]) if "head.weight" in state else 0


def _grid_of(state: Mapping[str, Tensor], target: tuple[int, int]) -> tuple[int, int] | None:
    """Patch grid of a checkpoint: that of its map of positions, or of its relative tables where its positions agree (or
    it has none), else `target` where it has as many patches, else the square of its positions, else None.
    """
    rows = [next((len(v) for k, v in state.items() if k.endswith(end)), None) for end in (".vertical", ".horizontal")]
    sides = None if rows[0] is None or rows[1] is None else ((rows[0] - 2) // 2, (rows[1] - 2) // 2)
    if "pos_embed" not in state:
        return sides
    if state["pos_embed"].dim() == 4:
        return state["pos_embed"].shape[2], state["pos_embed"].shape[3]
    tokens = state["pos_embed"].shape[1] - 1
    if sides is not None and sides[0] * sides[1] == tokens:
        return sides
    if target[0] * target[1] == tokens:
        return target
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else None
