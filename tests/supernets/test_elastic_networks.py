"""Supernets of every family: equal to the written-out network and to their extracted sub-networks, safe to copy."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import lightning_tas as tas
from lightning_tas.spaces import space_names

vit = tas.Architecture.vit
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias_rule": "autoformer"},
    {"relative_position": False},
    {"abs_pos": False},
    {"qkv_bias": False},
    {"pool": "token"},
    {"pre_norm": False},
    {"scale": True},
    {"in_chans": 1, "img_size": 9, "patch_size": 3, "num_classes": 3},
]
OPTIONS.append({k: v for options in OPTIONS[2:8] for k, v in options.items()})  # all of them at once


def asked(case: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options as far as the family has them."""
    return options if case.space.family == "autoformer" else {k: v for k, v in options.items() if k[:3] != "rel"}


def images(net: Any, n: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(n, net.options["in_chans"], *net.img_size, dtype=dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_written_out_network(case: Any, naive: Any, options: dict[str, Any]) -> None:
    net = case.make(**asked(case, options)).double()
    x = images(net, dtype=torch.float64)
    for arch in case.corners:
        expected = naive.forward(net.state_dict(), arch, net.allocated, net.options, x)
        torch.testing.assert_close(net(x, arch), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_subnet_gives_the_same_bits(case: Any, options: dict[str, Any]) -> None:
    net = case.make(**asked(case, options))
    x = images(net, 3)
    for arch in case.corners:
        sub = net.subnet(arch)
        assert not any("elastic" in type(m).__name__.lower() for m in sub.modules())
        assert torch.equal(net(x, arch), sub(x)), arch
        assert torch.equal(net.forward_features(x, arch), sub.forward_features(x))


def test_different_architectures_give_different_logits(case: Any) -> None:
    net = case.make()
    x = images(net)
    logits = [net(x, arch) for arch in case.different]
    for a, b in itertools.combinations(logits, 2):
        assert not torch.equal(a, b)


def test_every_used_parameter_gets_a_gradient_and_unused_parts_none(case: Any) -> None:
    net = case.make()
    net(images(net), case.mixed).square().sum().backward()
    unused = [name for name, _ in net.named_parameters() if re.match(case.unused, name)]
    assert unused
    for name, parameter in net.named_parameters():
        if name in unused:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    net.zero_grad()
    (net(images(net), case.mixed).square().sum() + net.touch([case.mixed])).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all() == (name in unused), name


def test_slices_leave_the_rest_of_a_weight_alone(make_net: Callable[..., Any]) -> None:
    net = make_net()
    net(images(net), vit(40, [1, 3, 2], [2, 1, 1.5])).square().sum().backward()
    qkv = net.blocks[0].attn.qkv.weight.grad  # one head of three, 40 channels of 64
    assert qkv is not None
    assert (qkv[: 3 * 64, :40] != 0).all() and (qkv[3 * 64 :] == 0).all() and (qkv[:, 40:] == 0).all()


def test_copies_follow_their_own_weights(case: Any) -> None:
    """Deepcopy, pickle, torch.save, .double(), load_state_dict(assign=True), also after a forward under no_grad."""
    net = case.make()
    x = images(net)
    with torch.no_grad():
        before = net(x, case.mixed)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert torch.equal(other(x, case.mixed), before)
    state = case.make(seed=1).state_dict()
    fresh = case.make(seed=1)(x, case.mixed)
    net.load_state_dict(state, assign=True)
    assert torch.equal(net(x, case.mixed), fresh)
    for other in copies:
        assert torch.equal(other(x, case.mixed), before)
        other.load_state_dict(state)
        assert torch.equal(other(x, case.mixed), fresh)
    wide = net.double()(x.double(), case.mixed)
    torch.testing.assert_close(wide.float(), fresh, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        net(x.double(), case.mixed)
        for parameter in net.parameters():
            parameter.add_(0.01)
    assert not torch.equal(net(x.double(), case.mixed), wide)


def test_averaged_copy_trains_nothing_and_follows_updates(case: Any) -> None:
    net = case.make()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    average.update_parameters(net)
    x = images(net)
    expected = case.make()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(1.25)
    torch.testing.assert_close(average(x, case.mixed), expected(x, case.mixed))


def test_extraction_leaves_no_trace(case: Any) -> None:
    net = case.make().train()
    state = torch.get_rng_state()
    sub = net.subnet(case.mixed)
    assert torch.equal(torch.get_rng_state(), state)
    assert sub.training
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        for parameter in sub.parameters():
            parameter.zero_()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.requires_grad and p.is_leaf for p in sub.parameters())


# Width of the first stage over the allocated one, and the rates of drop path by stage, of the mixed architectures.
RATES: dict[str, tuple[float, list[list[float]], list[list[float]]]] = {
    "autoformer": (40 / 64, [[0, 0.1, 0.2, 0.3]], [[0, 0.1, 0.2]]),
    "autoprox_vit": (36 / 64, [[0, 0.1, 0.2, 0.3]], [[0, 0.1, 0.2]]),
    "pit": (8 / 64, [[0, 0.05], [0.1, 0.15], [0.2, 0.25]], [[0, 0.05], [0.1], [0.2, 0.25]]),  # rate * i / 6
}


def test_drop_path_and_dropout_refer_to_the_supernet(case: Any) -> None:
    net = case.make(drop_path_rate=0.3, drop_rate=0.2, attn_drop_rate=0.1, scale=True).train()
    shrink, rates, of_sub = RATES[case.space.family]
    assert [[b.drop_path_rate for b in blocks] for blocks in net.stage_blocks] == [pytest.approx(r) for r in rates]
    sub = net.subnet(case.mixed)
    stages = [stage.blocks for stage in sub.stages] if case.space.family == "pit" else [sub.blocks]
    assert [[b.drop_path.drop_prob for b in blocks] for blocks in stages] == [pytest.approx(r) for r in of_sub]
    assert sub.drop_rate == pytest.approx(0.2 * shrink)
    x = images(net, 16)
    outs = []
    for call in (lambda: net(x, case.mixed), lambda: sub(x), lambda: net.eval()(x, case.mixed)):
        torch.manual_seed(7)
        outs.append(call())
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])


def test_built_on_the_meta_device_then_filled(case: Any) -> None:
    with torch.device("meta"):
        net = tas.supernet(case.space, img_size=8, patch_size=4, num_classes=5)
    assert net(torch.empty(2, 3, 8, 8, device="meta"), case.mixed).shape == (2, 5)
    assert all(p.is_meta for p in net.subnet(case.mixed).parameters())
    torch.manual_seed(0)
    filled = net.to_empty(device="cpu")
    filled.init_weights()
    assert torch.isfinite(filled(torch.randn(2, 3, 8, 8), case.mixed)).all()


@pytest.mark.parametrize("name", [n for n in space_names() if n.startswith(("autoformer", "autoprox", "pit"))])
def test_published_sizes_on_the_meta_device(name: str) -> None:
    space = tas.space(name)
    with torch.device("meta"):
        net = tas.supernet(space)
    for arch in (space.smallest(), space.largest()):
        assert net(torch.empty(2, 3, 224, 224, device="meta"), arch).shape == (2, 1000)


@pytest.mark.parametrize("init", [None, "trunc_normal", "library", "tf_tas"])
def test_initialisation(case: Any, init: str | None) -> None:
    """AutoFormer's rule (also of Auto-Prox's ViT), the library's (the default of PiT) and TF-TAS's for PiT."""
    torch.manual_seed(0)
    net = tas.supernet(case.space, img_size=32, init=init)
    chosen = init or ("library" if case.space.family == "pit" else "trunc_normal")
    assert net.options["init"] == chosen
    linear = {n for n, m in net.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, parameter in net.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if "norm" in name:
            assert (parameter == (1 if kind == "weight" else 0)).all(), name
        elif layer in linear and chosen != "library":
            if kind == "bias":
                assert (parameter == 0).all(), name
            else:
                assert parameter.std() == pytest.approx(0.02, rel=0.25), name
        elif layer in linear or "proj" in name or "conv" in name:
            if chosen == "tf_tas" and kind == "weight":
                assert parameter.std() == pytest.approx(1, rel=0.2), name
                continue
            # torch's default is uniform within one over the square root of what an output sums up.
            bound = net.get_submodule(layer).weight[0].numel() ** -0.5
            assert parameter.abs().max() <= bound and parameter.std() == pytest.approx(bound / 3**0.5, rel=0.25), name
        else:
            assert parameter.std() == pytest.approx(0.02, rel=0.25), name


def test_impossible_architectures_are_refused_with_numbers(make_net: Callable[..., Any]) -> None:
    net, mixed = make_net(), vit(40, [1, 3, 2], [2, 1, 1.5])
    x = images(net)
    cases = [
        (vit(72, [1], [1]), r"embed_dim: 72 .*'small'.* 64"),
        (vit(40, [1] * 5, [1] * 5), r"depth: 5 .* 4"),
        (vit(40, [1, 4], [1, 1]), r"num_heads of block 1: 4 .* 3"),
        (vit(40, [1, 1], [1, 3.5]), r"hidden width of block 1 \(mlp_ratio 3.5 x embed_dim\): 140 .* 128"),
        (vit(40, [1], [1], family="autoprox_vit"), r"family 'autoprox_vit' .* 'autoformer'"),
        (vit(40, [1.5], [1]), r"num_heads of block 0: 1.5"),
        (vit(40, [0], [1]), r"num_heads of block 0: 0"),
    ]
    for arch, message in cases:
        for call in (net.check, net.subnet, lambda a: net(x, a)):
            with pytest.raises(tas.UserError, match=message):
                call(arch)
    net.check(mixed)


def test_calls_that_cannot_work(make_net: Callable[..., Any], small_space: Any) -> None:
    net, mixed = make_net(), vit(40, [1, 3, 2], [2, 1, 1.5])
    with pytest.raises(ValueError, match="net\\(x, arch\\)"):
        net(images(net))
    with pytest.raises(tas.UserError, match=r"\(2, 3, 8, 12\).*img_size=\(12, 8\)"):
        net(torch.randn(2, 3, 8, 12), mixed)
    with pytest.raises(tas.UserError, match="in_chans=3"):
        net(torch.randn(2, 1, 12, 8), mixed)
    with pytest.raises(tas.UserError, match="expected an Architecture, got dict"):
        net(images(net), {"embed_dim": 3})  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pool": "max"}, "pool: 'max'.*avg, token"),
        ({"bias_rule": "autoform"}, "Did you mean 'autoformer'"),
        ({"patchsize": 4}, "Did you mean 'patch_size'"),
        ({"img_size": 8}, "smaller than one patch"),
        ({"img_size": (8, 8, 8)}, "img_size"),
        ({"num_classes": -1}, "num_classes"),
        ({"drop_path_rate": 1.0}, "drop_path_rate"),
        ({"drop_rate": "0.1"}, "drop_rate: '0.1'"),
        ({"relative_position": "no"}, "relative_position: 'no'.*true or false"),
        ({"allocated": {"embed_dim": 8}}, "allocated"),
    ]
    for options, message in wrong:
        with pytest.raises(tas.UserError, match=message):
            tas.supernet(small_space, **options)
    with pytest.warns(UserWarning, match="not a multiple of patch_size"):
        tas.supernet(small_space, img_size=33)


def test_options_rebuild_the_supernet(case: Any) -> None:
    net = case.make(pool="token", scale=True, bias_rule="autoformer")
    again = type(net)(net.space, **net.options)
    again.load_state_dict(net.state_dict())
    x = images(net)
    assert torch.equal(again.eval()(x, case.mixed), net(x, case.mixed))


def test_classifier_can_be_replaced(case: Any) -> None:
    net = case.make()
    head = net.get_classifier()
    net.reset_classifier(9)
    assert net.get_classifier() is not head
    assert net(images(net), case.mixed).shape == (2, 9)
    assert net.num_classes == net.options["num_classes"] == 9
    assert net.subnet(case.mixed)(images(net)).shape == (2, 9)
    net.reset_classifier(0, "token")
    features = net.forward_features(images(net), case.mixed)
    assert torch.equal(net(images(net), case.mixed), features[:, 0])


def test_no_weight_decay_names_exist(case: Any) -> None:
    for abs_pos in (True, False):
        net = case.make(abs_pos=abs_pos)
        for module in (net, net.subnet(case.mixed)):
            names = dict(module.named_parameters())
            assert module.no_weight_decay() and all(name in names for name in module.no_weight_decay())


def test_checkpointed_gradients_are_the_same(case: Any) -> None:
    results = []
    for enable in (False, True):
        net = case.make(drop_path_rate=0.2).train()
        net.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        cross_entropy(net(images(net), case.mixed), torch.tensor([0, 1])).backward()
        results.append({k: p.grad for k, p in net.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trains_under_autocast(case: Any, dtype: torch.dtype) -> None:
    net = case.make().train()
    with torch.autocast("cpu", dtype=dtype):
        loss = cross_entropy(net(images(net), case.mixed), torch.tensor([0, 1]))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    exact = cross_entropy(case.make().train()(images(net), case.mixed), torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(exact.item(), rel=0.2)
