"""Searches as callbacks in a plain Trainer: training does not notice, kill and resume, what is written, refusals."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_tas import callbacks
from lightning_tas.architecture import Architecture
from lightning_tas.callbacks import search_record
from lightning_tas.callbacks.preferred_selection import PreferredSelection
from lightning_tas.callbacks.proxy_scoring import ProxyScoring
from lightning_tas.callbacks.search_build import LATENCY, Surroundings, build_job, build_region, latency_table
from lightning_tas.callbacks.searches import CALLBACKS, AnySearch, EvolutionSearch, RandomSearch
from lightning_tas.commands.config import CheckpointConfig
from lightning_tas.costs import cost
from lightning_tas.errors import UserError
from lightning_tas.evaluator import evaluate
from lightning_tas.launch.checkpoints import RunCheckpoints
from lightning_tas.launch.metrics import RowBeforeCheckpoint, RunMetrics
from lightning_tas.search.config import LimitsConfig, SearchConfig, SelectConfig
from lightning_tas.training.retrain import RetrainModule

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import small
from scoring_trace import Kill, Killed, Trace, same

SMALL: dict[str, Any] = {"population": 4, "generations": 2, "crossovers": 2, "mutations": 2, "top": 3}
RECIPE = {"ema": True, "ema_decay": 0.5, "mixup": 0.2}


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Drawing takes most of the time here: the tests of plots do it."""
    drawn: list[Path] = []
    monkeypatch.setattr(search_record, "search_figure", lambda *args: args)
    monkeypatch.setattr(search_record, "save_figure", lambda figure, path: drawn.append(path))
    return drawn


def loader() -> Any:
    return small.loader(0, 1)


def fit(folder: Path, *own: pl.Callback, resume: Path | None = None, restored: int | None = None) -> pl.Trainer:
    """Train three epochs of four updates as the fit command does, with its metrics and checkpoints."""
    module = small.make_module(small.make_net(drop_path_rate=0.2), **RECIPE)
    metrics = RunMetrics(folder / "metrics.csv", "supernet", restored)
    saving = RunCheckpoints(folder / "checkpoints", CheckpointConfig(keep_last=-1))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=[metrics], enable_progress_bar=False, max_epochs=3,
        enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1, default_root_dir=str(folder),
        callbacks=[*own, *module.callbacks(), RowBeforeCheckpoint(metrics, 1), saving],
    )  # fmt: skip
    ckpt = str(resume) if resume is not None else None
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt, weights_only=True)
    return trainer


def plain(folder: Path, *own: pl.Callback) -> pl.Trainer:
    """As a user makes one."""
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=list(own), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=str(folder),
    )  # fmt: skip


def checkpoint(folder: Path, step: int) -> Path:
    (path,) = (folder / "checkpoints").glob(f"*-step={step:07d}.ckpt")
    return path


def own_state(path: Path, name: str = "EvolutionSearch") -> dict[str, Any]:
    content = torch.load(path, weights_only=True)
    (state,) = (value for key, value in content["callbacks"].items() if key.startswith(name))
    return dict(state)


def searching(folder: Path, **more: Any) -> EvolutionSearch:
    given = {"when": "every_n_epochs", "top": 2, **more}
    return EvolutionSearch("accuracy", {"params": [None, 20_000]}, folder=folder, loader=loader, options=SMALL, **given)


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """With averaging, mixing, drop path: losses, sub-networks, random states, modes, gradients, checkpoints, rows."""
    without, with_ = Trace(), Trace()
    fit(tmp_path / "without", without)
    fit(
        tmp_path / "with",
        with_,
        searching(tmp_path / "with"),
        AnySearch("random", score="snip", networks=3, folder=tmp_path),
    )
    assert len(without.steps) == 12 and len({step["loss"] for step in without.steps}) == 12
    same(with_.steps, without.steps)
    same(with_.epochs, without.epochs)
    for step in (4, 8, 12):
        got, want = (torch.load(checkpoint(tmp_path / name, step), weights_only=True) for name in ("with", "without"))
        assert [key for key in got["callbacks"] if "Search" in key]
        got["callbacks"] = {key: value for key, value in got["callbacks"].items() if "Search" not in key}
        same(got, want)


