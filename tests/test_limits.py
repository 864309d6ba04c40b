"""Limits and regions: what is read and refused, and every exact number against all networks of small spaces."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_tas as tas
from lightning_tas import UserError
from lightning_tas.additive import Total
from lightning_tas.latency import Conditions, LatencyTable
from lightning_tas.limits import UNITS, Limits, Region, Scaled, span
from lightning_tas.limits.bounds import meant
from lightning_tas.pieces import Pieces
from lightning_tas.search.config import LIMITED, LimitsConfig
from lightning_tas.spaces import Dimension, Predicate, SearchSpace, isotropic

OPTIONS = {"img_size": 32, "num_classes": 10}


def vit() -> SearchSpace:
    return isotropic("vit", embed_dim=(16, 24, 40), depth=(1, 2, 4), num_heads=(1, 2), mlp_ratio=(1, 2.5))


def pit() -> SearchSpace:
    return tas.space("pit_ti").with_choices(name="pit", depth=((1, 2), (2, 3), (1, 2)), mlp_ratio=(2, 4))


def mixed() -> SearchSpace:
    """Two stages, MLP ratios by block, heads that must divide the next stage's, few blocks in all."""
    dimensions = [
        Dimension("base_dim", "network", (4, 8, 12)),
        Dimension("num_heads", "stage", ((1, 2, 3), (2, 3, 6))),
        Dimension("depth", "stage", ((1, 2, 3), (2, 3))),
        Dimension("mlp_ratio", "block", (1, 2, 3)),
    ]
    rules = [Predicate("divides_next", ("num_heads",)), Predicate("total_between", ("depth", 4, 5))]
    return SearchSpace("mixed", "pit", dimensions, rules, stages=2)


SPACES = {space.name: space for space in (vit(), pit(), mixed())}
ALL = {name: space.encode(space.enumerate()) for name, space in SPACES.items()}


def table(space: SearchSpace) -> LatencyTable:
    """A latency table of invented times."""
    pieces = Pieces(space)
    keys = sorted({key for row in pieces.examples(deep=True) for key in pieces.keys(row)}, key=str)
    times = np.random.default_rng(0).integers(1, 2_000_000, size=len(keys)).tolist()
    return LatencyTable(space, dict(zip(keys, times, strict=True)), 1.0, 1, (0.0,), 1, Conditions(1, 1, "cpu", ""), {})


def odd(codes: np.ndarray) -> np.ndarray:
    """A quantity that is no sum over blocks."""
    return ((codes.astype(np.int64) + 2) ** 2).sum(axis=1) % 97


def region(space: SearchSpace, limits: Any, **quantities: Any) -> Region:
    return Region(space, limits, OPTIONS, quantities)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([5e6, "7M"], (5e6, 7e6)),
        (["5e6", "5_000_000"], (5e6, 5e6)),
        ([None, "1.4G"], (-math.inf, 1.4e9)),
        (("0.3k", None), (300, math.inf)),
        ([0, 0], (0, 0)),
        ([np.int64(3), np.float32(4.5)], (3, 4.5)),
        ([" 1. M ", 10**7], (1e6, 1e7)),
        (["0.000001k", 1], (0.001, 1)),
    ],
)
def test_bounds_are_read_as_written(written: Any, read: tuple[float, float]) -> None:
    found = Limits.read({"params": written})
    assert found.bounds == {"params": read} and found
    assert Limits.read(json.loads(json.dumps(found.to_dict()))) == found
    assert hash(Limits.read(found)) == hash(found)


def test_recipes_may_limit_what_limits_know() -> None:
    assert tuple(UNITS) == LIMITED and set(LIMITED) <= {field.name for field in dataclasses.fields(LimitsConfig)}


