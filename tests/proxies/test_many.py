"""`score_many`: equal to one network at a time, streamed, resumed after a kill, shared among processes, flat memory."""

from __future__ import annotations

import csv
import gc
import json
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lightning_tas as tas
from lightning_tas.architecture import Architecture
from lightning_tas.errors import UserError
from lightning_tas.proxies.many import Exact
from lightning_tas.proxies.registry import chosen
from lightning_tas.proxies.scorer import combined
from lightning_tas.proxies.setting import Setting
from lightning_tas.spaces import isotropic

NAMES = ["params", "snip", "dss", "dss_pp"]
SPACE = isotropic("mini", embed_dim=[16, 32], depth=[1, 2], num_heads=[1, 2], mlp_ratio=[1, 2])


def supernet(**options: Any) -> Any:
    """With every parameter random, the same in every process."""
    given = {"num_classes": 4, "img_size": 8, "in_chans": 1, "patch_size": 4, **options}
    net = tas.supernet(SPACE, **given)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + 0.1)
    return net


def archs(number: int = 7) -> list[Architecture]:
    return SPACE.sample(0, n=number)


def same(a: tas.Scores, b: tas.Scores, names: list[str] = NAMES) -> None:
    """Bit for bit, but for the times."""
    assert a.archs == b.archs and (a.params == b.params).all() and (a.macs == b.macs).all()
    for name in names:
        assert a.value(name).tobytes() == b.value(name).tobytes(), name
        assert (a.valid(name) == b.valid(name)).all() and a.reason(name) == b.reason(name)
    if "dss" in names:
        assert a.extras("dss", "diversity").tobytes() == b.extras("dss", "diversity").tobytes()


def test_equals_scoring_one_network_at_a_time() -> None:
    net, images, labels = supernet(), torch.randn(3, 1, 8, 8), torch.tensor([0, 3, 1])
    scores = tas.score_many(NAMES, net, archs(), seed=5, images=images, labels=labels)
    assert scores.names == tuple(NAMES) and len(scores) == 7 and scores.ids == [arch.id for arch in archs()]
    for i, arch in enumerate(archs()):
        for name in ("params", "snip", "dss"):
            alone = tas.score_one(name, net, arch, seed=5, images=images, labels=labels)
            assert scores.value(name)[i] == alone.value and scores.valid(name)[i] == alone.valid
            assert scores.seconds(name)[i] > 0
        assert scores.extras("dss", "saliency")[i] == alone.extras["saliency"]
        assert (scores.params[i], scores.macs[i]) == tas.cost(arch, net)
    rows = [{"dss": scores.score("dss", i)} for i in range(7)]
    expected = [score.value for score in combined(tas.proxies()["dss_pp"], rows)]
    assert scores.value("dss_pp").tolist() == expected and len(set(expected)) > 3


def test_rows_tell_everything() -> None:
    scores = tas.score_many(["snip", "dss_pp"], supernet(), archs(3))
    row = scores.to_rows()[1]
    assert Architecture.from_dict(row["arch"]) == archs()[1] and row["id"] == archs()[1].id
    assert row["snip.value"] == scores.value("snip")[1] and row["dss_pp.value"] == scores.value("dss_pp")[1]
    assert (row["params"], row["snip.valid"], row["snip.reason"]) == (scores.params[1], True, "")
    assert "dss.value" not in row, "components that nobody asked for"


def test_common_weights_and_one_batch() -> None:
    """A supernet's slices and one batch serve all; without a network each has fresh weights of the same seed."""
    net = supernet()
    scores = tas.score_many("snip", net, archs(3), seed=1, batch_size=4)
    assert scores.value("snip")[2] == tas.score_one("snip", net, archs()[2], seed=1, batch_size=4).value
    mixed = [archs()[0], Architecture.vit(12, [3], [2], family="autoprox_vit")]
    build = {"num_classes": 4, "img_size": 8, "in_chans": 1, "patch_size": 4}
    fresh = tas.score_many("snip", None, mixed, seed=1, build=build)
    for i, arch in enumerate(mixed):
        assert fresh.value("snip")[i] == tas.score_one("snip", None, arch, seed=1, build=build).value
    assert fresh.value("snip")[0] != scores.value("snip")[0]


def test_weight_norms_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_tas.proxies import many, nuclear

    caches: list[nuclear.NormCache] = []

    class Counted(nuclear.NormCache):
        def __init__(self) -> None:
            super().__init__()
            caches.append(self)

    monkeypatch.setattr(many.Exact.__dataclass_fields__["norms"], "default_factory", Counted)
    scorer = many.Exact(Setting(supernet(), 0, None, None, 2, None, None, None), [tas.proxies()["dss"]], {}, Counted())
    list(scorer.rows(list(enumerate(SPACE.enumerate()))))
    # Layers x (qkv, proj) x (16, 32 wide) x (1, 2 heads): however many networks.
    assert caches[-1].computed == 2 * 2 * 2 * 2 < SPACE.size()


