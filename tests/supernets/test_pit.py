"""PiT: the released class's numbers, its stages and poolings, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_tas as tas
from lightning_tas.spaces import Dimension, SearchSpace


def pit(**changes: Any) -> Any:
    base: dict[str, Any] = {"base_dim": 8, "mlp_ratio": 2, "depth": [1, 1, 1], "num_heads": [1, 2, 4]}
    return tas.Architecture.from_dict({**base, **changes})


def reference(golden: Any, fill: Any, family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The Auto-Prox class's network of the golden file, whose state dict has its own names, and that state dict."""
    row = golden(f"proxy_{family}_det.json")["rows"][0]
    state = {name: torch.from_numpy(fill.values(name, tuple(shape))) for name, shape in row["state"]}
    return row, state


@pytest.mark.parametrize("family", ["pit", "autoformer"])
def test_logits_and_params_equal_the_auto_prox_class(golden: Any, fill: Any, family: str) -> None:
    row, state = reference(golden, fill, family)
    net = tas.network(row["arch"], num_classes=100, drop_path_rate=0.0).eval()
    net.load_reference(state, source="autoprox")
    with torch.no_grad():
        logits = net(torch.from_numpy(fill.images(1)))[0, :10]
    torch.testing.assert_close(logits, torch.tensor(row["logits10_first_image"]), atol=5e-6, rtol=0)
    for other in golden(f"proxy_{family}_det.json")["rows"]:
        with torch.device("meta"):
            fresh = tas.network(other["arch"], num_classes=100)
        assert sum(p.numel() for p in fresh.parameters()) == other["params"]


@pytest.mark.parametrize("family", ["pit", "autoformer"])
def test_reference_weights_for_other_classes_and_the_wrong_kinds(golden: Any, fill: Any, family: str) -> None:
    row, state = reference(golden, fill, family)
    net = tas.network(row["arch"], num_classes=3)
    with pytest.warns(UserWarning, match="100 classes and the network 3"):
        net.load_reference(state, source="autoprox")
    assert torch.equal(net.norm.weight, state["norm.weight"])
    with pytest.raises(tas.UserError, match=r"missing \(2\): patch_embed.proj.weight, patch_embed.proj.bias"):
        net.load_reference({k: v for k, v in state.items() if "patch_embed" not in k}, source="autoprox")
    with pytest.raises(tas.UserError, match="'prenas' has weights of supernets of family autoformer"):
        net.load_reference(state, source="prenas")
    with pytest.raises(tas.UserError, match=r"source: 'autoprx'.*Did you mean 'autoprox'"):
        net.load_reference(state, source="autoprx")
    with torch.device("meta"):
        supernet = tas.supernet("pit_ti" if family == "pit" else "autoprox_autoformer")
    with pytest.raises(tas.UserError, match=r"stand-alone networks .* this is one of the supernets"):
        supernet.load_reference(state, source="autoprox")


@pytest.mark.parametrize(("size", "grids"), [(224, [27, 14, 7]), (32, [3, 2, 1]), (20, [1, 1, 1])])
@pytest.mark.filterwarnings("ignore:img_size .* does not fit")
def test_maps_shrink_by_half_rounding_up(size: int, grids: list[int]) -> None:
    net = tas.network(pit(), img_size=size, num_classes=2).eval()
    seen: list[tuple[int, ...]] = []
    for stage in net.stages:
        stage.blocks[0].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    features = net.forward_features(torch.randn(2, 3, size, size))
    assert seen == [(2, 1 + side * side, width) for side, width in zip(grids, (8, 16, 32), strict=True)]
    assert features.shape == seen[-1] and net.num_features == net.embed_dim == 32


def test_class_token_has_no_position() -> None:
    """Positions differ: the class token, alone on a grid without attention to patches, does not notice."""
    net = tas.network(pit(), img_size=32, num_classes=2).eval()
    assert net.pos_embed.shape == (1, 8, 3, 3)
    seen: list[torch.Tensor] = []
    net.stages[0].blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(1, 3, 32, 32)
    net(x)
    with torch.no_grad():
        net.pos_embed.add_(1.0)
    net(x)
    assert torch.equal(seen[0][:, 0], seen[1][:, 0]) and torch.equal(seen[0][:, 0], net.cls_token[0])
    torch.testing.assert_close(seen[0][:, 1:] + 1.0, seen[1][:, 1:])