def test_open_limits_are_none() -> None:
    for nothing in (None, {}, {"params": None}, {"macs": [None, None]}):
        assert not Limits.read(nothing) and Limits.read(nothing).to_dict() == {}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"param": [1, 2]}, r"^limits: 'param' is not valid; valid: params, macs, .*Did you mean 'params'\?$"),
        ({"params": [7, 5]}, r"^limits.params: the lower bound, 7, exceeds the upper one, 5$"),
        ({"params": ["7M", "5M"]}, r"^limits.params: the lower bound, 7M, exceeds the upper one, 5M$"),
        ({"macs": 6}, r"^limits.macs: 6 is one number.*write \[null, 6\] for at most.*\[6, 6\] for exactly$"),
        ({"macs": "6G"}, r"^limits.macs: 6G is one number.*\[null, 6G\]"),
        ({"macs": [1, 2, 3]}, r"^limits.macs: expected a pair \[low, high\], null for an open side, got \[1, 2, 3\]"),
        ({"macs": {"low": 1}}, r"^limits.macs: expected a pair"),
        ({"macs": b"ab"}, r"^limits.macs: expected a pair"),
        ({"latency": [-1, 2]}, r"^limits.latency: -1 is not valid; a bound is a finite number of at least 0"),
        ({"latency": ["-1k", 2]}, r"^limits.latency: -1k is not valid"),
        ({"latency": [math.nan, 2]}, r"^limits.latency: nan is not valid"),
        ({"latency": [0, math.inf]}, r"^limits.latency: inf is not valid"),
        ({"latency": [0, "1e999"]}, r"^limits.latency: 1e999 is not valid"),
        ({"latency": [0, 10**400]}, r"^limits.latency: 1000+ is not valid"),
        ({"latency": [True, 2]}, r"^limits.latency: True is not a number; valid: 5000000, 5e6, '5M'"),
        ({"latency": True}, r"^limits.latency: expected a pair"),
        ({"latency": [1, np.True_]}, r"is not a number"),
        ({"params": [1, "7m"]}, r"^limits.params: '7m' is not a number; valid: .*suffixes k, M, G"),
        ({"params": ["", 7]}, r"^limits.params: '' is not a number"),
        ({"params": ["M", 7]}, r"^limits.params: 'M' is not a number"),
        ({"params": ["nan", 7]}, r"^limits.params: 'nan' is not a number"),
        ({"params": [1j, 7]}, r"^limits.params: 1j is not a number"),
        (["params"], r"^limits: expected quantities with pairs"),
    ],
)
def test_mistakes_are_refused_by_name(limits: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Limits.read(limits)


def test_quantities_must_be_given() -> None:
    with pytest.raises(UserError, match=r"^limits.latency: nothing here knows .*there are params, macs, heat\)$"):
        region(vit(), {"latency": [None, 3]}, heat=odd)
    with pytest.raises(UserError, match=r"Did you mean 'heat'"):
        region(vit(), {"heatt": [None, 3]}, heat=odd)


@given(st.dictionaries(st.sampled_from(["params", "macs", "latency"]), st.tuples(*[st.integers(0, 50)] * 2)))
def test_within_is_all_bounds_inclusive(bounds: dict[str, tuple[int, int]]) -> None:
    limits = Limits.read({name: sorted(pair) for name, pair in bounds.items()})
    values = {name: np.random.default_rng(len(name)).integers(0, 50, size=40) for name in ("params", "macs", "latency")}
    naive = [all(min(b) <= values[name][i] <= max(b) for name, b in bounds.items()) for i in range(40)]
    assert limits.within(values).tolist() == naive


# --- against all networks of small spaces -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPACES)
def test_ranges_are_exact(name: str) -> None:
    space, codes = SPACES[name], ALL[name]
    cost = tas.cost(codes, space, **OPTIONS)
    latency = table(space)
    found = region(space, {"latency": [0, None], "odd": [0, 96]}, latency=latency, odd=odd).ranges()
    assert found["params"] == (cost.params.min(), cost.params.max())
    assert found["macs"] == (cost.macs.min(), cost.macs.max())
    assert found["latency"] == (latency(codes).min(), latency(codes).max())
    assert found["odd"] == (odd(codes).min(), odd(codes).max())
    assert region(space, None).ranges().keys() == {"params", "macs"}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_counts_draws_and_refusals_are_those_of_enumeration(data: st.DataObject) -> None:
    """Any limits, on any small space, over sums and other functions."""
    name = data.draw(st.sampled_from(sorted(SPACES)))
    space, codes = SPACES[name], ALL[name]
    given_ = {"latency": table(space), "odd": odd}
    probe = region(space, {"latency": [0, None], "odd": [0, None]}, **given_).quantities(codes)
    chosen = data.draw(st.sets(st.sampled_from(sorted(probe)), min_size=1, max_size=3))
    limits: dict[str, Any] = {}
    for key in sorted(chosen):
        values = sorted(set(probe[key].tolist()))
        pair = sorted(data.draw(st.tuples(*[st.integers(0, len(values) - 1)] * 2)))
        shift = data.draw(st.sampled_from([0, 0, 1e-7, 0.5]))  # bounds on values, and between them
        low, high = (values[i] + shift for i in pair)
        limits[key] = data.draw(st.sampled_from([[low, high], [None, high], [low, None]]))
    found = region(space, limits, **given_)
    naive = Limits.read(limits, given_).within(probe)
    assert (found.allowed(codes) == naive).all()
    assert found.size() == naive.sum() and found.exact == ("odd" not in chosen)
    wanted = {row.tobytes() for row in codes[naive]}
    n = data.draw(st.sampled_from([1, 7, len(codes) + 1]))
    seed = data.draw(st.integers(0, 3))
    drawn = found.sample(seed, n)
    keys = [row.tobytes() for row in drawn]
    assert drawn.dtype == np.int16 and drawn.shape[1:] == (len(space.columns),)
    assert len(set(keys)) == len(keys) == min(n, len(wanted)) and wanted >= set(keys)
    assert np.array_equal(found.sample(seed, max(0, n - 3)), drawn[: max(0, n - 3)])
    rest = {row.tobytes() for row in found.sample(seed, len(codes), seen=keys)}
    assert rest == wanted - set(keys)
    if wanted:
        found.check()
    else:
        with pytest.raises(UserError, match=rf"no network of {name!r} has .*The space reaches "):
            found.check()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**4), st.sampled_from(["params", "macs"]), st.booleans())