def test_codes_generators_and_short_batches() -> None:
    net, listed = supernet(), archs()
    whole = tas.score_many(NAMES, net, listed, images=torch.ones(2, 1, 8, 8))  # fewer images than networks
    same(whole, tas.score_many(NAMES, net, SPACE.encode(listed), images=torch.ones(2, 1, 8, 8)))
    same(whole, tas.score_many(NAMES, net, (a for a in listed), images=torch.ones(2, 1, 8, 8)))


def test_streams_what_is_finished(tmp_path: Path) -> None:
    """A generator that stops in the middle leaves the networks before it in the file."""

    def broken() -> Iterator[Architecture]:
        yield from archs()[:4]
        lines = (tmp_path / "scores.csv").read_text().splitlines()
        assert len(lines) == 5, "a header and four networks"
        raise RuntimeError("enough")

    net, path = supernet(), tmp_path / "scores.csv"
    with pytest.raises(RuntimeError, match="enough"):
        tas.score_many(NAMES, net, broken(), path=path)
    before = path.read_bytes()
    scores = tas.score_many(NAMES, net, archs(), path=path)
    assert path.read_bytes().startswith(before), "what was there is not computed again"
    same(scores, tas.score_many(NAMES, net, archs()))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == scores.ids
    assert [float(row["dss.value"]) for row in rows] == scores.value("dss").tolist()
    assert json.loads(rows[0]["dss.extras"]).keys() == {"diversity", "saliency"}
    assert [Architecture.from_dict(json.loads(row["arch"])) for row in rows] == archs()


@pytest.mark.parametrize("cut", [1, 40, 400, 10**6])
def test_torn_end_is_cut_and_redone(tmp_path: Path, cut: int) -> None:
    net, path = supernet(), tmp_path / "scores.csv"
    tas.score_many(NAMES, net, archs(), path=path)
    text = path.read_bytes()
    path.write_bytes(text[: max(0, len(text) - cut)])
    same(tas.score_many(NAMES, net, archs(), path=path), tas.score_many(NAMES, net, archs()))
    assert path.read_bytes().count(b"\n") == 8


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    net, path = supernet(), tmp_path / "scores.csv"
    tas.score_many("snip", net, archs(3), path=path)
    before = path.read_bytes()
    for message, changed in {
        r"seed: 0 in the file, now 1": {"seed": 1},
        r"proxies: \['snip'\] in the file, now \['plain'\]": {"names": "plain"},
        r"images: 16 in the file, now 8": {"batch_size": 8},
        r"init: 'inherited' in the file, now 'normal'": {"init": "normal"},
        r"mode: 'exact' in the file, now 'inherited'": {"mode": "inherited"},
        r"labels: None": {"images": torch.ones(2, 1, 8, 8), "labels": torch.tensor([0, 1])},
        r"network 0 in the file is \w+, not \w+ as given": {"archs": archs()[1:3]},
    }.items():
        options: dict[str, Any] = {"names": "snip", "net": net, "archs": archs(3), "path": path, **changed}
        with pytest.raises(UserError, match=message):
            tas.score_many(options.pop("names"), options.pop("net"), options.pop("archs"), **options)
    with torch.no_grad():
        net.head.weight[0, 0] += 1.0
    with pytest.raises(UserError, match="weights: '"):
        tas.score_many("snip", net, archs(3), path=path)
    assert path.read_bytes() == before
    again = tas.score_many("snip", net, archs(3), path=path, resume=False)
    same(again, tas.score_many("snip", net, archs(3)), ["snip"])


def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not what its scores depend on"):
        tas.score_many("snip", supernet(), archs(2), path=path)
    with pytest.raises(UserError, match="cannot be written"):
        tas.score_many("snip", supernet(), archs(2), path=path / "below" / "scores.csv")
    assert path.read_text() == "a,b\n1,2\n"


