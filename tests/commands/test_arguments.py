"""The command line: what is right gives the configuration meant, what is wrong gives status 2 and one message."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_tas.commands import recipes, schema
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.commands.entry import main
from lightning_tas.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
Q = "recipe=quickstart"

# Arguments, and what the message must say: the key or argument, and the way out.
MISTAKES: list[tuple[list[str], list[str]]] = [
    ([], ["recipe", "quickstart", "prenas_tiny"]),
    (["recipe=quickstrat"], ["recipe: 'quickstrat'", "Did you mean 'quickstart'"]),
    (["recipe="], ["recipe: the value is missing"]),
    (["recipe=./nowhere.yaml"], ["'./nowhere.yaml' does not exist", "quickstart"]),
    (["quickstart"], ["'quickstart' is not of the form key=value", "'recipe=quickstart'"]),
    ([Q, "plan"], ["'plan' is not of the form", "'plan=true'"]),
    (["--recipe", "quickstart"], ["'--recipe' is not an option", "key=value"]),
    (["-p", Q], ["'-p' is not an option"]),
    ([Q, "data.batchsize=3"], ["data.batchsize: no such key", "Did you mean 'data.batch_size'"]),
    ([Q, "batch_size=3"], ["batch_size: no such key", "Did you mean 'data.batch_size'"]),
    ([Q, "dta.batch_size=3"], ["dta.batch_size: no such key", "Did you mean 'data.batch_size'"]),
    ([Q, "data.batch_size.x=3"], ["data.batch_size.x: no such key"]),
    ([Q, "+new.key=1"], ["new.key: no such key"]),
    ([Q, "+data.batch_size=1"], ["not added", "write data.batch_size=value"]),
    ([Q, "++data.batch_size=1"], ["not added", "write data.batch_size=value"]),
    ([Q, "~data.batch_size"], ["not added or removed", "write data.batch_size=value"]),
    ([Q, "seed=0", "seed=1"], ["seed: given twice", "'seed=0'", "'seed=1'"]),
    ([Q, "train.lr=1,2"], ["train.lr: '1,2' is several values", "[a,b]"]),
    ([Q, "space={embed_dim:[3"], ["space: '{embed_dim:[3' cannot be read", "quote it"]),
    ([Q, "data=digits"], ["data: 'digits' is not valid, it is a group", "data.name"]),
    ([Q, "data={bach_size: 3}"], ["data.bach_size: no such key", "Did you mean 'data.batch_size'"]),
    ([Q, "trainer.max_epochs=ten"], ["trainer.max_epochs: 'ten'", "a whole number"]),
    ([Q, "trainer.max_epochs=2.5"], ["trainer.max_epochs: 2.5", "a whole number"]),
    ([Q, "trainer.max_epochs=true"], ["trainer.max_epochs: True", "a whole number"]),
    ([Q, "trainer.max_epochs=null"], ["trainer.max_epochs: None", "a whole number"]),
    ([Q, "trainer.max_epochs=-1"], ["trainer.max_epochs: -1", "1 or above"]),
    ([Q, "train.lr=fast"], ["train.lr: 'fast'", "a number"]),
    ([Q, "train.lr=0"], ["train.lr: 0", "above 0"]),
    ([Q, "train.betas=[0.9]"], ["train.betas"]),
    ([Q, "train.betas=[a,b]"], ["train.betas", "a list of numbers"]),
    ([Q, "plan=perhaps"], ["plan: 'perhaps'", "true or false"]),
    ([Q, "seed=-1"], ["seed: -1", "0 or above"]),
    ([Q, "phases=select"], ["phases: 'select'", "a list of names"]),
    ([Q, "phases=[selec]"], ["phases: 'selec'", "Did you mean 'select'"]),
    ([Q, "phases=[]"], ["phases: empty", "supernet"]),
    ([Q, "phases=[measure,measure]"], ["phases: 'measure' is listed twice"]),
    ([Q, "logger=wanbd"], ["logger: 'wanbd'", "Did you mean 'wandb'"]),
    ([Q, "logger=[csv,wanbd]"], ["logger: 'wanbd'", "Did you mean 'wandb'"]),
    ([Q, "logger=3"], ["logger: 3", "wandb"]),
    ([Q, "wandb.mode=of"], ["wandb.mode: 'of'", "offline"]),
    ([Q, "trainer.precision=bf17"], ["trainer.precision: 'bf17'", "Did you mean 'bf16'"]),
    ([Q, "trainer.precision=8"], ["trainer.precision: 8", "32-true"]),
    ([Q, "trainer.strategy=dpp"], ["trainer.strategy: 'dpp'", "Did you mean 'ddp'"]),
    ([Q, "trainer.accelerator=gpus"], ["trainer.accelerator: 'gpus'", "Did you mean 'gpu'"]),
    ([Q, "trainer.devices=0"], ["trainer.devices: 0", "auto"]),
    ([Q, "trainer.devices=[]"], ["trainer.devices: []", "auto"]),
    ([Q, "trainer.devices=many"], ["trainer.devices: 'many'", "auto"]),
    ([Q, "trainer.limit_train_batches=1.5"], ["trainer.limit_train_batches: 1.5", "share"]),
    ([Q, "trainer.limit_val_batches=-1"], ["trainer.limit_val_batches: -1", "number of batches"]),
    ([Q, "trainer.accumulate_grad_batches=0"], ["trainer.accumulate_grad_batches: 0", "1 or above"]),
    ([Q, "checkpoint.every_n_steps=0"], ["checkpoint.every_n_steps: 0", "1, 2, ..."]),
    ([Q, "sampler.name=balancd"], ["sampler.name: 'balancd'", "Did you mean 'balanced'"]),
    ([Q, "sampler.name=nowhere:mine"], ["sampler.name: 'nowhere:mine' cannot be imported"]),
    ([Q, "sampler.source=space"], ["sampler.source: 'space'", "'balanced'", "sampler.name=uniform"]),
    ([Q, "sampler.source=spce"], ["sampler.source: 'spce'", "Did you mean 'space'"]),
    ([Q, "phases=[supernet]", "sampler.name=uniform", "sampler.source=candidates"], ["sampler.source", "'select'"]),
    ([Q, "trainer.deterministic=wran"], ["trainer.deterministic: 'wran'", "Did you mean 'warn'"]),
    ([Q, "sampler.reduce=avg"], ["sampler.reduce: 'avg'", "mean, sum"]),
    ([Q, "sampler.middle=-1"], ["sampler.middle: -1", "0 or above"]),
    ([Q, "select.mode=papr"], ["select.mode: 'papr'", "Did you mean 'paper'"]),
    ([Q, "select.unit=params"], ["select.unit: 'params'", "Did you mean 'Mparams'"]),
    ([Q, "select.allocation=dynamic"], ["select.allocation: 'dynamic'", "dp"]),
    ([Q, "select.margin=0"], ["select.margin: 0", "above 0"]),
    ([Q, "select.low=3", "select.high=2"], ["select.low: 3", "select.high: 2"]),
    ([Q, "select.loss=ce"], ["select.loss: 'ce'", "select.images=data"]),
    ([Q, "model.pool=max"], ["model.pool: 'max'", "avg"]),
    ([Q, "model.patch_size=0"], ["model.patch_size: 0", "1 or above"]),
    ([Q, "model.drop_path_rate=1.0"], ["model.drop_path_rate: 1.0", "below 1"]),
    ([Q, "data.batch_size=0"], ["data.batch_size: 0"]),
    ([Q, "data.crop=centre"], ["data.crop: 'centre'", "none"]),
    ([Q, "data.img_size=[8]"], ["data.img_size: [8]"]),
    ([Q, "ckpt=nowhere"], ["ckpt: 'nowhere' does not exist"]),
    ([Q, "train.from_checkpoint=nowhere.ckpt"], ["train.from_checkpoint: 'nowhere.ckpt' does not exist"]),
    ([Q, "source=autofromer"], ["source: 'autofromer'", "Did you mean 'autoformer'"]),
    (["config=nowhere.yaml"], ["config: 'nowhere.yaml' does not exist"]),
    (["config=x.yaml", Q], ["config", "not both"]),
]


@pytest.mark.parametrize(("argv", "words"), MISTAKES, ids=[" ".join(argv) or "nothing" for argv, _ in MISTAKES])
def test_mistake(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    status = main("fit", [*argv, *([f"output_dir={tmp_path}"] if argv else [])])
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("lightning_tas.fit: ") and err.count("\n") == 1 and "Traceback" not in err
    for word in words:
        assert word in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_command_that_needs_a_checkpoint_says_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, []) == 2
    assert "ckpt" in capsys.readouterr().err


def test_in_a_process(tmp_path: Path) -> None:
    """The real thing: exit status, no traceback, nothing written."""
    call = [sys.executable, "-m", "lightning_tas.fit", "recipe=quickstrat", f"output_dir={tmp_path / 'runs'}"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lightning_tas.fit: recipe: 'quickstrat'") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_key_keeps_its_name() -> None:
    """The command line is a promise: a key that goes away or appears is a decision, recorded here."""
    top = {key.partition(".")[0] for key in schema.all_keys()}
    own = {"recipe", "config", "seed", "run", "output_dir", "resume", "ckpt", "arch", "source", "space", "phases"}
    groups = {"wandb", "data", "model", "train", "trainer", "sampler", "select", "checkpoint", "scoring", "bench"}
    groups |= {"search", "limits"}
    assert top == own | {"plan", "smoke", "trust", "weights", "logger", "per_phase"} | groups
    for key in ("data.name", "data.root", "data.batch_size", "trainer.max_epochs", "trainer.devices"):
        assert key in schema.all_keys()


def test_overrides_reach_the_configuration() -> None:
    config = config_from(
        "fit",
        [
            "recipe=prenas_tiny",
            "seed=7",
            "train.lr=1e-3",
            "train.betas=[0.8,0.9]",
            "trainer.devices=[0,1]",
            "trainer.limit_train_batches=3",
            "trainer.limit_val_batches=0.5",
            "data.img_size=[32,64]",
            "data.root=/a path/with=signs/it's (here)\\",
            "run=20240101",
            "logger=[csv,wandb]",
            "ckpt=.",
            "space={extends: autoformer_tiny, depths: [12, 13]}",
            "arch={family: autoformer, stages: []}",
        ],
    )
    assert (config.recipe, config.seed, config.train.lr) == ("prenas_tiny", 7, 1e-3)
    assert config.train.betas == [0.8, 0.9]
    assert config.trainer.devices == [0, 1]
    assert config.trainer.limit_train_batches == 3 and isinstance(config.trainer.limit_train_batches, int)
    assert config.trainer.limit_val_batches == 0.5
    assert config.data.img_size == [32, 64]
    assert config.data.root == "/a path/with=signs/it's (here)\\"
    assert config.run == "20240101"
    assert config.logger == ["csv", "wandb"]
    assert config.ckpt == "."
    assert config.space == {"extends": "autoformer_tiny", "depths": [12, 13]}
    assert config.arch == {"family": "autoformer", "stages": []}
    assert config.train.weight_decay == 0.02, "what is not overridden stays the recipe's"


def test_names_and_paths_need_no_quotes() -> None:
    config = config_from("fit", [Q, "phases=[retrain]", "arch=runs/my run (2)/result.json@0.3M", "space='a=b.yaml'"])
    assert (config.arch, config.space) == ("runs/my run (2)/result.json@0.3M", "a=b.yaml")


def test_a_users_file_inherits(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("defaults: [quickstart]\ndata: {batch_size: 32}\ntrain: {lr: 5e-4}\n")
    # The name of a packaged recipe, to see that neither hides the other.
    mine = tmp_path / "prenas_tiny.yaml"
    mine.write_text("defaults: [./base.yaml, _self_]\nspace: autoformer_tiny\ntrain: {lr: 3e-4}\n")
    config = config_from("fit", [f"recipe={mine}", "train.warmup_epochs=2"])
    parent = config_from("fit", [Q])
    assert config.recipe == "prenas_tiny"
    assert config.space == "autoformer_tiny", "a name replaces an inherited mapping"
    assert (config.data.batch_size, config.train.lr, config.train.warmup_epochs) == (32, 3e-4, 2)
    assert config.data.crop == parent.data.crop and config.trainer == parent.trainer
    own_space = tmp_path / "own_space.yaml"
    own_space.write_text("defaults: [quickstart]\nspace: {extends: autoformer_tiny, depths: [12]}\n")
    assert config_from("fit", [f"recipe={own_space}"]).space == {"extends": "autoformer_tiny", "depths": [12]}
    hydra_style = tmp_path / "hydra_style.yaml"
    hydra_style.write_text("defaults:\n  - recipe: quickstart\n  - _self_\ntrain:\n  lr: ${train.min_lr}\n")
    assert config_from("fit", [f"recipe={hydra_style}"]).train.lr == parent.train.min_lr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [quickstrat]", ["mine.yaml: defaults: 'quickstrat'", "Did you mean 'quickstart'"]),
        ("defaults: [./mine.yaml]", ["inherits from itself"]),
        ("defaults: 3", ["defaults: 3", "a list of recipes"]),
        ("data: {batchsize: 3}", ["mine.yaml: data.batchsize: no such key", "Did you mean 'data.batch_size'"]),
        ("data: {batch_size: big}", ["mine.yaml: data.batch_size: 'big'", "a whole number"]),
        ("data: digits", ["mine.yaml: data: 'digits'", "group"]),
        ("data: {name: digits\n", ["mine.yaml is not valid YAML"]),
        ("seed: 1\nseed: 2\n", ["mine.yaml is not valid YAML", "seed"]),
        ("- seed\n", ["mine.yaml must be a mapping"]),
        ("# nothing yet\n", ["mine.yaml holds no settings"]),
        ("train: {lr: '${train.nothing}'}", ["train.lr", "nothing"]),
        ("sampler: {name: balancd}", ["sampler.name: 'balancd'"]),
    ],
)
def test_a_users_file_with_a_mistake(
    text: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    assert main("fit", [f"recipe={mine}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("name", list(recipes.packaged()))
def test_config_yaml_repeats_a_run(name: str, tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    argv = [f"recipe={name}", "seed=3", "smoke=true", "trainer.max_epochs=5", "data.root=/some where"]
    config = config_from("fit", argv)
    saved.write_text(to_yaml(config))
    again = config_from("fit", [f"config={saved}"])
    assert asdict(again) == asdict(config), "also what the command line overrode of a smoke run"
    assert isinstance(again, Config)
    # The folder of the run does as well, and a change on top is a change.
    other = config_from("fit", [f"config={tmp_path}", "seed=4", "run=b"])
    assert (other.seed, other.run, other.recipe) == (4, "b", name)


def test_resume_and_ckpt_take_the_configuration_of_their_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart" / "a"
    checkpoint = run / "phases" / "01-supernet" / "checkpoints" / "final.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    config = config_from("fit", [Q, "seed=5", "run=a", "arch=mine.json", "data.batch_size=16"])
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "study.json").write_text("{}")
    resumed = config_from("fit", [f"resume={run}"])
    assert (resumed.resume, resumed.seed, resumed.data.batch_size, resumed.arch) == (str(run), 5, 16, "mine.json")
    evaluated = config_from("evaluate", [f"ckpt={checkpoint}", "data.eval_batch_size=7"])
    assert (evaluated.recipe, evaluated.ckpt, evaluated.data.batch_size) == ("quickstart", str(checkpoint), 16)
    assert (evaluated.arch, evaluated.data.eval_batch_size) == (None, 7)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        (["arch=autoformer_t"], ["arch"]),
        (["ckpt=.", "weights=ema"], ["ckpt", "weights"]),
        (["source=timm"], ["source"]),
        (["arch=null", "ckpt=null", "weights=auto"], []),
        (["phases=[measure]", "ckpt=.", "weights=ema"], []),
        (["phases=[retrain]", "ckpt=.", "arch=autoformer_t", "source=timm"], []),
        (["train.from_checkpoint=.", "weights=live"], []),
    ],
)
def test_networks_and_weights_that_no_phase_takes_are_told(given: list[str], ignored: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config_from("fit", [Q, *given])
    told = [str(one.message).partition(" is ignored: ")[0] for one in caught]
    assert told == ignored


def test_a_folder_of_runs_is_no_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^resume: .* is not a run, nor lies in one"):
        config_from("fit", [f"resume={tmp_path}"])


def test_a_damaged_config_yaml_is_named(tmp_path: Path) -> None:
    """A digit that became another one is valid: other images, another rate."""
    run, text = tmp_path / "a", to_yaml(config_from("fit", [Q]))
    run.mkdir()
    (run / "study.json").write_text("{}")
    for place in [*range(3, len(text), 97), len(text) - 2]:
        (run / "config.yaml").write_text(text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
        with pytest.raises(UserError, match=r"config\.yaml"):
            config_from("evaluate", [f"ckpt={run}"])
    edited = "".join(line for line in text.splitlines(keepends=True) if "sha256" not in line)
    (run / "config.yaml").write_text(edited.replace("seed: 0", "seed: 7"))
    assert config_from("evaluate", [f"ckpt={run}"]).seed == 7


def test_an_error_of_the_command_itself_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_tas.commands import fit

    def run(config: Config) -> None:
        raise UserError("arch: no such network")

    monkeypatch.setattr(fit, "run", run)
    assert main("fit", [Q]) == 2
    monkeypatch.setattr(fit, "run", lambda config: None)
    assert main("fit", [Q]) == 0