def test_draws_from_a_great_space_are_within(place: int, width: int, name: str, upper: bool) -> None:
    space = tas.space("autoformer_tiny")
    low, high = Region(space).ranges()[name]
    at = low + (high - low) * place / 10**6
    found = Region(space, {name: [at, at + width * (high - low) / 10**4 if upper else None]})
    drawn = found.sample(1, 9)
    size = found.size()
    assert size is not None and len({row.tobytes() for row in drawn}) == len(drawn) == min(9, size)
    assert space.valid(drawn).all() and found.allowed(drawn).all()


# --- what users are told ----------------------------------------------------------------------------------------------


def refusal(found: Region) -> str:
    begun = time.process_time()
    with pytest.raises(UserError) as caught:
        found.check()
    assert time.process_time() - begun < 20  # seconds of the processor; it takes a tenth of one
    return str(caught.value)


def test_unreachable_limits_name_themselves_and_all_ranges() -> None:
    tiny = tas.space("autoformer_tiny")
    found = refusal(Region(tiny, {"params": ["20M", None], "macs": [None, "2G"]}))
    assert found == (
        "limits.params: no network of 'autoformer_tiny' has params of at least 20,000,000. The space reaches params "
        "from 5,366,056 to 10,517,272 and macs from 1,166,536,704 to 2,263,242,112."
    )
    found = refusal(Region(tiny, {"params": [1, 2], "macs": ["3G", "4G"]}))
    assert found.startswith("limits.params, limits.macs: no network of 'autoformer_tiny' has params from 1 to 2 and ")


@pytest.mark.parametrize(
    ("limits", "hint"),
    [
        ({"params": [5, 7]}, "Did you mean limits.params=[5M, 7M]?"),
        ({"params": [None, 7]}, "Did you mean limits.params=[null, 7M]?"),
        ({"macs": [None, 1.4]}, "Did you mean limits.macs=[null, 1.4G]?"),
        ({"params": [5400, 7000]}, "Did you mean limits.params=[5400k, 7000k]?"),
    ],
)
def test_forgotten_suffixes_are_noticed(limits: Any, hint: str) -> None:
    assert refusal(Region(tas.space("autoformer_tiny"), limits)).endswith(hint)


def test_suffixes_of_a_small_space_are_noticed() -> None:
    options = {"img_size": 8, "patch_size": 4, "num_classes": 10, "in_chans": 1}
    digits = isotropic("digits", embed_dim=(32, 48, 64), depth=(3, 4, 5), num_heads=(1, 2), mlp_ratio=(2, 3, 4))
    assert refusal(Region(digits, {"params": [100, 200]}, options)).endswith("mean limits.params=[100k, 200k]?")