def test_shares_of_processes_that_do_not_talk(tmp_path: Path) -> None:
    net, path, whole = supernet(), tmp_path / "scores.csv", tas.score_many(NAMES, supernet(), archs())
    part = tas.score_many(NAMES, net, archs(), path=path, shard=(1, 3))
    assert part.archs == archs()[1::3] and part.value("snip").tolist() == whole.value("snip")[1::3].tolist()
    tas.score_many(NAMES, net, archs(), path=path, shard=(0, 3))
    assert {p.name for p in tmp_path.glob("*.csv")} == {"scores.part0of3.csv", "scores.part1of3.csv"}
    calls: list[Architecture] = []
    original = net.subnet
    net.subnet = lambda arch: (calls.append(arch), original(arch))[1]
    same(tas.score_many(NAMES, net, archs(), path=path), whole)
    assert calls == archs()[2::3], "only the missing share is scored"
    assert [p.name for p in tmp_path.glob("*.csv")] == ["scores.csv"]
    places = [int(line.split(",")[0]) for line in path.read_text().splitlines()[1:]]
    assert places == list(range(7))
    in_memory = tas.score_many(NAMES, net, archs(), shard=(2, 3))
    assert in_memory.archs == archs()[2::3]
    with pytest.raises(UserError, match="shard: "):
        tas.score_many(NAMES, net, archs(), shard=(3, 3))


def ranks(folder: Path, bad: bool) -> Any:
    """One rank: scores to a file and in memory, alone in the group, then a mistake on one rank."""
    net, rank = supernet(), dist.get_rank()
    found = [
        tas.score_many(NAMES, net, archs(), path=folder / "group.csv"),
        tas.score_many(NAMES, net, archs()),
        tas.score_many(NAMES, net, archs(), mode="inherited", path=folder / "inherited.csv"),
        tas.score_many(NAMES, net, archs(), shard=(0, 1)) if rank == 0 else None,
    ]
    message = ""
    if bad:
        broken = [Architecture.vit(64, [1], [1]), archs()[0]]  # the first is rank 0's and does not fit
        try:
            tas.score_many("snip", net, broken)
        except UserError as error:
            message = str(error)
    return [None if s is None else {n: s.value(n) for n in NAMES} for s in found], message