def test_winners_are_measured_with_the_averaged_weights_and_meet_the_limits(tmp_path: Path) -> None:
    trainer = fit(tmp_path, search := searching(tmp_path, racing=False, when="fit_end"))
    (visit,) = search.visits
    assert visit["epoch"] == 3 and visit["step"] == 12
    net = trainer.lightning_module.net  # after a fit the module holds the average
    entries = visit["networks"]
    archs = [callbacks_arch(entry) for entry in entries]
    measured = evaluate(net, archs, loader())
    assert [entry["score"] for entry in entries] == pytest.approx([found.top1 for found in measured])
    assert len(entries) == 2 and entries[0]["score"] >= entries[1]["score"]
    for entry, arch in zip(entries, archs, strict=True):
        assert entry["params"] == cost(arch, net).params <= 20_000
    assert json.loads((tmp_path / "search.json").read_text())["networks"] == entries
    with (tmp_path / "search.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len({row["id"] for row in rows}) == visit["evaluations"]
    assert max(float(row["accuracy"]) for row in rows) == entries[0]["score"]


def callbacks_arch(entry: dict[str, Any]) -> Any:
    from lightning_tas.architecture import Architecture

    return Architecture.from_dict(entry["arch"])


@pytest.mark.parametrize("step", [3, 6, 10])
def test_a_killed_fit_resumes_to_the_same_searches(tmp_path: Path, step: int) -> None:
    fit(tmp_path / "whole", searching(tmp_path / "whole"))
    with pytest.raises(Killed):
        fit(tmp_path / "cut", searching(tmp_path / "cut"), Kill(step))
    last = step // 4 * 4
    resume = checkpoint(tmp_path / "cut", last) if last else None
    fit(tmp_path / "cut", searching(tmp_path / "cut"), resume=resume, restored=last)
    same(own_state(checkpoint(tmp_path / "cut", 12)), own_state(checkpoint(tmp_path / "whole", 12)))
    for name in ("search.json", "search.csv", "metrics.csv"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_search_killed_in_its_middle_goes_on_there(tmp_path: Path) -> None:
    """Nothing is scored twice, and the end is that of an uninterrupted search, whatever the generation."""
    net = small.make_net()
    search = SearchConfig(strategy="evolution", score="snip", batch_size=4, options=SMALL)
    for name in ("whole", "cut1", "cut2"):
        (tmp_path / name).mkdir()
    whole = build_job(net, search, LimitsConfig(), Surroundings(folder=tmp_path / "whole")).run()
    for generations in (1, 2):
        folder = tmp_path / f"cut{generations}"
        job = build_job(net, search, LimitsConfig(), Surroundings(folder=folder))
        job.limit = generations
        scored = job.run().evaluations
        again = build_job(net, search, LimitsConfig(), Surroundings(folder=folder))
        asked: list[str] = []
        scorer = again.scorer
        again.scorer = lambda archs, names, s=scorer, a=asked: a.extend(x.id for x in archs) or s(archs, names)
        found = again.run()
        assert found.to_dict() == whole.to_dict()
        assert len(asked) == len(set(asked)) == whole.evaluations - scored
        assert (folder / "search.csv").read_bytes() == (tmp_path / "whole" / "search.csv").read_bytes()


def test_a_raced_search_goes_on_against_the_same_best(tmp_path: Path) -> None:
    """Which networks are given up depends on the best before them: they are part of the state."""
    net = small.make_net()
    options = {**SMALL, "population": 8, "crossovers": 3, "mutations": 3, "top": 2}
    search = SearchConfig(strategy="evolution", options=options, racing_top=2, racing_error=0.5)
    data = many_images()

    def job(folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        return build_job(net, search, LimitsConfig(), Surroundings(folder=folder, loader=lambda: data))

    whole = job(tmp_path / "whole").run()
    text = (tmp_path / "whole" / "search.csv").read_text()
    assert "accuracy.dropped" in text  # or this tests nothing
    for generations in (1, 2):
        folder = tmp_path / f"cut{generations}"
        first = job(folder)
        first.limit = generations
        first.run()
        assert first.state_dict()["scorer"]["accuracy"]
        assert job(folder).run().to_dict() == whole.to_dict()
        assert (folder / "search.csv").read_text() == text


def many_images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Enough images, with targets that some networks find, for races to have losers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(400, 1, 8, 8, generator=generator)
    best = small.make_net().eval()
    with torch.no_grad():
        targets = best(images, best.space.largest()).argmax(dim=1)
    return list(zip(images.split(100), targets.split(100), strict=True))


def test_racing_spares_strategies_that_need_every_network() -> None:
    net, data = small.make_net(), many_images()
    for strategy, options, racing in (
        ("evolution", {"top": 7}, 7),
        ("s3_evolution", {"elitist": False}, None),
        ("nsga2", {"minimise": ["params"]}, None),
        ("random", {"networks": 5}, 3),
    ):
        search = SearchConfig(strategy=strategy, options=options, racing_top=3)
        scorer = build_job(net, search, LimitsConfig(), Surroundings(loader=lambda: data)).scorer.special["accuracy"]
        assert scorer._racing == (racing is not None), strategy
        assert racing is None or scorer._race["top"] == racing, strategy


def test_a_plain_trainer_gets_a_result(tmp_path: Path) -> None:
    fit(tmp_path, RandomSearch("snip", when="fit_start", networks=3, folder=tmp_path, batch_size=2, top=2))
    record = json.loads((tmp_path / "result.json").read_text())
    assert [entry["label"] for entry in record["architectures"]] == ["best", "best-2"]
    assert {"seed", "limits", "checkpoint_sha256", "versions"} <= set(record)


def test_a_state_of_other_weights_settings_or_limits_is_not_continued(tmp_path: Path) -> None:
    search = SearchConfig(strategy="random", score="snip", batch_size=4, options={"networks": 5})
    build_job(small.make_net(), search, LimitsConfig(), Surroundings(folder=tmp_path)).run()
    other = small.make_net()
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    changed: list[tuple[Any, LimitsConfig, Surroundings]] = [
        (other, LimitsConfig(), Surroundings(folder=tmp_path)),
        (small.make_net(), LimitsConfig(params=[None, 50_000]), Surroundings(folder=tmp_path)),
        (small.make_net(), LimitsConfig(), Surroundings(seed=1, folder=tmp_path)),
    ]
    for net, limits, around in changed:
        job = build_job(net, search, limits, around)
        job._restore()
        assert job.strategy.evaluations == 0
    seen = replace(search, images="data")
    images, labels = next(iter(loader()))
    around = Surroundings(folder=tmp_path, batch=lambda n: (images[:n], labels[:n]))
    build_job(small.make_net(), seen, LimitsConfig(), around).run()
    for factor, kept in ((1, 5), (2, 0)):
        around = Surroundings(folder=tmp_path, batch=lambda n, f=factor: (f * images[:n], labels[:n]))
        job = build_job(small.make_net(), seen, LimitsConfig(), around)
        job._restore()
        assert job.strategy.evaluations == kept


def test_a_damaged_state_is_named_and_nothing_begins_anew(tmp_path: Path, flip: Callable[[Path], None]) -> None:
    search = SearchConfig(strategy="random", score="snip", batch_size=4, options={"networks": 5})
    build_job(small.make_net(), search, LimitsConfig(), Surroundings(folder=tmp_path)).run()
    path = tmp_path / search_record.STATE
    kept = path.read_bytes()
    flip(path)
    for damaged in (path.read_bytes(), b"half a file", b"", kept[:-100]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"search: its state '.*search-state\.pt' cannot be read .*remove the file"):
            build_job(small.make_net(), search, LimitsConfig(), Surroundings(folder=tmp_path)).run()
        assert path.read_bytes() == damaged


def test_when(tmp_path: Path) -> None:
    for when, epochs in (("fit_start", [0]), ("every_n_epochs", [2, 3]), ("fit_end", [3])):
        search = RandomSearch("snip", when=when, every_n_epochs=2, networks=3, folder=tmp_path / when, batch_size=2)
        fit(tmp_path / when, search)
        assert [visit["epoch"] for visit in search.visits] == epochs, when


def test_a_resumed_fit_refuses_another_search(tmp_path: Path) -> None:
    fit(tmp_path, searching(tmp_path))
    with pytest.raises(UserError, match="the search has other settings: search"):
        fit(tmp_path, searching(tmp_path, top=3), resume=checkpoint(tmp_path, 8), restored=8)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="when: 'later' is not valid"):
        RandomSearch("snip", when="later")
    with pytest.raises(UserError, match=r"search.options: .*'populaton'.*Did you mean 'population'"):
        EvolutionSearch("snip", populaton=3)
    with pytest.raises(UserError, match=r"search.score: 'snipp' is not valid.*Did you mean 'snip'"):
        RandomSearch("snipp")
    with pytest.raises(UserError, match=r"limits: 'param' is not valid.*Did you mean 'params'"):
        RandomSearch("snip", {"param": [1, 2]})
    with pytest.raises(UserError, match=r"limits.params: no network of 'mini' has params of at most 10"):
        fit(tmp_path, RandomSearch("snip", {"params": [None, 10]}))
    alone = RetrainModule(
        small.make_net().subnet(small.candidates()[0]), small.make_module(small.make_net()).train_config, 8
    )
    with pytest.raises(UserError, match="RetrainModule trains no supernet"):
        RandomSearch("snip").setup(pl.Trainer(logger=False), alone, "fit")


@pytest.mark.parametrize(
    ("searches", "message"),
    [
        ([{"score": "trained"}], "only the phase 'search'"),
        ([{"score": "snip", "images": "data"}], "'data' needs a data set"),
        ([{"score": "snip"}, {"score": "dss"}], "two searches would write into"),
        ([{"strategy": "nsga2", "minimise": ["latncy"]}], "search.options: minimise of nsga2: 'latncy'"),
        ([{"strategy": "exhaustive", "cap": 1}], "search.options: exhaustive: .* more than cap=1"),
    ],
)
def test_what_a_search_lacks_is_told_before_training(
    tmp_path: Path, searches: list[dict[str, Any]], message: str
) -> None:
    kinds = (RandomSearch, EvolutionSearch)
    own: list[pl.Callback] = []
    for kind, given in zip(kinds, searches, strict=False):
        made = AnySearch if "strategy" in given else kind
        own.append(made(folder=tmp_path, **({"score": "snip"} if "strategy" in given else {}), **given))
    trace = Trace()
    with pytest.raises(UserError, match=message):
        fit(tmp_path, trace, *own)
    assert not trace.steps


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({key: 0}, f"search.{key}: 0 is not valid") for key in ("top", "every_n_epochs", "batch_size", "racing_top")),
        *(({key: "1"}, f"search.{key}: '1' is not valid") for key in ("top", "eval_images", "train_epochs")),
        *(({key: "x"}, f"search.{key}: 'x' is not valid") for key in ("mode", "images", "init", "racing_error")),
        ({"racing_error": 1}, "search.racing_error: 1 is not valid"),
        ({"limits": 5}, "limits: 5 is not valid; valid: a mapping"),
        ({"limits": {"latency_batch": 0}}, "limits.latency_batch: 0 is not valid"),
        ({"limits": {"latency_error": 0}}, "limits.latency_error: 0 is not valid"),
        ({"limits": {"params": [7e6, 5e6]}}, "limits.params: the lower bound, 7000000.0, exceeds the upper one"),
        ({"limits": {"params": "x"}}, "limits.params: 'x' is not a number"),
        ({"limits": {"macs": [1, 2, 3]}}, "limits.macs: expected a pair"),
        ({"limits": {"latency": 5}}, "limits.latency: 5 is one number, but a limit has two sides"),
        ({"score": "zen", "mode": "inherited"}, "search.score: 'zen' has no tables of inherited weights"),
        ({"options": 5}, "search.options: 5 is not valid; valid: a mapping"),
    ],
)
def test_values_are_checked_as_in_commands(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RandomSearch(**{"score": "snip", **given})


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("etas", {"filter": "snip"}, "search.options: filter of etas: 'snip' needs the same score"),
        ("etas", {"filter": "ntrs"}, "search.options: filter of etas: 'ntrs' is not valid.*Did you mean 'ntsr'"),
        ("blockwise", {"guide": "accuracy"}, "search.options: guide of blockwise: 'accuracy' has no numbers per block"),
        ("blockwise", {"guide": "ntsr"}, "search.options: guide of blockwise: 'ntsr' has no numbers per block"),
        ("exact", {"front": 5, "mode": "inherited"}, "search.options: front: 5 is not valid; valid: true or false"),
        ("nsga2", {"objectives": ["snap"]}, "search.options: objectives of nsga2: 'snap' is not valid"),
    ],
)
def test_contradictions_are_told_before_training(strategy: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AnySearch(strategy, score="snip", **settings)


def test_more_threads_than_processors_are_refused() -> None:
    given = LimitsConfig(latency=[None, 100], latency_threads=100_000)
    with pytest.raises(UserError, match=r"limits.latency_threads: 100000 is not valid; valid: 1 to \d+"):
        build_region(small.make_net(), given, measure=False)


def documented() -> tuple[type[pl.LightningModule], Any]:
    """The module and the callbacks of docs/training.md, under "A LightningModule of one's own"."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "LightningModule" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/training.md", "exec"), names)
    return names["Mine"], names["own"]


def test_every_callback_works_in_a_module_of_ones_own(tmp_path: Path) -> None:
    """The documented one, trained with loaders alone: selection, scoring, and a search by accuracy."""
    kind, own = documented()
    module = kind(small.make_net())
    trainer = plain(tmp_path, *own)
    trainer.fit(module, loader(), loader())
    (search,) = (one for one in own if isinstance(one, RandomSearch))
    (found,) = search.visits
    best = Architecture.from_dict(found["networks"][0]["arch"])
    assert found["networks"][0]["score"] == pytest.approx(evaluate(module.net, [best], loader())[0].top1)
    (scoring,) = (one for one in own if isinstance(one, ProxyScoring))
    assert [one.epoch for one in scoring.record.scorings] == [0, 1]
    assert module.candidates and {arch.id for arch in module.trained} <= {one.arch.id for one in module.candidates}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomSearch("snip"), "search: Bare trains no supernet: it has no `net`.*; it has no seed; give"),
        (lambda: ProxyScoring("snip"), "scoring: Bare trains no supernet: it has no `net`.*; it has no seed; give"),
        (lambda: PreferredSelection(SelectConfig(), 0), "select: Bare trains no supernet: .*no method set_candidates"),
    ],
)
def test_a_module_is_told_all_that_it_lacks_before_training(make: Any, message: str) -> None:
    class Bare(pl.LightningModule):
        pass

    class Other(pl.LightningModule):
        net = small.make_net().subnet(small.candidates()[0])

    trainer = pl.Trainer(logger=False)
    with pytest.raises(UserError, match=message):
        make().setup(trainer, Bare(), "fit")
    with pytest.raises(UserError, match=r"its net, a .*, has no space, "):
        make().setup(trainer, Other(), "fit")


def test_accuracy_needs_images_that_all_processes_see_alike(tmp_path: Path) -> None:
    module = small.make_module(small.make_net())
    trace = Trace()
    with pytest.raises(UserError, match="'accuracy' needs held-out images: validation data, or loader="):
        plain(tmp_path, trace, RandomSearch("accuracy")).fit(module, loader())
    shuffled = torch.utils.data.DataLoader(loader().dataset, batch_size=8, shuffle=True)
    with pytest.raises(UserError, match="has a RandomSampler; give it shuffle=False"):
        plain(tmp_path, trace, RandomSearch("accuracy")).fit(module, loader(), shuffled)
    assert not trace.steps


def test_a_latency_table_is_kept_for_its_own_conditions(clock: Any, tmp_path: Path) -> None:
    net, given = small.make_net(), LimitsConfig(latency=[None, 100], latency_repeats=2, latency_threads=1)
    path = tmp_path / LATENCY
    table = latency_table(net, given, tmp_path)
    kept = path.read_bytes()
    assert latency_table(net, given, tmp_path).to_dict() == table.to_dict() and path.read_bytes() == kept
    other = latency_table(net, replace(given, latency_batch=2), tmp_path)
    assert other.conditions.batch_size == 2 and path.read_bytes() != kept
    longer = kept.replace(b'"scale": 0.', b'"scale": 3.').replace(b'"scale": 1.', b'"scale": 3.')
    assert longer != kept
    for damaged in (b"", b"{}", b"[]", b'{"space": 3}', kept[:-50], longer):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"limits\.latency: .*latency\.json' .*; remove the file to have them"):
            latency_table(net, given, tmp_path)
        assert path.read_bytes() == damaged


def test_every_strategy_of_the_issue_has_a_callback() -> None:
    names = {"EvolutionSearch", "BlockwiseEvolution", "EtasSearch", "RandomSearch", "ExactSearch"}
    assert names <= set(callbacks.__all__)
    assert {type_.__name__ for type_ in CALLBACKS.values()} == names


def test_progress_tells_best_score_acceptance_and_unique_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no bar can be drawn, as lines; and in a terminal as a bar with the same facts."""
    search = SearchConfig(strategy="evolution", score="snip", batch_size=2, options=SMALL)
    monkeypatch.setattr("lightning_tas.progress.EVERY", 0.0)
    job = build_job(small.make_net(), search, LimitsConfig(), Surroundings(progress=True))
    job.run()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("search: 4 networks after 0 min, best ")
    assert "accepted" in lines[-1] and "unique" in lines[-1] and lines[-1].startswith("search: 12 networks")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    build_job(small.make_net(), search, LimitsConfig(), Surroundings(progress=True)).run()
    bar = capsys.readouterr().err
    assert "12/12" in bar and "best=" in bar and "accepted=" in bar and "unique=" in bar
