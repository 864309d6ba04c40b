"""`per_phase`: every phase under settings of its own, checked as the recipe's are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_tas.commands import per_phase
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.commands.entry import main
from lightning_tas.commands.fit import settings_of
from lightning_tas.errors import UserError

STUDY = """\
# a study
defaults: [quickstart]
phases: [supernet, search, retrain]
sampler: {name: uniform}
search: {strategy: random, score: accuracy, options: {networks: 4}}
train: {lr: 1e-3, warmup_epochs: 20}
trainer: {max_epochs: 500}
per_phase:
  retrain: {train: {warmup_epochs: 5}, trainer: {max_epochs: 300}, data: {img_size: 16}}
"""


@pytest.fixture
def study(tmp_path: Path) -> str:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return f"recipe={path}"


def heir(folder: Path, text: str) -> str:
    path = folder / "heir.yaml"
    path.write_text(f"# an heir\ndefaults: [./study.yaml]\n{text}\n")
    return f"recipe={path}"


def epochs(config: Config) -> dict[str, tuple[int, float, object]]:
    return {
        label: (one.trainer.max_epochs, one.train.warmup_epochs, one.data.img_size)
        for label, one in per_phase.configs(config).items()
    }


def test_a_phase_has_its_own_and_the_rest_is_the_recipes(study):
    config = config_from("fit", [study])
    assert epochs(config) == {"supernet": (500, 20, None), "search": (500, 20, None), "retrain": (300, 5, 16)}
    retrain = per_phase.configs(config)["retrain"]
    assert (retrain.train.lr, retrain.data.batch_size, retrain.per_phase) == (1e-3, 64, None)


@pytest.mark.parametrize(
    "given",
    [
        ["per_phase.retrain.trainer.max_epochs=7", "per_phase.supernet.data.img_size=[8,16]"],
        ["per_phase.retrain={trainer: {max_epochs: 7}}", "per_phase.supernet.data={img_size: [8, 16]}"],
        ["per_phase={retrain: {trainer: {max_epochs: 7}}, supernet: {data: {img_size: [8, 16]}}}"],
    ],
)
def test_the_command_line_overrides_what_the_recipe_gives_a_phase(study, given):
    config = config_from("fit", [study, *given])
    assert epochs(config) == {"supernet": (500, 20, [8, 16]), "search": (500, 20, None), "retrain": (7, 5, 16)}


def test_a_key_of_all_phases_says_which_phase_it_does_not_reach(study):
    with pytest.warns(UserWarning, match=r"trainer.max_epochs is not that of every phase: .*'retrain'.*max_epochs=300"):
        config = config_from("fit", [study, "trainer.max_epochs=9"])
    assert [one[0] for one in epochs(config).values()] == [9, 9, 300]


def test_settings_go_with_their_phases(study, tmp_path):
    assert config_from("fit", [study, "phases=[supernet,measure]"]).per_phase is None
    assert config_from("fit", [study, "per_phase=null"]).per_phase is None
    assert config_from("fit", [heir(tmp_path, "phases: [supernet, measure]")]).per_phase is None
    assert config_from("fit", [heir(tmp_path, "per_phase: {retrain: null}")]).per_phase is None
    assert config_from("search", [study]).per_phase is not None
    config = config_from("fit", [heir(tmp_path, "per_phase: {retrain: {train: {lr: 1e-2}, data: {img_size: 24}}}")])
    retrain = per_phase.configs(config)["retrain"]
    assert (retrain.train.lr, retrain.train.warmup_epochs, retrain.data.img_size) == (1e-2, 5, 24)


def test_a_repeated_phase_has_a_number_and_goes_on_from_the_one_before(study):
    phases = "phases=[supernet,supernet,retrain,retrain,retrain]"
    config = config_from("fit", [study, phases, "per_phase.retrain-3.train.from_checkpoint=supernet-2"])
    found = per_phase.configs(config)
    starts = {label: one.train.from_checkpoint for label, one in found.items()}
    assert starts == {
        "supernet": None, "supernet-2": "supernet", "retrain": None, "retrain-2": "retrain", "retrain-3": "supernet-2",
    }  # fmt: skip
    assert found["retrain-2"].trainer.max_epochs == 500  # numbers have settings of their own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("per_phase.retrian.train.lr=1", r"per_phase.retrian: 'retrian' .*Did you mean 'retrain'\?"),
        ("per_phase.measure.data.img_size=8", r"per_phase.measure: .* no such phase; valid: supernet, search, retrain"),
        ("per_phase.retrain-2.train.lr=1", r"per_phase.retrain-2: .* no such phase"),
        ("per_phase.retrain-two.train.lr=1", r"named with its number, as retrain-2"),
        ("per_phase.retrain.train.warmup_epoch=1", r"^per_phase.retrain.train.warmup_epoch: .* 'train.warmup_epochs'"),
        ("per_phase.retrain.max_epochs=1", r"valid: data, model, .* Did you mean 'trainer.max_epochs'"),
        ("per_phase.retrain.train.warmup_epochs=a", r"^per_phase.retrain.train.warmup_epochs: 'a' .* a number"),
        ("per_phase.retrain.train.warmup_epochs=-1", r"^per_phase.retrain.train.warmup_epochs: -1"),
        ("per_phase={retrain: {train: {mixup_mode: elm}}}", r"^per_phase.retrain.train.mixup_mode: 'elm' .*'elem'"),
        ("per_phase.retrain.data.crop=rcc", r"^per_phase.retrain.data.crop: 'rcc' .*'rrc'"),
        ("per_phase.retrain.trainer.max_steps=0", r"^per_phase.retrain.trainer.max_steps: 0"),
        ("per_phase.supernet.train.compile=true", r"^per_phase.supernet.train.compile"),
        ("per_phase.retrain.train=3", r"^per_phase.retrain.train: 3 .* group of keys"),
        ("per_phase.retrain=3", r"^per_phase.retrain: 3 .* group of keys"),
        ("per_phase=retrain", r"^per_phase: 'retrain' .* group of keys"),
        ("per_phase.retrain.seed=1", r"^per_phase.retrain.seed: seed is not valid here"),
        ("per_phase.retrain.output_dir=x", r"^per_phase.retrain.output_dir: output_dir is not valid here"),
        ("per_phase.retrain.phases=[search]", r"^per_phase.retrain.phases: phases is not valid here"),
        ("per_phase.retrain.trainer.devices=2", r"^per_phase.retrain.trainer.devices: .* of the whole run"),
        ("per_phase.retrain.trainer={devices: 2}", r"^per_phase.retrain.trainer.devices: .* of the whole run"),
        (
            "per_phase={retrain: {trainer: {strategy: ddp}}}",
            r"^per_phase.retrain.trainer.strategy: .* of the whole run",
        ),
        ("per_phase.search.sampler.name=uniform", r"sampler is not valid here: the phase 'search'"),
        ("per_phase.retrain.train.from_checkpoint=/nowhere", r"^per_phase.retrain.train.from_checkpoint: '/nowhere'"),
        ("per_phase.supernet.train.from_checkpoint=retrain", r"^per_phase.supernet.train.from_checkpoint: 'retrain'"),
        ("phases=[retrain,supernet]", r"run in the order select, supernet.*give phases=\[supernet,retrain\]"),
        ("phases=[search,search]", r"'search' is listed twice"),
    ],
)
def test_mistakes_are_told_as_those_of_the_recipe(study, given, message):
    with pytest.raises(UserError, match=message):
        config_from("fit", [study, given])


def test_a_mistake_in_a_file_names_the_file(study, tmp_path):
    with pytest.raises(UserError, match=r"heir.yaml: per_phase.retrain.train.lrr: no such key"):
        config_from("fit", [heir(tmp_path, "per_phase: {retrain: {train: {lrr: 1}}}")])
    with pytest.raises(UserError, match=r"heir.yaml: per_phase.measure: .*no such phase"):
        config_from("fit", [heir(tmp_path, "per_phase: {measure: {data: {img_size: 8}}}")])


def test_train_compile_of_a_network_alone_is_valid_beside_a_supernet(study):
    config = config_from("fit", [study, "per_phase.retrain.train.compile=true"])
    assert [one.train.compile for one in per_phase.configs(config).values()] == [False, False, True]


def test_smoke_makes_every_phase_small(study):
    config = config_from("fit", [study, "smoke=true", "per_phase.retrain.train.warmup_epochs=0.5"])
    found = per_phase.configs(config)
    assert {one.trainer.max_epochs for one in found.values()} == {2}
    assert {one.data.name for one in found.values()} == {"synthetic"}
    assert found["retrain"].train.warmup_epochs == 0.5  # what is given stays
    # Another image size remains another one: what is inherited is resampled in a smoke run too.
    assert found["supernet"].data.img_size == 8 and found["retrain"].data.img_size == 12


def test_the_written_configuration_repeats_exactly(study, tmp_path):
    config = config_from("fit", [study, "per_phase.retrain.train.lr=2", "smoke=true"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    again = config_from("fit", [f"config={file}"])
    assert again == config and settings_of(again).hash == settings_of(config).hash


def test_resuming_tells_settings_of_a_phase_that_decide_the_result(study):
    first, same, other = (
        settings_of(config_from("fit", [study, f"per_phase.retrain.{given}"])).hash
        for given in ("data.num_workers=0", "data.num_workers=2", "data.batch_size=32")
    )
    assert first == same != other


def test_plan_shows_the_settings_phase_by_phase(study, capsys):
    assert main("fit", [study, "plan=true", "limits.params=null"]) == 0
    _, supernet, search, retrain = capsys.readouterr().out.split("\nphase ")
    assert supernet.startswith("1/3: supernet\n") and search.startswith("2/3: search\n")
    assert retrain.startswith("3/3: retrain; its own: train.warmup_epochs=5 trainer.max_epochs=300 data.img_size=16\n")
    for text, number in ((supernet, "500"), (retrain, "300")):
        assert [line.split()[-1] for line in text.splitlines() if line.startswith("epochs")] == [number]


@pytest.mark.parametrize("plan", ["true", "false"])
@pytest.mark.parametrize(
    ("phases", "given", "key"),
    [
        ("[supernet,supernet,measure]", "per_phase.supernet-2.model.patch_size=2", "per_phase.supernet-2"),
        (
            "[supernet,measure,retrain]",
            "per_phase.retrain={model: {abs_pos: false}, train: {from_checkpoint: supernet}}",
            "per_phase.retrain",
        ),
    ],
)
def test_weights_that_a_later_phase_cannot_take_are_refused_before_any_work(tmp_path, capsys, phases, given, key, plan):
    call = ["recipe=quickstart", f"phases={phases}", "sampler.name=uniform", given, f"output_dir={tmp_path / 'runs'}"]
    assert main("fit", [*call, f"plan={plan}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"lightning_tas.fit: {key}: checkpoint does not fit the network: ") and "model." in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("phases", "given", "message"),
    [
        ("[supernet,measure]", "per_phase.supernet.data.in_chans=3", "measure.data.in_chans: .*gives 1, .* has 3"),
        ("[supernet,search]", "per_phase.search.data={in_chans: 3}", "search.data.in_chans: .*gives 3, .* has 1"),
        (
            "[supernet,search]",
            "per_phase.supernet.data.search_val=0",
            "data.search_val: the phase 'supernet'",
        ),
        ("[supernet,supernet,search]", "per_phase.supernet.data.leak=true", "search_val: the phase 'supernet' was"),
        (
            "[supernet,search]",
            "per_phase.search.data.search_val=0.5",
            "data.search_val: the phase 'supernet'",
        ),
    ],
)
def test_images_that_the_supernet_cannot_take_or_has_seen_are_refused_before_any_work(
    study, tmp_path, capsys, phases, given, message
):
    call = [study, f"phases={phases}", "trainer.max_epochs=1", given]
    assert main("fit", [*call, f"output_dir={tmp_path / 'runs'}"]) == 2
    assert re.search(rf"^lightning_tas.fit: per_phase.*{message}", capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()
    assert main("fit", [*call, "plan=true"]) == 2
