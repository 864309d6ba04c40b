"""Activation memory: the bytes that a training step keeps for its backward pass, for each image of the batch.

Counted on the meta device, so there is neither arithmetic nor memory. What counts are the distinct storages that
autograd saves, parameters excepted; per image is what one more image adds: the storages of a batch of three less those
of a batch of two. (A batch of one is no measure: some transposed views of it are contiguous and need no copy.) What
does not grow with the batch, such as position indices, is left out.

The sum over the pieces of a network is exact: every storage is first saved by one piece, which does not depend on what
comes before or after it. `activation_total` verifies it on random members.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_tas.additive import Total
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.pieces import Key, Pieces, piece_blocks, watched
from lightning_tas.spaces import SearchSpace
from lightning_tas.supernets import ElasticNetwork, ImageNetwork, network

# Networks on which the sum over pieces is compared with counting.
CHECKS = 3


def saved_storages(
    net: ImageNetwork, arch: Architecture | None, batch_size: int, saved: Callable[[int], None] | None = None
) -> dict[int, Tensor]:
    """One tensor for every distinct storage that autograd saves in a training-mode forward pass, parameters excepted.

    net: a network on the meta device, a supernet with `arch` or a stand-alone one with None. `saved` is called with the
    bytes of each storage at the moment when it is saved first. The network's mode is restored.
    """
    own = {p.untyped_storage()._cdata for p in net.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = tensor  # alive, so that no later storage takes its place in memory
            if saved is not None:
                saved(storage.nbytes())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    images = torch.empty(batch_size, net.options["in_chans"], *net.img_size, device="meta")
    was_training = net.training
    net.train()
    try:
        with saved_tensors_hooks(pack, unpack):
            logits: Any = net(images) if arch is None else net(images, arch)
    finally:
        net.train(was_training)
    del logits
    return kept


def activations(arch: Architecture, net_or_options: Any = None) -> int:
    """Bytes of activations [float32] that a training step of `arch` keeps for each image.

    Args:
        arch: an architecture of a registered family.
        net_or_options: the supernet it is cut from or a network of the same build options, or a mapping of them; None
            for the defaults.
    """
    return sum(_by_piece(arch, net_or_options))


def activation_total(space: SearchSpace, net_or_options: Any = None) -> Total:
    """`activations` of every network of a space, as a sum over its codes; exact.

    A few networks are counted piece by piece (tens of milliseconds each), as many as show every piece.

    Raises:
        UserError: a family whose networks are no such sums, found by comparing random members.
    """
    pieces = Pieces(space)
    values: dict[Key, float] = {}
    first = _first_block(pieces, net_or_options)
    for row in pieces.examples(deep=False):
        keys = pieces.keys(row)
        # A block that is known already, or comes twice, need not run again.
        known = {i for i, key in enumerate(keys) if key[0] == "block" and (key in values or key in keys[:i])}
        found = _by_piece(space.decode(row)[0], net_or_options, known)
        # The first block of all has no stochastic depth; the difference is counted with the stem.
        found[0], found[1] = found[0] + first, found[1] - first
        values |= {key: found[i] for i, key in enumerate(keys) if i not in known}
    total = pieces.total(values)
    for row in space.sample_codes(0, CHECKS):
        counted, added = activations(space.decode(row)[0], net_or_options), int(total(row[None])[0])
        if counted != added:
            raise UserError(
                f"activations: those of {space.family!r} networks are no sum over their blocks ({counted:,} bytes "
                f"counted, {added:,} by adding up); give the quantity as a function of codes instead"
            )
    return total


def _first_block(pieces: Pieces, net_or_options: Any) -> int:
    """Bytes that the first block keeps more than a later one of the same choices; 0 where there is only one block."""
    row = max(pieces.examples(deep=True), key=lambda row: pieces.depths(row)[0])
    depth = pieces.depths(row)[0]
    if depth == 1:
        return 0
    found = _by_piece(pieces.space.decode(pieces.repeated(row))[0], net_or_options)
    return found[1] - found[2]


def _by_piece(arch: Architecture, net_or_options: Any, skipped: Collection[int] = ()) -> list[int]:
    """Bytes per image of the pieces of a network, see `pieces`; the blocks that are the pieces `skipped` do not run."""
    with torch.device("meta"):
        net = network(arch, **build_options(net_or_options))
    for piece, block in piece_blocks(net, arch.depths).items():
        if piece in skipped:
            block.forward = lambda x: x  # type: ignore[assignment]
    two, three = (_sums(net, arch.depths, batch_size) for batch_size in (2, 3))
    return [b - a for a, b in zip(two, three, strict=True)]


def _sums(net: Any, depths: Sequence[int], batch_size: int) -> list[int]:
    """Bytes that each piece of a network keeps for a batch."""
    sums, at = [0] * (1 + sum(depths) + len(depths)), 0

    def begin(piece: int) -> None:
        nonlocal at
        at = piece

    def saved(size: int) -> None:
        sums[at] += size

    with watched(net, depths, begin):
        saved_storages(net, None, batch_size, saved)
    return sums


def build_options(given: Any) -> dict[str, Any]:
    """The options of the stand-alone networks that `given` stands for."""
    if isinstance(given, nn.Module):
        options = dict(given.options)  # type: ignore[arg-type]
        return options | (
            {"allocated": given.allocated, "bias_rule": "regroup"} if isinstance(given, ElasticNetwork) else {}
        )
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"activations: expected a network or its build options, not a {type(given).__name__}")
    return dict(given or {})