@pytest.mark.slow
def test_ranks_share_and_agree(processes: Any, tmp_path: Path) -> None:
    """Two gloo ranks give one process's numbers bit for bit, on both; a mistake on one ends both alike."""
    net = supernet()
    # The file of one process, killed in its middle: the ranks go on with it.
    tas.score_many(NAMES, net, archs(), path=tmp_path / "group.csv")
    text = (tmp_path / "group.csv").read_bytes()
    (tmp_path / "group.csv").write_bytes(text[: len(text) // 2])
    exact, shared = (tas.score_many(NAMES, net, archs(), mode=mode) for mode in ("exact", "inherited"))
    first, second = processes.run(ranks, 2, tmp_path, True)
    for found, message in (first, second):
        for values, expected in zip(found, (exact, exact, shared, exact), strict=True):
            if values is not None:
                assert all(values[n].tobytes() == expected.value(n).tobytes() for n in NAMES)
        assert "64 exceeds" in message
    assert first[0][3] is not None
    assert {p.name for p in tmp_path.glob("*.csv")} == {"group.csv", "inherited.csv"}
    assert (tmp_path / "group.csv").read_bytes().startswith(text[: text[: len(text) // 2].rindex(b"\n")])


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_many import NAMES, archs, supernet
import lightning_tas as tas
torch.set_num_threads(1)
tas.score_many(NAMES, supernet(), archs(400), path={path!r})
"""


@pytest.mark.slow
def test_killed_and_continued(processes: Any, tmp_path: Path) -> None:
    """SIGKILL in the middle of the work loses nothing that was finished."""
    path = tmp_path / "scores.csv"
    code = SCRIPT.format(tests=str(Path(__file__).parent), path=str(path))
    process = processes.command("python", "-c", code)
    end = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") > 5):
        assert process.status is None and time.monotonic() < end, process.report()
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    processes.wait([process], check=False)
    kept = path.read_bytes()
    number = kept.count(b"\n") - 1
    assert 5 <= number < 400
    scores = tas.score_many(NAMES, supernet(), archs(number + 3), path=path)
    assert path.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    same(scores, tas.score_many(NAMES, supernet(), archs(number + 3)))


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    """Nothing of a network outlives its scores, also while nobody collects cycles."""
    net = supernet()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def many(name: str, number: int) -> None:
        listed = (SPACE.largest() for _ in range(number))
        tas.score_many(["snip", "dss"], net, listed, path=tmp_path / name, batch_size=64)

    many("warm.csv", 5)
    gc.collect()
    before = resident()
    gc.disable()
    try:
        many("more.csv", 40)
        after = resident()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [one for one in gc.garbage if isinstance(one, torch.Tensor | torch.nn.Module)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept, "only small things may wait for the collector"
    assert after - before < 40 * 50_000


@pytest.mark.parametrize(("name", "threads"), [("snip", 1), ("dss", 1), ("dss", 2)])
def test_between_networks_the_caller_is_in_its_own_modes(name: str, threads: int) -> None:
    setting = Setting(supernet(), 0, None, None, 2, None, None, None)
    before = torch.get_float32_matmul_precision()
    with torch.no_grad():
        rows = Exact(setting, chosen(name), {}, threads=threads).rows(list(enumerate(archs(3))))
        assert next(rows).scores[name].valid
        assert not torch.is_grad_enabled() and torch.get_float32_matmul_precision() == before
        rows.close()
        assert not torch.is_grad_enabled()


def test_leaves_no_trace_and_needs_none() -> None:
    net = supernet()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    with torch.inference_mode():
        quiet = tas.score_many(NAMES, net, archs(3))
    assert random.getstate() == before[0] and np.random.get_state()[1].tobytes() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    torch.manual_seed(2)
    same(quiet, tas.score_many(NAMES, net, archs(3)))


def test_mistakes() -> None:
    net = supernet()
    with pytest.raises(UserError, match=r"mode: 'exakt'.*Did you mean 'exact'"):
        tas.score_many("snip", net, archs(2), mode="exakt")
    with pytest.raises(UserError, match=r"proxy: 'snipp'.*Did you mean 'snip'"):
        tas.score_many("snipp", net, archs(2))
    with pytest.raises(UserError, match=r"option of proxy 'dss'.*qkw.*'qkv'"):
        tas.score_many("dss_pp", net, archs(2), options={"dss": {"qkw": "split"}})
    with pytest.raises(UserError, match="options: 'plain' is not valid"):
        tas.score_many("snip", net, archs(2), options={"plain": {}})
    with pytest.raises(UserError, match="want other options of dss"):
        options: dict[str, dict[str, Any]] = {"dss": {"qkv": "split"}, "dss_pp": {"qkv": "fused"}}
        tas.score_many(["dss", "dss_pp"], net, archs(2), options=options)
    with pytest.raises(UserError, match="none to score"):
        tas.score_many("snip", net, [])
    with pytest.raises(UserError, match="codes need a supernet"):
        tas.score_many("snip", None, SPACE.encode(archs(2)))
    with pytest.raises(UserError, match="64 exceeds"):
        tas.score_many("snip", net, [Architecture.vit(64, [1], [1])])
    scores = tas.score_many("snip", net, archs(2))
    with pytest.raises(UserError, match="proxy: 'dss' is not valid; valid: snip"):
        scores.value("dss")
    with pytest.raises(UserError, match="extras of snip"):
        scores.extras("snip", "diversity")


def test_options_reach_the_proxies() -> None:
    net = supernet()
    split = tas.score_many(["dss", "dss_pp"], net, archs(3), options={"dss": {"qkv": "split"}})
    expected = [tas.score_one("dss", net, arch, qkv="split").value for arch in archs(3)]
    assert split.value("dss").tolist() == expected
    assert (split.value("dss") != tas.score_many("dss", net, archs(3)).value("dss")).all()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["supernet", "fresh"])
def test_light_proxies_score_networks_side_by_side(given: str, tmp_path: Path) -> None:
    """Two threads, a network each: the numbers, their order and the file are those of one thread."""
    net = supernet() if given == "supernet" else None
    archs = supernet().space.sample(4, n=11)
    names = ["params", "dss", "synflow", "sept", "auto_prox_p"]
    kind: Any = (
        {"init": None}
        if net is not None
        else {"init": "kaiming_normal", "build": {"num_classes": 5, "img_size": 16, "patch_size": 8}}
    )
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    alone = tas.score_many(names, net, archs, **kind)
    try:
        torch.set_num_threads(2)
        both = tas.score_many(names, net, archs, path=tmp_path / "scores.csv", **kind)
        assert torch.get_num_threads() == 2
        heavy = tas.score_many(["dss", "snip"], net, archs[:2], batch_size=2, **kind)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in names:
        assert both.value(name).tolist() == alone.value(name).tolist() and both.archs == archs
    np.testing.assert_allclose(heavy.value("dss"), alone.value("dss")[:2], rtol=1e-6)


def test_a_line_a_minute_where_no_bar_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_tas.progress.EVERY", 0.0)  # a minute
    given = [Architecture.vit(16, [1], [1]), Architecture.vit(16, [2], [1])]
    build = {"img_size": 8, "patch_size": 4, "num_classes": 2}
    tas.score_many(["params"], None, given, build=build, progress=True)
    assert capsys.readouterr().err.splitlines() == [f"score: {n} of 2 networks after 0 min" for n in (1, 2)]