def test_only_quantities_of_thousands_have_a_suffix() -> None:
    assert meant("activations", (-math.inf, 40), (20e6, 84e6)) == " Did you mean limits.activations=[null, 40M]?"
    assert meant("latency", (-math.inf, 40), (20e6, 84e6)) == meant("latency", (-math.inf, 40), (49.3, 84.1)) == ""
    assert meant("heat", (5, 40), (20e6, 84e6)) == ""


@pytest.mark.parametrize(
    "limits",
    [
        {"params": [None, "5M"]},
        {"params": [None, 5]},  # 5M is below all, 5G far above
        {"params": [None, 1e-9]},
        {"params": [1, 200]},  # 200M is far above, too
        {"macs": [4, 6]},
        {"macs": [0, 900]},
    ],
)
def test_other_unreachable_limits_get_no_such_hint(limits: Any) -> None:
    assert "mean" not in refusal(Region(tas.space("autoformer_tiny"), limits))


def test_limits_that_exclude_each_other_are_refused_with_proof_and_the_nearest_values() -> None:
    space, codes = SPACES["vit"], ALL["vit"]
    cost = tas.cost(codes, space, **OPTIONS)
    top = int(np.sort(cost.macs)[-50])
    found = region(space, {"params": [None, int(cost.params.min()) + 1], "macs": [top, None]})
    text = refusal(found)
    above = cost.params[cost.macs >= top].min()
    below = cost.macs[cost.params <= cost.params.min() + 1].max()
    assert text.startswith("limits.params, limits.macs: no network of 'vit' has params of at most")
    assert " at once. The space reaches params from " in text
    assert text.endswith(f"The nearest within the other limits: params {above:,}; macs {below:,}.")


@pytest.mark.slow
def test_a_band_between_two_networks_is_refused_with_its_neighbours() -> None:
    space = tas.space("autoformer_base")
    params = np.unique(tas.cost(space.sample_codes(0, 20_000), space).params)
    gap = int(np.diff(params).argmax())
    low, high = int(params[gap]) + 1, int(params[gap]) + 2
    found = Region(space, {"params": [low, high]})
    text = refusal(found)
    below, above = (int(word.rstrip(".").replace(",", "")) for word in text.split("params ")[-1].split(" and "))
    assert params[gap] <= below < low and high < above <= params[gap + 1]
    for value in (below, above):
        assert Region(space, {"params": [value, value]}).size()
    assert Region(space, {"params": [below + 1, above - 1]}).size() == 0


def test_limits_on_other_functions_are_refused_without_a_claim_of_proof() -> None:
    tiny = tas.space("autoformer_tiny")
    found = Region(tiny, {"odd": [100, None]}, quantities={"odd": odd})
    assert refusal(found).endswith("Of odd only a sample is known.")
    found = Region(tiny, {"odd": [5, 5.5], "params": ["9M", None]}, quantities={"odd": lambda codes: odd(codes) * 7})
    assert "That is not proven: none of 65,280 or more networks tried was within." in refusal(found)
    assert found.size() is None


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_thousands_of_networks_of_a_band_are_drawn_in_the_spaces_own_proportions() -> None:
    tiny = tas.space("autoformer_tiny")
    found = Region(tiny, {"params": ["5M", "7M"]})
    begun = time.process_time()
    drawn = found.sample(3, 20_000)
    assert time.process_time() - begun < 10  # seconds of the processor; it takes a fifth of one
    assert len({row.tobytes() for row in drawn}) == 20_000 and found.allowed(drawn).all()
    own = tiny.sample_codes(99, 40_000)
    own = own[found.allowed(own)]
    for column in (0, 1):
        shares = [np.bincount(codes[:, column], minlength=3) / len(codes) for codes in (drawn, own)]
        assert np.abs(shares[0] - shares[1]).max() < 0.03
    assert not np.array_equal(found.sample(4, 10), drawn[:10])


def test_rare_networks_by_the_billion_are_drawn_without_numbering_them() -> None:
    base = tas.space("autoformer_base")
    found = Region(base, {"params": ["42M", "45M"]})
    drawn = found.sample(0, 1500)
    assert (found.size() or 0) > 10**9 and found.allowed(base.sample_codes(1, 20_000)).mean() < 0.01
    assert len({row.tobytes() for row in drawn}) == 1500 and found.allowed(drawn).all()
    assert np.array_equal(found.sample(0, 700), drawn[:700])


