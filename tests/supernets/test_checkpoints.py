"""Weights from official files and from networks of another grid or class count."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_tas as tas
from lightning_tas.supernets import ElasticViT, load_checkpoint_file, load_weights
from lightning_tas.supernets.checkpoints import adapt_weights, reach_table, resample_table

MIXED = tas.Architecture.vit(40, [1, 3, 2], [2, 1, 1.5])
OFFICIAL = {
    "patch_embed.": "patch_embed_super.",
    ".norm1.": ".attn_layer_norm.",
    ".norm2.": ".ffn_layer_norm.",
    ".mlp.": ".",
    ".rel_pos_k.vertical": ".rel_pos_embed_k.embeddings_table_v",
    ".rel_pos_k.horizontal": ".rel_pos_embed_k.embeddings_table_h",
    ".rel_pos_v.vertical": ".rel_pos_embed_v.embeddings_table_v",
    ".rel_pos_v.horizontal": ".rel_pos_embed_v.embeddings_table_h",
}


def official(net: ElasticViT) -> dict[str, Tensor]:
    """Its state dict under the released names."""
    state = {}
    for name, value in net.state_dict().items():
        for ours, theirs in OFFICIAL.items():
            name = name.replace(ours, theirs)
        state[name] = value
    return state


def test_official_names_are_those_of_the_released_networks(golden: Any) -> None:
    with torch.device("meta"):
        net = tas.supernet("autoformer_tiny")
    expected = {name: tuple(shape) for name, shape in golden("state_autoformer_tiny.json")}
    assert {name: tuple(value.shape) for name, value in official(net).items()} == expected


@pytest.mark.parametrize(("source", "rule"), [("autoformer", "autoformer"), ("prenas", "regroup")])
def test_official_file_with_its_namespace(make_net: Callable[..., Any], tmp_path: Path, source: str, rule: str) -> None:
    teacher = make_net(seed=1, bias_rule=rule)
    path = tmp_path / "supernet.pth"
    torch.save({"model": official(teacher), "epoch": 499, "args": argparse.Namespace(model="", lr=5e-4)}, path)
    net = make_net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.load_reference(load_checkpoint_file(path), source=source)
    x = torch.randn(2, 3, 12, 8)
    assert net.bias_rule == net.options["bias_rule"] == rule
    assert torch.equal(net(x, MIXED), teacher(x, MIXED))
    assert all(torch.equal(v, teacher.state_dict()[k]) for k, v in net.state_dict().items())


def test_sources_differ_and_unknown_ones_are_refused(make_net: Callable[..., Any]) -> None:
    state = official(make_net(seed=1))
    net = make_net()
    x = torch.randn(2, 3, 12, 8)
    logits = []
    for source in ("autoformer", "prenas"):
        net.load_reference(state, source=source)
        logits.append(net(x, MIXED))
    assert not torch.allclose(*logits)
    with pytest.raises(tas.UserError, match=r"source: 'prenass'.*Did you mean 'prenas'"):
        net.load_reference(state, source="prenass")


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_files_that_are_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": _Evil()}, tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("hello")
    for name, message in [
        ("evil.pth", "not a file of weights"),
        ("list.pth", "holds a list"),
        ("text.pth", "not a file of weights"),
        ("none.pth", "no file"),
    ]:
        with pytest.raises(tas.UserError, match=message):
            load_checkpoint_file(tmp_path / name)
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(tas.UserError, match="no tensors"):
        load_weights(torch.nn.Linear(1, 1), {"epoch": 3})


def test_misfits_are_listed_and_change_nothing(make_net: Callable[..., Any]) -> None:
    net = make_net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = make_net(seed=1).state_dict()
    missing = {k: v for k, v in state.items() if "blocks.2.mlp.fc1" not in k}
    cases = [
        (missing, r"missing \(2\): blocks.2.mlp.fc1.weight, blocks.2.mlp.fc1.bias"),
        ({**state, "extra.weight": torch.zeros(1)}, r"unexpected \(1\): extra.weight"),
        ({**state, "norm.bias": torch.zeros(3)}, r"another shape \(1\): norm.bias \(3,\) for \(64,\)"),
        ({**missing, "extra": torch.zeros(1)}, "missing .*unexpected"),
    ]
    for bad, message in cases:
        with pytest.raises(tas.UserError, match=message):
            load_weights(net, bad)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_other_classes_start_the_head_afresh_with_one_warning(make_net: Callable[..., Any]) -> None:
    state = official(make_net(seed=1, num_classes=7))
    net = make_net()
    with pytest.warns(UserWarning) as caught:
        net.load_reference(state, source="prenas")
    assert len(caught) == 1 and "7 classes and the network 5" in str(caught[0].message)
    assert net.head.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert (net.head.bias == 0).all()
    teacher = make_net(seed=1, num_classes=7).state_dict()
    assert all(torch.equal(v, teacher[k]) for k, v in net.state_dict().items() if not k.startswith("head."))


@pytest.mark.parametrize(("theirs", "ours"), [(7, 0), (0, 5)])
def test_a_missing_head_is_another_number_of_classes(make_net: Callable[..., Any], theirs: int, ours: int) -> None:
    teacher, net = make_net(seed=1, num_classes=theirs), make_net(num_classes=ours)
    with pytest.warns(UserWarning, match=f"{theirs} classes and the network {ours}") as caught:
        net.load_reference(official(teacher), source="prenas")
    assert len(caught) == 1
    x = torch.randn(2, 3, 12, 8)
    assert torch.equal(net.forward_features(x, MIXED), teacher.forward_features(x, MIXED))
    assert net(x, MIXED).shape == (2, ours or 40)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_channels_see_grey_images_as_the_colour_network_does(make_net: Callable[..., Any], channels: int) -> None:
    teacher, net = make_net(seed=1), make_net(in_chans=channels)
    load_weights(net, teacher.state_dict())
    state = teacher.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items() if k != "patch_embed.proj.weight")
    if channels == 1:
        grey = torch.randn(2, 1, 12, 8)
        torch.testing.assert_close(net(grey, MIXED), teacher(grey.expand(-1, 3, -1, -1), MIXED), atol=1e-4, rtol=1e-4)
    with pytest.raises(tas.UserError, match=r"patch_embed.proj.weight \(64, \d, 4, 4\) for \(64, 3, 4, 4\)"):
        load_weights(teacher, net.state_dict())


def test_same_grid_is_untouched(make_net: Callable[..., Any]) -> None:
    net = make_net()
    state = net.state_dict()
    assert all(value is state[name] for name, value in adapt_weights(state, net).items())


def test_other_grids_are_resampled(make_net: Callable[..., Any]) -> None:
    """To another non-square grid, of a supernet and of a stand-alone network, in float64."""
    small = make_net(img_size=(12, 8))
    large = make_net(seed=1, img_size=(20, 24)).double()
    load_weights(large, small.state_dict())
    state = large.state_dict()
    assert state["pos_embed"].shape == (1, 1 + 5 * 6, 64)
    assert state["blocks.0.attn.rel_pos_k.vertical"].shape == (12, 64)
    assert state["blocks.0.attn.rel_pos_k.horizontal"].shape == (14, 64)
    assert torch.equal(state["pos_embed"][:, 0], small.pos_embed[:, 0].double())
    assert torch.isfinite(large(torch.randn(1, 3, 20, 24, dtype=torch.float64), MIXED)).all()
    sub = tas.network(MIXED, num_classes=5, img_size=(20, 24), patch_size=4)
    load_weights(sub, small.subnet(MIXED).state_dict())
    torch.testing.assert_close(sub.pos_embed.double(), large.pos_embed[..., :40])


def test_grid_without_tables_comes_from_positions_or_the_caller(make_net: Callable[..., Any]) -> None:
    square = make_net(img_size=16, relative_position=False)
    net = make_net(seed=1, img_size=(12, 8), relative_position=False)
    load_weights(net, square.state_dict())
    assert torch.equal(net.blocks[0].attn.qkv.weight, square.blocks[0].attn.qkv.weight)
    oblong = make_net(seed=2, img_size=(8, 20), relative_position=False)
    with pytest.raises(tas.UserError, match="pos_embed"):
        load_weights(net, oblong.state_dict())
    load_weights(net, oblong.state_dict(), grid_size=(2, 5))
    assert torch.equal(net.blocks[0].attn.qkv.weight, oblong.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("reach", [1, 2, 4, 9])
def test_tables_that_clip_elsewhere_than_at_the_grid(make_net: Callable[..., Any], naive: Any, reach: int) -> None:
    """Released code clips at 14 whatever the image: also on grids of 24 or of 4 every pair keeps its vector."""
    net = make_net(seed=1, img_size=16)
    generator = torch.Generator().manual_seed(0)
    state = {
        k: torch.randn(2 * reach + 2, 64, generator=generator) if k.endswith((".vertical", ".horizontal")) else v
        for k, v in net.state_dict().items()
    }
    load_weights(net, state)
    index = naive.offsets(4, 4)
    place = torch.arange(16) // 4, torch.arange(16) % 4
    for k, axis in (("vertical", 0), ("horizontal", 1)):
        name = f"blocks.1.attn.rel_pos_v.{k}"
        row = (place[axis][None] - place[axis][:, None]).clamp(-reach, reach) + reach + 1
        theirs = torch.nn.functional.pad(row, (1, 0, 1, 0))
        assert torch.equal(net.state_dict()[name][index[axis]], state[name][theirs])
    assert torch.equal(net.pos_embed, state["pos_embed"])
    # And on to another grid: first the equal table of its own grid, then the resampled one.
    larger = make_net(img_size=(24, 20))
    load_weights(larger, state)
    name = "blocks.0.attn.rel_pos_k.vertical"
    assert torch.equal(larger.state_dict()[name], resample_table(reach_table(state[name], 4), 4, 6))
    assert larger.pos_embed.shape == (1, 31, 64)


def test_table_resampling_by_hand() -> None:
    """Rows hold their offset: then the resampled row of offset o holds o * old / new, stopping at the last trained."""
    old, new = 4, 6
    table = torch.cat([torch.tensor([-99.0]), torch.arange(-old, old + 1.0)])[:, None].repeat(1, 64)
    resampled = resample_table(table, old, new)
    assert resampled.shape == (2 * new + 2, 64)
    expected = [-99.0, *(max(-(old - 1), min(old - 1, o * old / new)) for o in range(-new, new + 1))]
    torch.testing.assert_close(resampled[:, 0], torch.tensor(expected))
    assert resample_table(table, old, old) is table
    torch.testing.assert_close(resample_table(table, old, 2)[:, 5], torch.tensor([-99.0, -3, -2, 0, 2, 3]))
    assert (resample_table(table[[0, 4, 5, 6]], 1, 3)[1:] == 0).all()  # one patch knows the offset 0 only
