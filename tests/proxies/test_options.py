"""What a user gives a proxy or a scoring and it cannot be meant: one message that names it, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import lightning_tas as tas
from lightning_tas.errors import UserError
from lightning_tas.proxies.config import DRAWN
from lightning_tas.proxies.inherited import LOOKUPS
from lightning_tas.proxies.initialise import METHODS
from lightning_tas.proxies.options import OUTLINES, TABLES, components
from lightning_tas.proxies.registry import Option, Proxy, chosen, least, named, proxies, proxy
from lightning_tas.spaces import isotropic

SPACE = isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])
ARCHS = SPACE.sample(0, n=3)
NAN, INF = float("nan"), float("inf")


def supernet() -> Any:
    return tas.supernet(SPACE, num_classes=4, img_size=8, in_chans=1, patch_size=4)


# --- options of proxies -----------------------------------------------------------------------------------------------


def test_what_is_known_without_torch_is_what_there_is() -> None:
    """Names, options, defaults, types and rules: of the built-in proxies, and of what else is said of them."""

    def told(one: Proxy) -> Any:
        checks = {
            name: (check.kinds, [(rule.words, sorted(rule.choices)) for rule in check.rules])
            for name, check in one.checks.items()
        }
        return one.combines, [part.name for part in one.parts], dict(one.options), checks

    own = {name: one for name, one in proxies().items() if name in OUTLINES}
    assert list(own) == list(OUTLINES)
    assert {name: told(one) for name, one in own.items()} == {name: told(one) for name, one in OUTLINES.items()}
    assert (tuple(LOOKUPS), tuple(METHODS)) == (TABLES, DRAWN)
    assert named("zen") is proxy("zen")  # once the formulas are there


BAD_OPTIONS: dict[tuple[str, str], list[Any]] = {
    ("zen", "repeat"): ["3", 1.5, None, 0, True, [4]],
    ("zen", "alpha"): ["x", None, NAN],
    ("ntkt", "probes"): [2.5, "a", -1],
    ("ntkt", "variant"): ["eq12", 3, None],
    ("grasp", "temperature"): ["a", 0, INF, False],
    ("zico", "batches"): ["a", 2.0, 1],
    ("dss", "head_weight"): ["2", -1],
    ("dss", "mode"): ["release", 1, ["paper"]],
    ("dss", "signed"): ["no", 1],
    ("length_distortion", "points"): [1.5, "a", 0],
    ("length_distortion", "repeat"): [1.0],
    ("naswot", "redraw"): ["no", 0, None],
    ("fisher", "ref_axis"): ["yes"],
    ("fisher", "broadcast"): [1],
    ("knas", "variant"): ["released", 2],
    ("meco", "rows"): ["token"],
    ("sept", "width"): ["q", 5],
    ("snip_norm", "norm"): [None],
    ("snip_norm", "space"): ["autoformer_tinny", 3],
    ("auto_prox_a", "reduce"): ["max", 1],
    ("auto_prox_p", "layer_reduce"): ["max"],
}


@pytest.mark.parametrize(("name", "option"), BAD_OPTIONS, ids=[".".join(key) for key in BAD_OPTIONS])
def test_bad_values_of_options(name: str, option: str) -> None:
    """Whoever is asked: one proxy of one network, or many networks; and whoever passes the option on."""
    whole = [one.name for one in proxies().values() if name in one.combines]
    for value in BAD_OPTIONS[name, option]:
        for asked in [name, *whole]:
            message = rf"^{option} of {name}: .*valid: "
            with pytest.raises(UserError, match=message):
                tas.score_one(asked, None, **{option: value})
            with pytest.raises(UserError, match=message):
                tas.score_many(asked, None, ARCHS, options={asked: {option: value}})


def test_every_option_says_what_is_valid() -> None:
    for one in proxies().values():
        for key, default in one.options.items():
            assert one.checks[key].kinds, f"the type of {key} of {one.name} is not known"
            assert one.checks[key].settled(key, default) == default
    given = proxy("zen").shared({"repeat": np.int64(2), "alpha": np.float32(0.5)})["zen"]
    assert [type(value) for value in given.values()] == [int, float]
    assert proxy("dss").shared({"head_weight": 2})["dss"] == {"head_weight": 2}


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (Literal["a", 2], ["a", 2], ["b", 3, None]),
        (int | None, [3, None], [1.5, "a", True]),
        (Annotated[float, least(0.5)], [0.5, 1], [0.4, None]),
        (dict, [{}, 3], []),  # nobody knows
        (None, [3, "a"], []),
    ],
)
def test_annotations(annotation: Any, good: list[Any], bad: list[Any]) -> None:
    option = Option.of(annotation) if annotation is not None else Option()
    assert [option.settled("x", value) for value in good] == good
    for value in bad:
        with pytest.raises(UserError, match=r"^x: .*valid: "):
            option.settled("x", value)


# --- options of what is combined --------------------------------------------------------------------------------------


def test_options_go_to_the_components_that_have_them() -> None:
    given: dict[str, Any] = {"probes": 2, "width": "qkv"}
    parts, options = components(chosen("ntsr"), {"ntsr": given})
    assert [part.name for part in parts] == ["ntkt", "sept"]
    assert options == {"ntkt": {"probes": 2}, "sept": {"width": "qkv"}}
    net = supernet()
    each: dict[str, Any] = {"ntkt": {"probes": 2}, "sept": {"width": "qkv"}}
    alone = tas.score_many(["ntkt", "sept"], net, ARCHS, batch_size=2, options=each)
    found = tas.score_many("ntsr", net, ARCHS, batch_size=2, options={"ntsr": given})
    rule: Any = proxy("ntsr").combine
    assert found.value("ntsr").tolist() == rule({f"{k}.value": alone.value(k) for k in each}).tolist()
    assert tas.score_one("ntsr", net, ARCHS[0], batch_size=2, **given).valid
    with pytest.raises(UserError, match=r"option of proxy 'ntsr': 'probe' .*output, params, probes, variant, width.*"):
        tas.score_one("ntsr", net, ARCHS[0], probe=2)


@pytest.mark.parametrize(
    ("names", "options", "key"),
    [
        (["dss", "dss_pp"], {"dss_pp": {"mode": "released"}}, "dss: mode='paper' and mode='released'"),
        (["dss_pp", "dss"], {"dss_pp": {"mode": "released"}}, "dss: mode='released' and mode='paper'"),
        (["dss_pp", "dss"], {"dss_pp": {"signed": True}, "dss": {"qkv": "split"}}, "dss: signed=True"),
        (["dss_pp"], {"dss_pp": {"qkv": "fused"}, "dss": {"qkv": "split"}}, "dss: qkv='split' and qkv='fused'"),
        (["ntsr", "sept"], {"ntsr": {"width": "qkv", "probes": 2}}, "sept: width='qkv' and width='embed'"),
        (["dss", "dss_pp"], {"dss": {"mode": "released"}}, None),
        (["dss", "dss_pp"], {"dss_pp": {"mode": "paper"}}, None),
        (["dss", "dss_pp"], {name: {"mode": "released"} for name in ("dss", "dss_pp")}, None),
        (["ntsr", "sept"], {"ntsr": {"probes": 2}}, None),
    ],
)
def test_a_component_is_scored_as_it_was_asked_for(names: list[str], options: Any, key: str | None) -> None:
    if key is None:
        assert components(chosen(names), options)
        return
    with pytest.raises(UserError, match=f"want other options of {key}"):
        tas.score_many(names, None, ARCHS, options=options)


# --- other arguments --------------------------------------------------------------------------------------------------

IMAGES, LABELS = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
BAD: list[tuple[str, dict[str, Any]]] = [
    ("batch_size", {"batch_size": 1.5}),
    ("batch_size", {"batch_size": "a"}),
    ("batch_size", {"batch_size": 0}),
    ("batch_size", {"batch_size": True}),
    ("seed", {"seed": 1.5}),
    ("seed", {"seed": None}),
    ("device", {"device": "bogus"}),
    ("device", {"device": "meta"}),
    ("device", {"device": 1.5}),
    ("device", {"device": "cuda:99"}),
    ("images", {"images": [1]}),
    ("images", {"images": IMAGES[0]}),
    ("images", {"images": IMAGES[:0]}),
    ("images", {"images": IMAGES.to(torch.complex64)}),
    ("labels", {"labels": LABELS}),
    ("labels", {"images": IMAGES, "labels": [1, 2]}),
    ("labels", {"images": IMAGES, "labels": torch.tensor([0, NAN])}),
    ("labels", {"images": IMAGES, "labels": torch.tensor([0, INF])}),
    ("labels", {"images": IMAGES, "labels": torch.tensor([0, 1.7])}),
    ("labels", {"images": IMAGES, "labels": LABELS.to(torch.complex64)}),
]


@pytest.mark.parametrize(("key", "given"), BAD, ids=[f"{key}{i}" for i, (key, _) in enumerate(BAD)])
def test_bad_arguments(key: str, given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{key}: "):
        tas.score_one("snip", supernet(), ARCHS[0], **given)
    for mode in ("exact", "inherited"):
        with pytest.raises(UserError, match=f"^{key}: "):
            tas.score_many("snip", supernet(), ARCHS, mode=mode, path=tmp_path / "scores.csv", **given)
    assert not list(tmp_path.iterdir())


def test_labels_that_are_whole_numbers_count() -> None:
    net = supernet()
    one, two = (tas.score_one("snip", net, ARCHS[0], images=IMAGES, labels=y) for y in (LABELS, LABELS.double()))
    assert one.value == two.value


@pytest.mark.parametrize("mode", ["exact", "inherited"])
@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("options", {"options": {"snip": 3}}),
        ("options", {"options": 3}),
        ("archs", {"archs": []}),
        ("archs", {"archs": iter([])}),
        ("archs", {"archs": np.zeros((0, 6), dtype=np.int16)}),
        ("archs", {"archs": [None]}),
        ("archs", {"archs": ARCHS[0]}),
        ("archs", {"archs": None}),
        ("shard", {"shard": 3}),
        ("shard", {"shard": (0,)}),
        ("shard", {"shard": ("a", 2)}),
        ("shard", {"shard": (0.5, 2)}),
        ("shard", {"shard": (2, 2)}),
        ("proxies", {"names": 3}),
        ("proxies", {"names": None}),
        ("proxies", {"names": {"snip": 1}}),
        ("proxy", {"names": [["snip"]]}),
        ("proxy", {"names": ["snip", 3]}),
    ],
)
def test_bad_arguments_of_many(mode: str, key: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"names": "snip", "net": supernet(), "archs": ARCHS, **given}
    with pytest.raises(UserError, match=f"^{key}: "):
        tas.score_many(**arguments, mode=mode)


def test_one_proxy_is_one_name() -> None:
    with pytest.raises(UserError, match=r"^proxy: \['snip'\] is not valid"):
        tas.score_one(["snip"], supernet(), ARCHS[0])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^arch: 'small' is not valid"):
        tas.score_one("snip", supernet(), "small")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "enough"),
    [("zico", {}, 2), ("zico", {"batches": 3}, 3), ("jacob_cov", {}, 2), ("knas", {"variant": "reference"}, 4)],
)
def test_too_few_images_are_refused_before_any_work(name: str, options: Any, enough: int, tmp_path: Path) -> None:
    net, few = supernet(), enough - 1
    for given in ({"batch_size": few}, {"images": torch.zeros(few, 1, 8, 8)}):
        message = f"^{next(iter(given))}: proxy '{name}'.* needs at least {enough} images, and its batch has {few}"
        with pytest.raises(UserError, match=message):
            tas.score_many(["snip", name], net, ARCHS, path=tmp_path / "a.csv", options={name: options}, **given)
        with pytest.raises(UserError, match=message):
            tas.score_one(name, net, ARCHS[0], **given, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    assert tas.score_one(name, net, ARCHS[0], batch_size=enough, **options).valid
