"""Closed-form costs against counting: parameters of extracted networks, operations executed, published tables."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_tas as tas
from lightning_tas import Architecture
from lightning_tas.errors import UserError
from lightning_tas.spaces import Dimension, SearchSpace, isotropic

ATTENTION = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)


class MacCounter(TorchDispatchMode):
    """Counts the multiply-accumulates of every product that runs; refuses product-like operators it cannot count."""

    macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.macs += self.count(func._overloadpacket.__name__, args, out)
        return out

    @staticmethod
    def count(name: str, args: Any, out: Any) -> int:
        if name in ("mm", "bmm", "matmul"):
            return args[0].numel() * args[1].shape[-1]
        if name in ("addmm", "baddbmm"):
            return args[1].numel() * args[2].shape[-1]
        if name == "linear":
            return args[0].numel() * args[1].shape[0]
        if name == "convolution":
            return out.numel() * math.prod(args[1].shape[1:])
        if name in ATTENTION:
            q, k, v = args[:3]
            return q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        doubtful = any(word in name for word in ("mm", "mv", "dot", "conv", "attention", "einsum", "linear"))
        assert not doubtful, f"the counter does not know the operator {name}"
        return 0


def executed(function: Any, *args: Any) -> int:
    with torch.no_grad(), MacCounter() as counter:
        function(*args)
    return counter.macs


def numel(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# --- the counter itself -----------------------------------------------------------------------------------------------


def test_counter_on_known_shapes() -> None:
    x, y = torch.ones(5, 7), torch.ones(7, 3)
    batch = torch.ones(2, 5, 7)
    assert executed(torch.mm, x, y) == 5 * 7 * 3
    assert executed(torch.matmul, batch, y) == 2 * 5 * 7 * 3
    assert executed(torch.bmm, batch, torch.ones(2, 7, 3)) == 2 * 5 * 7 * 3
    assert executed(F.linear, batch, torch.ones(3, 7), torch.ones(3)) == 2 * 5 * 7 * 3
    assert executed(F.linear, batch, torch.ones(3, 7)) == 2 * 5 * 7 * 3
    assert executed(torch.einsum, "bij,jk->bik", batch, y) == 2 * 5 * 7 * 3
    convolution = torch.nn.Conv2d(4, 6, 3, stride=2, groups=2)
    assert executed(convolution, torch.ones(1, 4, 9, 9)) == 6 * 4 * 4 * (2 * 9)
    assert executed(lambda: x.sum() + x.mean() * 2) == 0


@pytest.mark.parametrize(
    ("backend", "value_dim"),
    [(SDPBackend.FLASH_ATTENTION, 16), (SDPBackend.MATH, 16), (SDPBackend.MATH, 8)],  # the first wants equal widths
)
def test_counter_on_attention(backend: SDPBackend, value_dim: int) -> None:
    q, k, v = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, value_dim)
    with sdpa_kernel(backend):
        assert executed(F.scaled_dot_product_attention, q, k, v) == 2 * 3 * 5 * 7 * (16 + value_dim)


def test_counter_refuses_what_it_cannot_count() -> None:
    with pytest.raises(AssertionError, match="does not know the operator dot"):
        executed(torch.dot, torch.ones(3), torch.ones(3))


# --- closed form against counting -------------------------------------------------------------------------------------

SPACE = isotropic(
    "toy",
    embed_dim=[40, 72],
    depth=[1, 3],
    num_heads=[1, 2],
    mlp_ratio=[0.55, 1, 2.5],
    allocated={"embed_dim": 80, "num_heads": 3, "depth": 4, "mlp_ratio": 3},
)
MIXED = Architecture.vit(72, [2, 1, 2], [0.55, 2.5, 1])
PROX = isotropic(
    "toy", "autoprox_vit", embed_dim=[42, 72], depth=[1, 3], num_heads=[2, 3], mlp_ratio=[0.55, 1, 2.5]
).with_choices(allocated={"embed_dim": 80, "depth": 4})
PIT = tas.space(
    "pit_ti", base_dim=(6, 8), mlp_ratio=(0.55, 1, 2.5), num_heads=(1, 2, 4), depth=(1, 2), allocated={"base_dim": 10}
)
SPACES = {"autoformer": SPACE, "autoprox_vit": PROX, "pit": PIT}


SWITCHES = [
    (MIXED, {"relative_position": relative, "abs_pos": absolute, "qkv_bias": bias, "pool": pool})
    for relative, absolute, bias, pool in itertools.product(
        [True, False], [True, False], [True, False], ["avg", "token"]
    )
]
SWITCHES += [
    (space.sample(seed=3), {"abs_pos": absolute, "qkv_bias": bias, "pool": pool})
    for space in (PROX, PIT)
    for absolute, bias, pool in itertools.product([True, False], [True, False], ["avg", "token"])
]
SHAPES = itertools.product(
    [SPACE.smallest(), MIXED, SPACE.largest()]
    + [arch for space in (PROX, PIT) for arch in (space.smallest(), space.sample(seed=1), space.largest())],
    [
        {},
        {"img_size": (32, 48), "patch_size": 8},
        {"img_size": (48, 32), "patch_size": 8, "in_chans": 1, "num_classes": 3},
        {"img_size": 28, "patch_size": 4, "in_chans": 5, "num_classes": 10},
        {"img_size": (30, 22), "patch_size": 7, "num_classes": 0},  # pixels at the margins are not seen
        {"pre_norm": False},
        {"scale": True},
        {"patch_stride": 5},
    ],
)


@pytest.mark.filterwarnings("ignore:img_size .* (is not a multiple|does not fit)")
@pytest.mark.parametrize(("arch", "options"), [*SWITCHES, *SHAPES], ids=lambda v: v.id if hasattr(v, "id") else str(v))
def test_cost_equals_counting(arch: Architecture, options: dict[str, Any]) -> None:
    options = {"img_size": 32, "patch_size": 8, "num_classes": 7, **options}
    net = tas.supernet(SPACES[arch.family], drop_path_rate=0.0, **options).eval()
    sub, alone = net.subnet(arch).eval(), tas.network(arch, **options).eval()
    image = torch.randn(1, options.get("in_chans", 3), *net.img_size)
    counted = executed(sub, image)
    assert counted == executed(alone, image)

    explicit_options = {k: v for k, v in options.items() if k != "scale"}
    for found in (
        tas.cost(arch, net, count_rpe="executed"),
        tas.cost(arch, sub, count_rpe="executed"),
        tas.cost(arch, count_rpe="executed", **explicit_options),
    ):
        assert found.params == numel(sub) == numel(alone)
        assert found.macs == counted

    # Without relative position the same architecture executes what the table convention counts.
    plain = tas.network(arch, **{**options, "relative_position": False}).eval()
    assert tas.cost(arch, net).macs == executed(plain, image)
    if net.options["relative_position"]:
        tokens, q = 1 + math.prod(net.grid_size), 64 * sum(arch.num_heads)
        assert tas.cost(arch, net, count_rpe="explicit").macs - tas.cost(arch, net).macs == 2 * tokens**2 * q
    else:
        assert len({tas.cost(arch, net, count_rpe=c).macs for c in (False, "explicit", "executed")}) == 1  # type: ignore[call-overload]


@pytest.mark.parametrize("count_rpe", [False, "explicit", "executed"])
@pytest.mark.parametrize("family", SPACES)
def test_codes_equal_architectures(family: str, count_rpe: Any) -> None:
    space = SPACES[family]
    net = tas.supernet(space, img_size=(32, 48), patch_size=8, num_classes=7, qkv_bias=False)
    archs = [*space.sample(seed=1, n=200), space.smallest(), space.largest()]
    codes = space.encode(archs)
    one_by_one = [tas.cost(arch, net, count_rpe=count_rpe) for arch in archs]
    for table in (tas.cost(codes, net, count_rpe=count_rpe), tas.cost(archs, net, count_rpe=count_rpe)):
        assert table.params.dtype == table.macs.dtype == np.int64
        assert table.params.tolist() == [c.params for c in one_by_one]
        assert table.macs.tolist() == [c.macs for c in one_by_one]
    assert len(set(table.macs.tolist())) > 20  # Auto-Prox's ViT costs the same for any number of heads
    options: dict[str, Any] = {"img_size": (32, 48), "patch_size": 8, "num_classes": 7, "qkv_bias": False}
    assert (tas.cost(codes.astype(np.int64), space, count_rpe=count_rpe, **options).macs == table.macs).all()
    assert tas.cost([], net).params.shape == (0,)


@pytest.mark.parametrize("heads_scope", ["block", "stage", "network"])
@pytest.mark.parametrize("ratio_scope", ["block", "stage", "network"])
def test_codes_of_choices_made_once_for_all_blocks(heads_scope: Any, ratio_scope: Any) -> None:
    dimensions = [
        Dimension("embed_dim", "stage", (40, 72)),
        Dimension("depth", "stage", (1, 3)),
        Dimension("num_heads", heads_scope, (1, 2)),
        Dimension("mlp_ratio", ratio_scope, (0.55, 2.5)),
    ]
    space = SearchSpace("once", "autoformer", dimensions)
    archs = space.sample(seed=0, n=40)
    assert tas.cost(space.encode(archs), space).params.tolist() == [tas.cost(arch).params for arch in archs]
    for lacking in (0, 2, 3):
        less = SearchSpace("less", "autoformer", dimensions[:lacking] + dimensions[lacking + 1 :])
        with pytest.raises(UserError, match=f"it has no {dimensions[lacking].name}"):
            tas.cost(less.sample_codes(0, 3), less)
    twice = SearchSpace("twice", "autoformer", dimensions, stages=2)
    with pytest.raises(UserError, match="it has 2 stages"):
        tas.cost(twice.sample_codes(0, 3), twice)


def test_codes_of_the_base_space() -> None:
    space = tas.space("autoformer_base")
    codes = space.sample_codes(3, 100)
    table = tas.cost(codes, space)
    assert table.params.tolist() == [tas.cost(arch).params for arch in space.decode(codes)]


def test_macs_grow_with_the_image_and_params_with_the_classes() -> None:
    arch = tas.space("autoformer_tiny").smallest()
    small, large = tas.cost(arch, img_size=224).macs, tas.cost(arch, img_size=448).macs
    assert large > small * (28 * 28 + 1) / (14 * 14 + 1)  # more than linear in tokens
    assert tas.cost(arch, num_classes=10).params == tas.cost(arch).params - 990 * 193
    assert tas.cost(arch, num_classes=0).params == tas.cost(arch).params - 1000 * 193


# --- published numbers ------------------------------------------------------------------------------------------------


def vit(depth: int, width: int, heads: list[int], ratios: list[float]) -> Architecture:
    assert len(heads) == len(ratios) == depth
    return Architecture.vit(width, heads, ratios)


def released(depth: int, width: int, heads: str, ratios: str) -> Architecture:
    """Heads and ratios as lists of digits; of ratios a 'h' behind a digit adds a half."""
    numbers = [float(r) for r in ratios.replace("h", ".5").split()]
    return vit(depth, width, [int(h) for h in heads.split()], numbers)


AUTOFORMER = {
    "T": (released(13, 192, "3 3 3 3 3 3 3 3 3 3 4 3 3", "3h 3h 3 3h 3 3 4 4 3h 4 3h 4 3h"), 5_867_944, 1.28, 1.48),
    "S": (released(13, 384, "6 6 5 7 5 5 5 6 6 7 7 6 7", "3 3h 3 3h 4 4 4 4 4 4 4 3h 4"), 22_891_432, 4.77, 5.16),
    "B": (
        released(14, 576, "9 9 9 9 9 10 9 9 10 9 10 9 9 10", "3h 3h 4 3h 4 3h 3h 3 4 4 3 4 3 3h"),
        53_691_688,
        11.05,
        11.69,
    ),
}
TF_TAS = [
    (released(13, 192, "4 3 3 3 3 4 4 3 3 3 4 3 3", "3h 4 3h 3h 4 3h 3h 3h 4 4 4 4 3h"), 6_200_776),
    (released(14, 384, "6 6 6 6 7 6 5 7 5 5 5 7 6 7", "4 4 4 3 4 3 3 3h 4 3h 3h 4 3 3h"), 23_935_336),
    (
        released(15, 576, "9 10 10 10 10 10 10 9 9 10 9 9 9 9 9", "3 3h 4 4 3 4 3 3 3h 3 3 3h 4 3 4"),
        56_470_792,
    ),
]
# bin: (depth, width, heads, ratios, parameters)
PRENAS = {
    "T6": (12, 192, "4 4 4 4 3 3 3 3 3 4 3 4", "4 4 4 4 4 3h 3h 4 4 3h 4 4", 5_994_760),
    "T7": (12, 216, "4 4 4 4 4 3 3 3 4 4 3 4", "4 3h 4 3h 3h 3h 3h 3h 3h 3h 3h 3h", 6_997_192),
    "T8": (12, 240, "3 3 3 3 3 3 3 3 3 3 3 3", "4 3h 4 4 3h 3h 3h 4 4 3h 4 3h", 7_996_552),
    "T9": (12, 240, "4 4 4 4 4 4 4 4 4 4 4 4", "4 4 4 4 4 3h 4 4 4 3h 4 4", 8_967_016),
    "T10": (14, 240, "4 4 4 4 4 3 3 3 4 4 3 4 3 4", "4 4 4 4 4 3h 3h 4 4 3h 4 3h 4 4", 9_978_232),
    "T11": (14, 240, "4 4 4 4 4 4 4 4 4 4 4 4 4 4", "4 4 4 4 4 4 4 4 4 4 4 4 4 4", 10_517_272),
    "S18": (13, 320, "7 7 7 7 7 7 7 7 6 7 5 6 5", "4 4 3h 4 3h 4 4 3h 4 4 3h 4 4", 17_991_400),
    "S23": (13, 384, "7 7 7 7 5 7 7 5 6 5 5 6 5", "4 4 3h 4 3h 4 3h 3h 4 4 3 4 3h", 22_989_928),
    "S28": (13, 448, "7 7 7 7 5 7 7 5 6 5 5 6 5", "4 4 3 4 3 3h 3 3 4 3 3 4 3", 27_976_008),
    "S33": (14, 448, "7 7 7 7 7 7 7 7 5 7 5 6 5 7", "4 4 3h 4 3h 4 4 3h 4 4 3h 4 4 3h", 32_981_640),
    "B42": (14, 528, "9 9 9 9 9 9 9 9 9 9 9 9 9 9", "3 3 3 3 3 3 3 3 3 3 3 3 3h 3", 41_966_944),
    "B54": (14, 576, "9 9 10 9 9 10 9 9 9 9 9 9 10 9", "3h 4 3h 3h 3h 4 3h 3h 3h 3h 4 3 3h 4", 53_876_104),
    "B66": (14, 624, "9 10 10 9 9 10 10 9 10 9 9 9 10 10", "4 4 3h 4 4 4 4 4 4 4 4 4 4 4", 65_916_448),
}


@pytest.mark.parametrize("name", AUTOFORMER)
def test_autoformer_networks(name: str) -> None:
    arch, params, giga, giga_relative = AUTOFORMER[name]
    assert tas.cost(arch).params == params
    assert round(tas.cost(arch).macs / 1e9, 2) == giga
    assert round(tas.cost(arch, count_rpe="explicit").macs / 1e9, 2) == giga_relative


def test_tf_tas_networks() -> None:
    assert [tas.cost(arch).params for arch, _ in TF_TAS] == [params for _, params in TF_TAS]


@pytest.mark.parametrize("name", PRENAS)
def test_prenas_candidates(name: str) -> None:
    depth, width, heads, ratios, params = PRENAS[name]
    assert tas.cost(released(depth, width, heads, ratios)).params == params


@pytest.mark.parametrize(
    ("name", "giga", "giga_relative"), [("T6", 1.32, 1.53), ("S23", 4.80, 5.19), ("B54", 11.08, 11.72)]
)
def test_prenas_macs(name: str, giga: float, giga_relative: float) -> None:
    arch = released(*PRENAS[name][:4])
    assert round(tas.cost(arch).macs / 1e9, 2) == giga
    assert round(tas.cost(arch, count_rpe="explicit").macs / 1e9, 2) == giga_relative


@pytest.mark.parametrize(
    ("name", "width", "heads", "mega", "giga"),
    [("tiny", 192, 3, 5.7, 1.26), ("small", 384, 6, 22.1, 4.6), ("base", 768, 12, 86.6, 17.6)],
)
def test_deit(name: str, width: int, heads: int, mega: float, giga: float) -> None:
    found = tas.cost(Architecture.vit(width, [heads] * 12, [4] * 12), relative_position=False, pool="token")
    assert round(found.params / 1e6, 1) == mega
    assert found.macs / 1e9 == pytest.approx(giga, rel=0.01)
    with torch.device("meta"):
        assert found.params == numel(timm.create_model(f"deit_{name}_patch16_224"))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("autoformer_tiny", 5_366_056, 10_517_272),
        ("autoformer_small", 13_057_000, 34_790_440),
        ("autoformer_base", 41_688_000, 76_882_000),
        ("autoformer_base_paper", 39_793_000, 76_882_000),
    ],
)
def test_ranges_of_the_spaces(name: str, low: int, high: int) -> None:
    space = tas.space(name)
    ends = tas.cost([space.smallest(), space.largest()])
    assert ends.params.tolist() == pytest.approx([low, high], abs=600)  # published to the kilo-parameter


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    arch = SPACE.smallest()
    with pytest.raises(UserError, match="Did you mean 'num_classes'"):
        tas.cost(arch, num_clases=3)  # type: ignore[call-overload]
    with pytest.raises(UserError, match="count_rpe"):
        tas.cost(arch, count_rpe="all")  # type: ignore[call-overload]
    with pytest.raises(UserError, match="pool"):
        tas.cost(arch, pool="max")
    with pytest.raises(UserError, match="smaller than one patch"):
        tas.cost(arch, img_size=8)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"patch_size": 0}, "patch_size: 0"),
        ({"num_classes": 2.5}, "num_classes: 2.5"),
        ({"img_size": "large"}, "img_size: .*height, width"),
        ({"img_size": (224,)}, "img_size: .*height, width"),
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):
            tas.cost(arch, **options)
    for nothing in ({"embed_dim": 3}, "ab", [3]):
        with pytest.raises(UserError, match="expected an Architecture, got"):
            tas.cost(nothing)  # type: ignore[call-overload]
    with pytest.raises(UserError, match="not a str"):
        tas.cost(arch, "autoformer_tiny")
    with pytest.raises(UserError, match="codes need the space"):
        tas.cost(SPACE.encode(arch))
    with pytest.raises(UserError, match="are not"):
        tas.cost(SPACE.encode(arch)[:, :-1], SPACE)
    with pytest.raises(UserError, match="Did you mean 'autoformer'"):
        tas.cost(Architecture("autoforme", arch.stages))