def test_bands_of_one_in_a_million_are_drawn_from() -> None:
    tiny = tas.space("autoformer_tiny")
    found = Region(tiny, {"params": ["5M", 5_450_000]})
    size = found.size()
    assert size is not None and 50 < size < tiny.size() / 10**6
    drawn = found.sample(0, 10_000)
    assert len({row.tobytes() for row in drawn}) == len(drawn) == size
    again = found.sample(0, 5, seen={row.tobytes() for row in drawn[:-3]})
    assert {row.tobytes() for row in again} == {row.tobytes() for row in drawn[-3:]}


def test_a_region_of_one_network_is_exhausted_by_it() -> None:
    tiny = tas.space("autoformer_tiny")
    smallest = tas.cost(tiny.smallest()).params
    found = Region(tiny, {"params": [smallest, smallest]})
    found.check()
    drawn = found.sample(5, 10)
    assert found.size() == len(drawn) == 1 and tiny.decode(drawn) == [tiny.smallest()]
    assert found.sample(5, 10, seen=[drawn[0].tobytes()]).shape == (0, len(tiny.columns))
    assert found.sample(5, 0).shape == (0, len(tiny.columns))


def test_a_table_of_another_space_is_refused() -> None:
    with pytest.raises(UserError, match=r"^limits.latency: its table is of space 'pit', not of 'vit'$"):
        region(vit(), {"latency": [None, 3]}, latency=table(pit()))


def test_without_limits_the_region_is_the_space() -> None:
    found = region(vit(), None)
    found.check()
    assert found.size() == vit().size() == len(ALL["vit"]) == len(found.sample(0, 10**4))
    assert found.exact and found.allowed(ALL["vit"]).all()
    with pytest.raises(UserError, match="n must not be negative"):
        found.sample(0, -1)


def test_global_random_state_does_not_matter() -> None:
    found = region(mixed(), {"params": [None, 4000]})
    np.random.seed(1)
    first = found.sample(0, 20)
    np.random.seed(2)
    state = np.random.get_state()[1].tolist()  # type: ignore[index]
    assert np.array_equal(region(mixed(), {"params": [None, 4000]}).sample(0, 20), first)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]


# --- quantities -------------------------------------------------------------------------------------------------------


def test_sums_of_fractions_have_exact_ranges_but_no_counts() -> None:
    space, codes = SPACES["vit"], ALL["vit"]
    total = table(space).total
    fractions = Total(tuple(type(term)(term.columns, term.table / 3) for term in total.terms))
    found = region(space, {"heat": [0, float(np.median(fractions(codes)))]}, heat=fractions)
    assert found.ranges()["heat"] == pytest.approx((fractions(codes).min(), fractions(codes).max()))
    assert not found.exact and found.size() == found.allowed(codes).sum()


def test_scaled_bounds_are_taken_in_the_users_decimals() -> None:
    space, codes = SPACES["vit"], ALL["vit"]
    latency = table(space)
    values = np.unique(latency(codes))[:: len(codes) // 60]
    for value in values.tolist():  # products of some of them by a million are no whole numbers in float64
        expected = int((latency(codes) == value).sum())
        found = region(space, {"latency": [value, value]}, latency=Scaled(latency.total, latency.per))
        assert found.size() == expected == found.allowed(codes).sum() > 0
    found = region(space, {"latency": [values[3] + 1e-7, values[3] + 2e-7]}, latency=latency)
    assert found.size() == 0  # between two nanoseconds
    assert any(int(value * 10**6) != round(value * 10**6) for value in values.tolist())


def test_costs_depend_on_the_network() -> None:
    net = tas.network(vit().smallest(), img_size=16, patch_size=8, num_classes=3)
    for given_ in (net, {"img_size": 16, "patch_size": 8, "num_classes": 3}):
        found = Region(vit(), None, given_)
        expected = tas.cost(ALL["vit"], vit(), img_size=16, patch_size=8, num_classes=3)
        assert (found.quantities(ALL["vit"])["params"] == expected.params).all()
        assert found.ranges()["macs"] == (expected.macs.min(), expected.macs.max())


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ((5e6, 7e6), "5,000,000 to 7,000,000"),
        ((-np.inf, 6e6), "at most 6,000,000"),
        ((0.25, np.inf), "at least 0.25"),
        ((40, 40), "exactly 40"),
        ((-np.inf, np.inf), "any"),
        ((0, 0), "exactly 0"),
    ],
)
def test_a_range_in_words(bounds: tuple[float, float], said: str) -> None:
    assert span(bounds) == said
