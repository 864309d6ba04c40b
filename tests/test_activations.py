"""Activation memory: what autograd saves, network by network against sums over pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_tas as tas
from lightning_tas import Architecture, UserError
from lightning_tas.activations import activation_total, activations
from lightning_tas.analysis.memory import step_memory
from lightning_tas.spaces import Dimension, SearchSpace, isotropic
from lightning_tas.supernets import registry

TINY = {"img_size": 32, "patch_size": 8, "num_classes": 5}


def vit(family: str = "autoformer") -> SearchSpace:
    return isotropic("vit", family, embed_dim=(16, 24), depth=(1, 2, 3), num_heads=(1, 2), mlp_ratio=(1, 2.5))


def pit() -> SearchSpace:
    return tas.space("pit_ti").with_choices(
        base_dim=(4, 8), mlp_ratio=(2,), num_heads=(1, 2), depth=((1, 2), (1, 3), (1,))
    )


def mixed() -> SearchSpace:
    """A PiT whose MLP ratio is chosen block by block."""
    dimensions = [
        Dimension("base_dim", "network", (4, 8)),
        Dimension("num_heads", "stage", ((1, 2), (2, 4))),
        Dimension("depth", "stage", ((1, 2), (2, 3))),
        Dimension("mlp_ratio", "block", (1, 2)),
    ]
    return SearchSpace("mixed", "pit", dimensions, stages=2)


def meta(space: SearchSpace, **options: Any) -> Any:
    with torch.device("meta"):
        return tas.supernet(space, **{**TINY, **options})


def per_image(net: Any, arch: Architecture) -> int:
    """The growth of `step_memory` from a batch of two to one of five, by image."""
    two, five = (step_memory(net, arch, size).activations for size in (2, 5))
    assert (five - two) % 3 == 0
    return (five - two) // 3


@pytest.mark.parametrize(
    ("space", "options"),
    [
        (vit(), {"drop_path_rate": 0.1}),
        (vit(), {"drop_rate": 0.1, "attn_drop_rate": 0.1, "pre_norm": False, "pool": "token", "abs_pos": False}),
        (vit("autoprox_vit"), {"scale": True}),
        pytest.param(pit(), {"drop_path_rate": 0.1}, marks=pytest.mark.slow),
        (mixed(), {"pool": "avg", "drop_path_rate": 0.1}),
    ],
    ids=["autoformer", "dropout and post-norm", "autoprox_vit", "pit", "mixed"],
)
def test_sums_equal_what_a_training_step_of_the_supernet_keeps(space: SearchSpace, options: dict[str, Any]) -> None:
    net = meta(space, **options)
    total = activation_total(space, net)
    archs = [space.smallest(), space.largest(), *space.sample(5, n=2)]
    expected = [per_image(net, arch) for arch in archs]
    assert total(space.encode(archs)).tolist() == expected
    assert activations(archs[-1], net) == expected[-1]
    assert len(set(expected)) > 1


@pytest.mark.parametrize("space", [vit(), mixed()], ids=["autoformer", "mixed"])
def test_bytes_are_those_of_the_tensors_kept_on_the_processor(space: SearchSpace) -> None:
    """An independent count on real tensors, with the attention that is written out, as on the meta device."""
    net = tas.supernet(space, **TINY).train()
    arch = space.sample(1)
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    counted = []
    for size in (2, 3):
        seen: dict[int, Tensor] = {}

        def pack(tensor: Tensor, seen: dict[int, Tensor] = seen) -> Tensor:
            return seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        with saved_tensors_hooks(pack, lambda tensor: tensor), sdpa_kernel(SDPBackend.MATH):
            net(torch.ones(size, 3, 32, 32), arch)
        counted.append(sum(t.untyped_storage().nbytes() for key, t in seen.items() if key not in weights))
    assert counted[1] - counted[0] == activations(arch, net)
    assert counted == [step_memory(meta(space), arch, size).activations for size in (2, 3)]


def test_fresh_networks_are_counted_without_a_supernet() -> None:
    arch = Architecture.vit(16, [1, 2], [2, 1])
    net = tas.network(arch, **TINY)
    assert activations(arch, TINY) == activations(arch, net)
    bigger = {**TINY, "img_size": 64}
    assert activations(arch, bigger) > 3 * activations(arch, TINY)


def test_the_global_state_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    activation_total(vit(), TINY)
    assert torch.equal(before, torch.get_rng_state())


def test_a_family_whose_networks_are_no_sums_is_refused() -> None:
    class Wasteful(tas.network(vit().smallest(), **TINY).__class__):  # type: ignore[misc]
        """Keeps more in each block the more blocks there are."""

        def _run(self, block: nn.Module, x: Tensor) -> Tensor:
            for _ in range(len(self.blocks)):
                x = x * x.detach().cos().requires_grad_()
            return super()._run(block, x)  # type: ignore[no-any-return]

    known = registry._FAMILIES["autoformer"]
    registry._FAMILIES["autoformer"] = known._replace(network=Wasteful)
    try:
        with pytest.raises(
            UserError, match=r"^activations: those of 'autoformer' networks are no sum over their blocks"
        ):
            activation_total(vit(), TINY)
    finally:
        registry._FAMILIES["autoformer"] = known


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="expected a network or its build options, not a int"):
        activations(vit().smallest(), 3)