def test_drop_path_of_a_network_alone() -> None:
    net = tas.network(pit(depth=[1, 2, 1]), img_size=32, drop_path_rate=0.4)
    rates = [block.drop_path.drop_prob for stage in net.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])  # rate * i / total


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_any_number_of_stages(stages: int, randomised: Any) -> None:
    arch = pit(depth=[1] * stages, num_heads=[1, 2, 4, 8][:stages])
    space = SearchSpace(
        "few",
        "pit",
        [
            Dimension("base_dim", "network", (8,)),
            Dimension("mlp_ratio", "network", (2,)),
            Dimension("num_heads", "stage", tuple((h,) for h in (1, 2, 4, 8)[:stages])),
            Dimension("depth", "stage", (1,)),
        ],
        stages=stages,
    )
    net = randomised(tas.supernet(space, img_size=32, num_classes=3)).eval()
    x = torch.randn(2, 3, 32, 32)
    assert arch in space and torch.equal(net(x, arch), net.subnet(arch)(x))


@pytest.mark.parametrize("scope", ["stage", "block"])
def test_mlp_ratios_per_stage_or_block(scope: Any, randomised: Any) -> None:
    space = SearchSpace(
        "free",
        "pit",
        [
            Dimension("base_dim", "network", (8, 12)),
            Dimension("mlp_ratio", scope, (1, 1.5, 2)),
            Dimension("num_heads", "stage", ((1, 2), (2,))),
            Dimension("depth", "stage", (1, 2)),
        ],
        stages=2,
    )
    net = randomised(tas.supernet(space, img_size=32, num_classes=3)).eval()
    x = torch.randn(2, 3, 32, 32)
    for arch in space.sample(seed=0, n=6):
        sub = net.subnet(arch)
        assert torch.equal(net(x, arch), sub(x))
        assert sum(p.numel() for p in sub.parameters()) == tas.cost(arch, net).params
    codes = space.sample_codes(0, 50)
    assert tas.cost(codes, net).macs.tolist() == [tas.cost(arch, net).macs for arch in space.decode(codes)]


def test_impossible_architectures_are_refused_with_numbers(cases: Any) -> None:
    net = cases["pit"]().make()
    wrong = [
        (pit(num_heads=[2, 1, 1]), "width of stage 1: 8 is no multiple of 16, that of stage 0"),
        (pit(base_dim=20, num_heads=[4, 4, 4]), r"width of stage 0 \(base_dim 20 x num_heads\): 80 .*'small'.* 64"),
        (pit(depth=[1, 3, 1]), "depth of stage 1: 3 .* 2"),
        (
            pit(mlp_ratio=32, num_heads=[1, 1, 1]),
            r"hidden width of block 0 of stage 0 \(mlp_ratio 32 x width\): 256 .* 128",
        ),
        (pit(depth=[1, 1], num_heads=[1, 1]), "stages: 2, .* 3"),
        (tas.Architecture.vit(8, [1], [1]), "family 'autoformer' .* 'pit'"),
        (tas.Architecture("pit", pit().stages, mlp_ratio=2), "base_dim: .* has none"),
    ]
    for arch, message in wrong:
        with pytest.raises(tas.UserError, match=message):
            net.check(arch)
    with pytest.raises(tas.UserError, match="is no multiple of 16"):
        tas.network(pit(num_heads=[2, 1, 1]))
    for options, message in (
        ({"relative_position": True}, "relative_position: networks of family 'pit' have none"),
        ({"patch_stride": 0}, "patch_stride: 0"),
        ({"init": "normal"}, "init: 'normal'.*trunc_normal"),
    ):
        with pytest.raises(tas.UserError, match=message):
            tas.network(pit(), **options)
    with pytest.warns(UserWarning, match="img_size .* does not fit patch_size 16 every 8 pixels"):
        tas.network(pit(), img_size=30)
