"""What a user has set around a score: it neither changes the score nor is changed by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import backends

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.proxies.probe import quiet

ARCH = Architecture.vit(16, [1, 2], [1, 2])
BUILD: dict[str, Any] = {"num_classes": 5, "img_size": 32}
NET = tas.network(ARCH, **BUILD)
PLACES = {
    "cuda.matmul": backends.cuda.matmul,
    "cudnn": backends.cudnn,
    "cudnn.conv": backends.cudnn.conv,
    "cudnn.rnn": backends.cudnn.rnn,
    "mkldnn.matmul": backends.mkldnn.matmul,
    "mkldnn.conv": backends.mkldnn.conv,
    "mkldnn.rnn": backends.mkldnn.rnn,
}


def precisions() -> dict[str, str]:
    """What every backend says of products of float32."""
    return {"all": backends.fp32_precision, **{name: place.fp32_precision for name, place in PLACES.items()}}


def answers() -> list[dict[str, str]]:
    """What they say under every general setting: who was told something of its own does not follow."""
    general, found = backends.fp32_precision, []
    for precision in ("tf32", "ieee", general):
        backends.fp32_precision = precision
        found.append(precisions())
    return found


@pytest.fixture
def restored() -> Iterator[None]:
    """Backends as torch starts with them, before and after."""

    def reset() -> None:
        torch.set_float32_matmul_precision("highest")
        for place in PLACES.values():
            place.fp32_precision = "none"
        backends.fp32_precision = "none"

    reset()
    yield
    reset()
    backends.cudnn.allow_tf32 = True


SETTINGS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "no TF32 in cuDNN": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "all": lambda: setattr(backends, "fp32_precision", "tf32"),
    **{name: lambda place=place: setattr(place, "fp32_precision", "tf32") for name, place in PLACES.items()},  # type: ignore[misc]
    "exact in one place": lambda: setattr(backends.cuda.matmul, "fp32_precision", "ieee"),
    "bfloat16 on CPUs": lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_precision_is_exact_inside_and_left_as_it_was(setting: str, restored: None) -> None:
    """By torch's old switches as by its new ones, which do not mix; who follows the general setting still does."""
    exact = tas.score_one("snip", None, ARCH, build=BUILD).value
    SETTINGS[setting]()
    before = answers()
    assert tas.score_one("snip", None, ARCH, build=BUILD).value == exact
    assert answers() == before
    with pytest.raises(ZeroDivisionError), quiet():
        assert set(precisions().values()) == {"ieee"}
        raise ZeroDivisionError
    assert answers() == before


def scores() -> list[float]:
    """Of a network that is drawn and of one given, whose largest relative is drawn."""
    names = [name for name in tas.proxies() if name not in ("te_regions", "plain")]
    fresh = [tas.score_one(name, None, ARCH, build=BUILD, batch_size=4).value for name in names]
    return [*fresh, *(tas.score_one(name, NET, batch_size=4).value for name in names)]


@pytest.mark.slow
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_defaults_for_new_tensors_do_not_matter(default: torch.dtype | str) -> None:
    """A seed means the same draws under any default dtype and device ("cuda" has the same code paths as "meta")."""
    expected, before = scores(), torch.get_default_dtype()
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        found = scores()
        assert default in (torch.get_default_dtype(), str(torch.get_default_device()))
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert found == expected


def test_buffers_of_the_user_do_not_matter() -> None:
    net = tas.network(ARCH, **BUILD)
    before = {name: tas.score_one(name, net).value for name in tas.proxies()}
    net.register_buffer("counter", torch.zeros(3))
    net.blocks[0].register_buffer("other", torch.zeros(2, dtype=torch.int64))
    assert {name: tas.score_one(name, net).value for name in tas.proxies()} == before
