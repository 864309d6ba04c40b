"""Whose weights a proxy looks at: inside torch's wrappers, drawn anew, of no family; and where labels come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.initialise import METHODS
from lightning_tas.proxies.registry import proxies, proxy

ARCH = Architecture.vit(24, [1, 2], [1, 2])
SPACE = {"embed_dim": [16, 24], "depth": [1, 2], "num_heads": [1, 2], "mlp_ratio": [1, 2]}
BUILD: dict[str, Any] = {"num_classes": 5, "img_size": 32, "patch_size": 16}


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A process group of this process only, which DDP asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled ddp": lambda net: torch.compile(DistributedDataParallel(net)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_looked_through(wrapper: str, alone_in_a_group: None) -> None:
    """The classes, images and family that a network tells are those of the one inside."""
    net, supernet = tas.network(ARCH, **BUILD), tas.supernet(SPACE, **BUILD)
    wrap = WRAPPERS[wrapper]
    wrapped = wrap(net)
    for name in proxies():  # one after the other on the same wrapper: nothing of an earlier one is left in it
        assert tas.score_one(name, wrapped, batch_size=4).value == tas.score_one(name, net, batch_size=4).value, name
    for name in ("snip", "dss", "macs"):
        assert tas.score_one(name, wrap(supernet), ARCH).value == tas.score_one(name, supernet, ARCH).value
    for mode in ("exact", "inherited"):
        found = [tas.score_many(["snip"], one, [ARCH], mode=mode) for one in (wrap(supernet), supernet)]
        assert found[0].value("snip").tolist() == found[1].value("snip").tolist()


@pytest.mark.parametrize("init", ["default", *METHODS])
def test_drawn_weights_leave_nothing_of_the_trained_ones(init: str) -> None:
    """Also not in what a method does not draw: class token, positions, relative position tables."""
    for net in (tas.network(ARCH, relative_position=True, **BUILD), tas.supernet(SPACE, **BUILD)):
        before = [tas.score_one(name, net, ARCH, init=init).value for name in ("snip", "synflow", "dss")]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) + 3)
        assert [tas.score_one(name, net, ARCH, init=init).value for name in ("snip", "synflow", "dss")] == before
        fresh = tas.score_one("snip", None, ARCH, init=init, build={**BUILD, "relative_position": True}).value
        assert hasattr(net, "subnet") or fresh == before[0]


def test_normal_biases_are_not_all_zero() -> None:
    """T-Razor explains by them what this initialisation gains; norms start as (1, 0) all the same."""
    probe = tas.proxies.scorer.make_probe(None, ARCH, 0, init="normal", build=BUILD)
    for layer in probe.layers:
        bias = layer.module.bias
        assert isinstance(bias, torch.Tensor)
        assert bool((bias == 0).all()) == (layer.role == "norm"), layer.name
    bias = probe.net.get_parameter("blocks.0.attn.qkv.bias").detach()
    assert bias.std() == pytest.approx(1.0, rel=0.3)


class _Nameless(nn.Module):
    """A network that does not say how many classes it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, depth=2)
        self.blocks = self.inner.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_unknown_classes_need_labels() -> None:
    """Labels that are all 0 would be scores of another loss; who looks at none is not asked for them."""
    images = torch.randn(4, 3, 32, 32)
    with pytest.raises(UserError, match=r"^labels: .*num_classes.*give labels"):
        tas.score_one("snip", _Nameless(), images=images)
    assert tas.score_one("snip", _Nameless(), images=images, labels=torch.tensor([0, 6, 2, 1])).valid
    assert tas.score_one("jacob_cov", _Nameless(), images=images).valid


def test_all_proxies_on_a_network_of_no_family() -> None:
    """What needs an architecture says so in its reason; all others score."""
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, depth=2)
    images = torch.randn(4, 3, 32, 32)
    found = {name: tas.score_one(name, net, images=images) for name in proxies()}
    assert {name for name, score in found.items() if not score.valid} == {"macs", "sept", "ntsr", "snip_norm"}
    assert all("architecture" in str(found[name].reason) for name in ("macs", "sept", "ntsr", "snip_norm"))


def test_a_network_alone_has_no_rank() -> None:
    """What its first component says stands for it, not a constant."""
    net = tas.network(ARCH, **BUILD)
    for name, first in (("ntsr", "ntkt"), ("te_nas", "te_ntk"), ("dss_pp", "dss")):
        assert tas.score_one(name, net).value == tas.score_one(first, net).value


def test_metadata_follow_options() -> None:
    assert not proxy("snip_norm").needs.labels and proxy("snip_norm").under({"loss": "ce"}).needs.labels
    assert proxy("naswot").deterministic and not proxy("naswot").under({"redraw": True}).deterministic
    assert not proxy("knas").needs.per_sample and proxy("knas").under({"variant": "reference"}).needs.per_sample
    net = tas.network(ARCH, **BUILD)
    images = torch.randn(4, 3, 32, 32)
    one, two = (tas.score_one("snip_norm", net, images=images, labels=torch.tensor(labels), loss="ce").value
                for labels in ([0, 1, 2, 3], [4, 4, 1, 0]))  # fmt: skip
    assert one != two
    for name, one_ in proxies().items():
        assert one_.under({}).needs == one_.needs and one_.under({}).deterministic == one_.deterministic, name
