"""The PiT spaces: their sizes, their members, and the choices that no network can realise."""

from __future__ import annotations

import itertools

import pytest

import lightning_tas as tas
from lightning_tas.catalogue import PUBLISHED, SPACES
from lightning_tas.supernets.pit import check_arch

HEADS = {"pit_ti": (2, 4, 8), "pit_xs": (2, 4, 8), "pit_s": (3, 6, 12)}
BASES = {"pit_ti": (16, 24, 32, 40), "pit_xs": (40, 48, 56, 64), "pit_s": (36, 48, 60, 72)}


@pytest.mark.parametrize("name", HEADS)
def test_sizes_and_choices(name: str) -> None:
    space = tas.space(name)
    assert space.size() == 4 * 4 * 27 * 10 == 4_320
    assert tas.space(name, divisible=False).size() == 4 * 4 * 27 * 27 == 11_664
    archs = list(space)
    assert {arch.base_dim for arch in archs} == set(BASES[name])
    assert {arch.mlp_ratio[0] for arch in archs} == {2, 4, 6, 8}
    assert {arch.depths for arch in archs} == set(itertools.product((1, 2, 3), (4, 6, 8), (2, 4, 6)))
    triples = {tuple(stage.num_heads for stage in arch.stages) for arch in archs}
    assert len(triples) == 10 and triples == set(itertools.combinations_with_replacement(HEADS[name], 3))


def test_what_the_divisibility_leaves_out_no_network_can_be() -> None:
    """Of the whole product exactly the members of the space can be built."""
    space, whole = tas.space("pit_ti"), tas.space("pit_ti", divisible=False)
    drawn = whole.sample(seed=0, n=60)
    assert 10 < sum(arch in space for arch in drawn) < 50
    for arch in drawn:
        if arch in space:
            assert check_arch(arch) is arch
            continue
        with pytest.raises(tas.UserError, match="is no multiple of"):
            check_arch(arch)


def test_the_subset_of_auto_prox() -> None:
    space = tas.space("autoprox_pit")
    archs = list(space)
    assert len(archs) == space.size() == 1_600
    depths = "166 184 246 264 266 282 284 346 364 382"
    assert {arch.depths for arch in archs} == {tuple(int(d) for d in text) for text in depths.split()}
    assert all(arch in tas.space("pit_ti") for arch in archs)


def test_published_networks_are_members() -> None:
    for name, arch in PUBLISHED.items():
        if arch.family == "pit":
            assert arch in tas.space(SPACES[name]), name
