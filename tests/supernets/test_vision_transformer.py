"""The stand-alone network: fresh weights, timm's model contract, and loading in a clean process through timm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.optim import create_optimizer_v2

import lightning_tas as tas
from lightning_tas.supernets import ElasticViT, model_config, read_arch

ARCH = tas.Architecture.vit(40, [1, 3, 2], [2, 1, 1.5])
BUILD: dict[str, Any] = {"num_classes": 5, "img_size": (12, 8), "patch_size": 4}
ODD: list[dict[str, Any]] = [
    {},
    {"relative_position": False, "abs_pos": False, "qkv_bias": False},
    {"pre_norm": False, "scale": True, "pool": "token", "in_chans": 2},
]


@pytest.fixture
def net(randomised: Callable[..., Any]) -> Any:
    return randomised(tas.network(ARCH, **BUILD)).eval()


def test_published_parameter_counts() -> None:
    """Test vectors of the papers' candidate files, bit exact (AutoFormer-T is outside its space: ratio 3)."""
    heads = [3] * 10 + [4, 3, 3]
    ratios = [3.5, 3.5, 3, 3.5, 3, 3, 4, 4, 3.5, 4, 3.5, 4, 3.5]
    published = {"layer_num": 13, "embed_dim": [192] * 13, "num_heads": heads, "mlp_ratio": ratios}
    with torch.device("meta"):
        net = tas.network(published)
    assert sum(p.numel() for p in net.parameters()) == 5_867_944


@pytest.mark.parametrize("options", ODD, ids=str)
def test_same_names_and_shapes_as_an_extracted_subnet(case: Any, options: Any) -> None:
    sub = case.make(**options).subnet(case.mixed)
    fresh = tas.network(case.mixed, **{**BUILD, **options})
    assert {k: v.shape for k, v in sub.state_dict().items()} == {k: v.shape for k, v in fresh.state_dict().items()}
    again = type(sub)(sub.arch.to_dict(), **json.loads(json.dumps(sub.options)))
    again.load_state_dict(sub.state_dict())
    x = torch.randn(2, sub.options["in_chans"], 12, 8)
    assert torch.equal(again.eval()(x), sub(x))


def test_one_export_serves_batches_of_every_size(case: Any) -> None:
    """`torch.export`, which ONNX's exporter builds on, of a network as timm makes it that has never run before."""
    sub = case.make(img_size=(20, 12)).subnet(case.mixed)  # a size that no other test has run
    net = timm.create_model("tas_vit", arch=sub.arch.to_dict(), **sub.options).eval()
    net.load_state_dict(sub.state_dict())
    batches = [torch.randn(n, 3, 20, 12) for n in (2, 1, 6)]
    exported = torch.export.export(net, (batches[0],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    with torch.no_grad():
        for x in batches:
            torch.testing.assert_close(exported(x), net(x), rtol=1e-6, atol=1e-6)


def test_fresh_weights_follow_the_seed_and_the_reference_rule() -> None:
    nets = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        nets.append(tas.network(ARCH, **BUILD).state_dict())
    assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])
    assert not torch.equal(nets[0]["head.weight"], nets[2]["head.weight"])
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.attn.rel_pos_v.vertical", "pos_embed", "head.weight"):
        assert nets[0][name].std().item() == pytest.approx(0.02, rel=0.25), name
    assert nets[0]["patch_embed.proj.weight"].std().item() == pytest.approx((3 * 48) ** -0.5, rel=0.1)


def test_features_head_and_pooling(net: Any) -> None:
    x = torch.randn(2, 3, 12, 8)
    features = net.forward_features(x)
    assert features.shape == (2, 7, 40)
    pooled = net.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, features[:, 1:].mean(1))
    assert torch.equal(net(x), net.head(pooled))
    assert net.num_features == net.head_hidden_size == net.embed_dim == 40
    net.reset_classifier(3, "token")
    assert net(x).shape == (2, 3) and net.get_classifier().out_features == net.num_classes == 3
    assert torch.equal(net.forward_head(features, pre_logits=True), features[:, 0])
    net.reset_classifier(0)
    assert torch.equal(net(x), features[:, 0])
    assert isinstance(net.get_classifier(), torch.nn.Identity)


def test_layer_groups_and_weight_decay_fit_timm(case: Any) -> None:
    net = case.make().subnet(case.mixed)
    groups = timm.models.group_parameters(net, net.group_matcher())
    assert len(groups) == 1 + case.mixed.depth + 1  # stem, blocks (with the pooling or norm behind them), head
    assert sorted(name for group in groups.values() for name in group) == sorted(dict(net.named_parameters()))
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in net.named_parameters():
        spared = parameter.ndim == 1 or name in ("cls_token", "pos_embed")
        assert (decay[id(parameter)] == 0) == spared, name


def test_checkpointed_gradients_are_the_same(net: Any) -> None:
    x = torch.randn(2, 3, 12, 8)
    gradients = []
    for enable in (False, True):
        net.set_grad_checkpointing(enable)
        net.zero_grad()
        net(x).square().sum().backward()
        gradients.append({k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None})
    assert all(torch.equal(gradients[0][k], gradients[1][k]) for k in dict(net.named_parameters()))


def test_wrong_input_and_ignored_setting(net: Any) -> None:
    with pytest.raises(tas.UserError, match=r"img_size=\(12, 8\)"):
        net(torch.randn(2, 3, 16, 8))
    with pytest.raises(tas.UserError, match=r"family: 'nothing'.*autoformer"):
        tas.network(tas.Architecture.vit(40, [1], [1], family="nothing"))
    with pytest.raises(tas.UserError, match="num_heads of block 0: 0"):
        tas.network(tas.Architecture.vit(40, [0], [1]))
    with pytest.warns(UserWarning, match="bias_rule='autoformer' has no effect"):
        tas.network(ARCH, bias_rule="autoformer", **BUILD)


def export(net: Any, folder: Path) -> None:
    save_file(net.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model_config(net, mean=[0.5] * 3, std=[0.25] * 3)))


@pytest.mark.parametrize("options", ODD, ids=str)
def test_exported_folder_loads_through_timm(case: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    net = case.make(**options).subnet(case.mixed)
    export(net, tmp_path)
    loaded: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, net.options["in_chans"], 12, 8)
    assert torch.equal(loaded(x), net(x))
    assert loaded.options == net.options and loaded.arch == net.arch
    described = timm.data.resolve_model_data_config(loaded)
    assert described["input_size"] == (net.options["in_chans"], 12, 8) and tuple(described["mean"]) == (0.5,) * 3


def test_exported_folder_adapts_to_other_sizes(case: Any, tmp_path: Path) -> None:
    net = case.make(img_size=(8, 32)).subnet(case.mixed)  # not square, in some families a square number of patches
    export(net, tmp_path)
    same: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(same.pos_embed, net.pos_embed)
    net = case.make(img_size=12).subnet(case.mixed)
    export(net, tmp_path)
    other: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3, img_size=(16, 20)).eval()
    assert other(torch.randn(2, 3, 16, 20)).shape == (2, 3)
    ours, theirs = net.state_dict(), other.state_dict()
    kept = [name for name in ours if not name.startswith(("head.", "pos_embed")) and "rel_pos" not in name]
    assert len(kept) > 30 and all(torch.equal(ours[name], theirs[name]) for name in kept)
    if case.space.family == "pit":
        assert theirs["pos_embed"].shape == (1, 8, 7, 9)
        naive = torch.nn.functional.interpolate(ours["pos_embed"], size=(7, 9), mode="bicubic", antialias=True)
        torch.testing.assert_close(theirs["pos_embed"], naive)
    else:
        assert torch.equal(theirs["pos_embed"][:, 0], ours["pos_embed"][:, 0])


@pytest.mark.slow
def test_exported_folder_loads_in_a_clean_process(net: Any, tmp_path: Path) -> None:
    export(net, tmp_path)
    code = (
        "import sys, timm, torch, lightning_tas.supernets\n"
        "net = timm.create_model('local-dir:' + sys.argv[1], pretrained=True).eval()\n"
        "assert not any(name.split('.')[0] in ('lightning', 'pytorch_lightning', 'hydra') for name in sys.modules)\n"
        "x = torch.arange(288.0).view(1, 3, 12, 8) / 288\n"
        "print(net(x).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(tas.__file__).parents[1],
    )
    x = torch.arange(288.0).view(1, 3, 12, 8) / 288
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), net(x))


def test_architecture_as_text_file_or_mapping(tmp_path: Path) -> None:
    path = tmp_path / "arch.json"
    path.write_text(json.dumps({"arch": ARCH.to_dict(), "score": 1.0}))
    for form in (ARCH, ARCH.to_dict(), json.dumps(ARCH.to_dict()), path, str(path)):
        assert read_arch(form) == ARCH
    net: Any = timm.create_model("tas_vit", arch=json.dumps(ARCH.to_dict()), global_pool="token", **BUILD)
    assert net.arch == ARCH and net.options["pool"] == "token"
    wrong: list[tuple[Any, str]] = [("nowhere.json", "nor a file"), ("{", "not valid JSON"), (3, "expected a mapping")]
    for bad, message in wrong:
        with pytest.raises(tas.UserError, match=message):
            read_arch(bad)
    with pytest.raises(tas.UserError, match="needs an architecture"):
        timm.create_model("tas_vit")


def test_users_register_a_family(small_space: Any) -> None:
    from lightning_tas import spaces
    from lightning_tas.supernets import registry

    @tas.supernets.register_family("toy", network=lambda arch, **options: torch.nn.Linear(arch.embed_dim, 1))
    class Toy(torch.nn.Linear):
        def __init__(self, space: Any, **options: Any) -> None:
            super().__init__(space.allocated["embed_dim"], options["num_classes"])

    try:
        space = spaces.isotropic("t", family="toy", embed_dim=[3, 4], depth=[1], num_heads=[1], mlp_ratio=[1])
        assert isinstance(tas.supernet(space, num_classes=2), Toy)
        assert tas.network(space.smallest()).in_features == 3
        with pytest.raises(tas.UserError, match="family 'toy'"):
            ElasticViT(space)
    finally:
        del registry._FAMILIES["toy"]
